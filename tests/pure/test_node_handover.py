"""Answers that are handed over (L4): what the destination computes next, and what it waits for."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from sim_builders import make_hosting, make_node, make_work, serve_all

from dovetail.node import protocol
from dovetail.node.awaiting import MOST_S
from dovetail.node.events import SetTimer, Turn
from dovetail.node.instance import Instance
from dovetail.node.runtime import NodeRuntime
from dovetail.policy.compositions import SERVED
from dovetail.policy.latency import Curve, LatencyModel, Surface
from dovetail.policy.placement import Hosting
from dovetail.policy.work import FEW_TOKENS, RequestRecord

ROWS = 24  # answers that the destination has of its own
MOVING, MIGRATION = 100, 1
# Seconds that each token adds to an iteration of 20 ms: a few cores; a GPU; something between, where some rows take
# nearly as long as all of them.
DEAR, FREE, CHEAP = 0.008, 0.0, 0.0006


class Destination:
    def __init__(self, token_s: float, rows: int = ROWS) -> None:
        self.now = 0.0
        self.node = NodeRuntime(make_node("a", hosting=hosting(token_s), composition=SERVED))
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
        """The next one: after what is to be done before, or when the device has waited in vain."""
        turn = self.node.next_turn(self.now)
        if turn is None:
            self.now = max([self.now, *(one.at_s for one in self.node.outbox if isinstance(one, SetTimer))])
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

    def send(self, known: int, produced: int) -> None:
        """Tokens that it has got where it runs still."""
        more = record(MOVING, input_tokens=40, produced=produced)
        self.node.obey(protocol.CatchUp(more, MIGRATION, known), self.now)
        serve_all(self.node, self.now)

    def wait(self) -> float:
        """The device begins nothing; until when it wants to be asked again."""
        assert self.node.next_turn(self.now) is None
        timers = [one.at_s for one in self.node.outbox if isinstance(one, SetTimer)]
        assert self.node.next_turn(self.now) is None, "asked again, as a driver does when something was carried out"
        assert len(timers) == 1
        assert timers == [one.at_s for one in self.node.outbox if isinstance(one, SetTimer)]
        self.node.outbox.clear()
        return timers[0]

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


def test_one_that_takes_part_in_the_next_decode_does_not_wait_for_a_part_of_a_copy() -> None:
    there = caught_up(CHEAP)
    there.take(record(200, input_tokens=300, produced=50), hold=2)
    there.hand_over(known=14, produced=15)
    assert MOVING in there.instance.running
    assert there.begin().decodes


def test_one_that_is_handed_over_and_leaves_at_once_leaves_the_turn_to_others() -> None:
    there = Destination(CHEAP, rows=0)
    there.hold(produced=10)
    there.take(record(200, input_tokens=300, produced=50), hold=2)
    there.hand_over(known=10, produced=11)
    assert list(there.instance.running) == [MOVING]
    there.node.obey(protocol.Withdraw(MOVING), there.now)
    serve_all(there.node, there.now)
    assert [share.work.id for share in there.begin().prompts] == [200]


def test_one_that_is_handed_over_does_not_wait_for_a_copy_that_has_moved_before() -> None:
    there = Destination(DEAR)
    there.hold(produced=10)
    old = msgspec.structs.replace(record(200, input_tokens=300, produced=50), last_token_s=0.0)
    there.take(old, hold=2)
    there.hand_over(known=10, produced=12)
    assert [share.work.id for share in there.turn().prompts] == [MOVING]


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


def caught_up(token_s: float = CHEAP) -> Destination:
    """A device that has just decoded and then computed what came of one that is held."""
    there = Destination(token_s)
    there.hold(produced=10)
    while not there.turn().decodes:
        pass
    there.send(known=10, produced=14)
    there.turn()
    assert MOVING in there.instance.held
    return there


def test_a_device_that_has_caught_up_waits_for_no_longer_than_a_token_takes_there() -> None:
    there = caught_up()
    decode_s = there.instance.batch_s()
    until_s = there.wait()
    assert there.now < until_s <= there.instance.spoke_s + decode_s
    assert not [one for one in there.node.mailbox if isinstance(one, protocol.Idle)], "it waits, it is not idle"
    there.now = until_s
    there.node.timer(-1, -1, there.now)
    assert there.begin().decodes


def test_what_comes_while_a_device_waits_is_computed_at_once() -> None:
    there = caught_up()
    there.wait()
    there.now += 0.001
    there.send(known=14, produced=22)
    assert [(share.work.id, share.tokens) for share in there.turn().prompts] == [(MOVING, 8)]
    assert MOVING in there.instance.held
    there.hand_over(known=22, produced=23)
    there.turn()
    assert there.instance.produced(there.instance.running[MOVING]) == 24


def test_where_rows_are_dear_those_who_answer_go_on_a_few_at_a_time_and_nobody_waits() -> None:
    there = caught_up(DEAR)
    whole_s = there.instance.batch_s()
    told: list[int] = []
    while len(told) < ROWS:
        some = there.begin()
        assert some.rows is not None
        assert some.seconds(some.instance.hosting.latency) < 0.4 * whole_s
        told += some.rows
        there.end(some)
    assert len(set(told)) == ROWS, "everybody has a token before anybody has two"
    there.hand_over(known=14, produced=15)
    assert [share.work.id for share in there.turn().prompts] == [MOVING]
    assert there.begin().rows is None, "nothing is awaited any more"


def test_one_that_is_handed_over_is_not_computed_with_copies_of_others() -> None:
    there = Destination(DEAR)
    there.hold(produced=10)
    there.take(record(200, input_tokens=40, produced=10), hold=2)
    while 200 not in there.instance.held:
        there.turn()
    more = record(200, input_tokens=40, produced=40)
    there.node.obey(protocol.CatchUp(more, 2, 10), there.now)
    there.hand_over(known=10, produced=12)
    assert [share.work.id for share in there.turn().prompts] == [MOVING]


def test_a_device_whose_answers_have_waited_for_a_token_already_does_not_wait() -> None:
    there = Destination(CHEAP)
    there.hold(produced=10)
    there.send(known=10, produced=40)
    while MOVING not in there.instance.held:
        there.turn()
    assert there.now - there.instance.spoke_s > there.instance.batch_s()
    assert there.begin().decodes


def test_a_device_that_waits_for_one_that_is_withdrawn_goes_on() -> None:
    there = caught_up()
    there.wait()
    there.node.obey(protocol.Withdraw(MOVING, MIGRATION), there.now)
    assert there.begin().decodes


def test_while_an_answer_is_awaited_those_who_answer_go_on_and_prompts_that_have_time_wait() -> None:
    there = caught_up()
    since_s, decodes = there.now, 0
    there.take(record(200, input_tokens=300, produced=0))
    while not (turn := there.begin()).prompts:
        there.end(turn)
        decodes += 1
        assert decodes < 100
    assert decodes >= 1
    assert there.now >= since_s + MOST_S


def test_the_last_part_of_a_copy_does_not_come_before_an_answer_that_goes_on() -> None:
    there = Destination(FREE)
    there.hold(produced=10)
    there.take(record(200, input_tokens=300, produced=50), hold=2)
    there.hand_over(known=10, produced=14)
    assert MOVING in there.instance.running
    there.instance.waiting[0].computed = 330  # of 350
    there.instance.held_tokens += 330 + there.instance.hosting.block_tokens
    there.now += 0.01
    assert there.begin().decodes


def test_a_copy_has_as_many_tokens_as_hardly_take_longer_than_few() -> None:
    taken = {}
    for token_s in (DEAR, FREE):
        there = Destination(token_s, rows=0)
        there.take(record(200, input_tokens=300, produced=50), hold=2)
        there.instance.waiting[0].computed = 280  # of 350
        there.instance.held_tokens += 280 + there.instance.hosting.block_tokens
        (share,) = there.begin().prompts
        taken[token_s] = share.tokens
    assert taken == {DEAR: FEW_TOKENS, FREE: 70}
