"""Answers that are handed over (L4): what the destination computes next, and when it says that it has caught up."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from sim_builders import make_hosting, make_node, make_work, serve_all

from dovetail.node import protocol
from dovetail.node.events import Turn
from dovetail.node.instance import Instance
from dovetail.node.runtime import NodeRuntime
from dovetail.node.work import RequestRecord
from dovetail.policy.latency import Curve, LatencyModel, Surface
from dovetail.policy.placement import Hosting
from dovetail.policy.real import real_knobs

ROWS = 24  # answers that the destination has of its own
MOVING, MIGRATION = 100, 1
DEAR, FREE = 0.008, 0.0  # seconds that each token adds to an iteration of 20 ms: a few cores, a GPU


class Destination:
    def __init__(self, token_s: float, rows: int = ROWS) -> None:
        self.now = 0.0
        self.node = NodeRuntime(make_node("a", hosting=hosting(token_s), knobs=real_knobs("dovetail")))
        for id in range(rows):
            self.take(record(id, input_tokens=16, produced=0))
        while rows and len(self.instance.running) < rows:
            self.turn()

    @property
    def instance(self) -> Instance:
        (instance,) = self.node.node.instances.values()
        return instance

    def take(self, request: RequestRecord, hold: int = 0) -> None:
        instance = next(iter(self.node.node.instances), None)
        answer = self.node.answer(protocol.Propose(request, instance, hold), self.now)
        assert isinstance(answer, protocol.Accepted)
        serve_all(self.node, self.now)

    def begin(self) -> Turn:
        turn = self.node.next_turn(self.now)
        if turn is None:  # something was to be done before
            serve_all(self.node, self.now)
            turn = self.node.next_turn(self.now)
        assert turn is not None
        return turn

    def end(self, turn: Turn) -> list[protocol.Notice]:
        self.now += turn.seconds(turn.instance.hosting.latency)
        self.node.turn_ended(self.now, ())
        return serve_all(self.node, self.now)

    def turn(self) -> Turn:
        turn = self.begin()
        self.end(turn)
        return turn

    def hold(self, produced: int) -> None:
        """A copy, computed."""
        self.take(record(MOVING, input_tokens=40, produced=produced), hold=MIGRATION)
        while MOVING not in self.instance.held:
            self.turn()

    def hand_over(self, known: int, produced: int) -> None:
        last = msgspec.structs.replace(record(MOVING, input_tokens=40, produced=produced), last_token_s=self.now - 0.02)
        self.node.obey(protocol.CatchUp(last, MIGRATION, known, is_last=True), self.now)
        serve_all(self.node, self.now)


def hosting(token_s: float) -> Hosting:
    curve = Curve([(1, 0.02 + token_s), (1024, 0.02 + 1024 * token_s)])
    return replace(make_hosting(), latency=LatencyModel(curve, Surface([(512, curve), (2048, curve)])))


def record(id: int, input_tokens: int, produced: int) -> RequestRecord:
    work = make_work(id, "a", input_tokens, ttft_s=60.0, tpot_s=5.0)
    work.produced, work.is_strict = produced, False
    return work.record()


def test_where_rows_are_dear_one_that_is_handed_over_goes_on_by_itself_before_anybody_else() -> None:
    there = Destination(DEAR)
    there.hold(produced=10)
    running = there.begin()
    there.hand_over(known=10, produced=14)
    there.take(record(200, input_tokens=300, produced=0))  # and a prompt comes
    there.end(running)
    alone = there.begin()
    assert [(share.work.id, share.tokens) for share in alone.prompts] == [(MOVING, 4)]
    assert not alone.decodes
    there.end(alone)
    assert MOVING in there.instance.running
    assert there.instance.running[MOVING].produced == 15


def test_where_rows_cost_nothing_it_takes_part_in_the_next_decode() -> None:
    there = Destination(FREE)
    there.hold(produced=10)
    running = there.begin()
    there.hand_over(known=10, produced=14)
    there.take(record(200, input_tokens=300, produced=0))
    assert MOVING in there.instance.running
    there.end(running)
    assert there.instance.spoke_s < there.now, "it has had nothing from the iteration that it came in"
    assert there.begin().decodes


@pytest.mark.parametrize("token_s", [DEAR, FREE])
def test_a_destination_that_has_caught_up_says_how_long_it_is_busy(token_s: float) -> None:
    there = Destination(token_s)
    there.take(record(MOVING, input_tokens=12, produced=4), hold=MIGRATION)
    turn = there.begin()
    while MOVING not in there.instance.held:
        assert not [one for one in there.end(turn) if isinstance(one, protocol.CaughtUp)]
        turn = there.begin()
    (said,) = [one for one in serve_all(there.node, there.now) if isinstance(one, protocol.CaughtUp)]
    assert (said.request, said.hold, said.produced) == (MOVING, MIGRATION, 4)
    assert said.busy_s == turn.seconds(turn.instance.hosting.latency) > 0.0


def test_a_destination_that_has_nothing_else_to_do_says_so_at_once() -> None:
    idle = Destination(DEAR, rows=0)
    idle.take(record(MOVING, input_tokens=12, produced=4), hold=MIGRATION)
    said = []
    while idle.instance.waiting:
        said += idle.end(idle.begin())
    assert idle.node.next_turn(idle.now) is None
    assert idle.node.next_turn(idle.now) is None  # asked again, as a driver does when something was carried out
    said += serve_all(idle.node, idle.now)
    assert [one.busy_s for one in said if isinstance(one, protocol.CaughtUp)] == [0.0]


def test_one_that_is_handed_over_to_a_pool_that_is_full_gets_a_larger_one_and_does_not_wait_for_others_to_end() -> None:
    there = Destination(DEAR)
    there.hold(produced=10)
    while not there.instance.is_short(5):
        there.turn()
    there.hand_over(known=10, produced=14)
    assert MOVING not in there.instance.running, "rows are dear"
    there.turn()
    assert MOVING in there.instance.running


def test_several_that_are_handed_over_go_on_in_as_many_iterations_as_the_pool_has_room_for() -> None:
    there = Destination(DEAR, rows=0)
    for id in range(3):
        there.take(record(id, input_tokens=40, produced=10), hold=id + 1)
    while len(there.instance.held) < 3:
        there.turn()
    tight = (there.instance.used_blocks() + 1) * there.instance.hosting.block_tokens
    there.node.node.residency.resize(there.instance, tight)
    there.node.changed(there.now)
    serve_all(there.node, there.now)
    for id in range(3):
        last = msgspec.structs.replace(record(id, input_tokens=40, produced=22), last_token_s=there.now)
        there.node.obey(protocol.CatchUp(last, id + 1, 10, is_last=True), there.now)
    serve_all(there.node, there.now)
    while there.instance.waiting:
        there.turn()
    assert len(there.instance.running) == 3
