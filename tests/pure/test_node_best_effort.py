"""Best effort on a device: it has the gaps, rides along where that hardly shows, has its share, and gives way."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from sim_builders import end_turn, make_hosting, make_node, make_work, serve_memory

from dovetail.node.node import Node
from dovetail.policy.best_effort import seat_beside
from dovetail.policy.compositions import SERVED
from dovetail.policy.headroom import Refusal
from dovetail.policy.latency import GIB, Curve, LatencyModel, Surface
from dovetail.policy.work import RequestRecord, Work
from dovetail.sim.storm import check_node

# Ten rows take a fifth longer than one.
FLAT = LatencyModel(
    Curve([(1, 0.02), (1024, 0.4)]), Surface([(length, Curve([(1, 0.02), (11, 0.024)])) for length in (16, 4096)])
)
STEEP = LatencyModel(
    Curve([(1, 0.02), (1024, 0.4)]), Surface([(length, Curve([(1, 0.02), (2, 0.04)])) for length in (16, 4096)])
)
HOSTING = replace(make_hosting(weight_gib=1.0, kv_kib=16), latency=FLAT)


def spare_work(number: int, model: str = "a", input_tokens: int = 64) -> Work:
    work = make_work(number, model, input_tokens, ttft_s=300.0, tpot_s=60.0)
    work.is_best_effort, work.is_strict = True, False
    return work


def place(node: Node, work: Work, now: float = 0.0) -> int | Refusal:
    """On the instance of its model, or on a new one."""
    there = [one.id for one in node.instances.values() if one.model == work.model]
    answer = node.join(there[0], work, now) if there else node.start(work, now)
    serve_memory(node, now)
    return there[0] if answer is None else answer


class Done(NamedTuple):
    """A turn that was taken."""

    end_s: float
    is_best_effort: bool
    decoding: tuple[int, ...]


def run(node: Node, now: float, until_s: float) -> list[Done]:
    found = []
    while now < until_s and (turn := node.next_turn(now)) is not None:
        is_best_effort, decoding = turn.is_best_effort, tuple(turn.decoding)
        now = end_turn(node, turn, now)
        serve_memory(node, now)
        check_node(node)
        found.append(Done(now, is_best_effort, decoding))
    return found


def running(node: Node, work: Work, now: float = 0.0) -> Work:
    """With its first token."""
    assert isinstance(place(node, work, now), int)
    instance = next(one for one in node.instances.values() if work in one.works())
    while work.id not in instance.running and work.id not in instance.suspended:
        turn = node.next_turn(now)
        assert turn is not None
        node.turn_done(now, [])
    return work


def produced(node: Node, work: Work) -> int:
    return next(one.produced(work) for one in node.instances.values() if work in one.works())


def test_a_record_keeps_the_class() -> None:
    work = spare_work(1)
    assert isinstance(work.record(), RequestRecord)
    assert Work.of(work.record()).is_best_effort
    assert not Work.of(make_work(2).record()).is_best_effort


def test_it_has_the_device_while_nobody_else_wants_it() -> None:
    node = make_node(hosting=HOSTING, composition=SERVED)
    spare = running(node, spare_work(1))
    turns = run(node, 0.0, 1.0)
    assert produced(node, spare) > 20
    assert all(turn.is_best_effort for turn in turns)


def test_a_prompt_that_is_waited_for_comes_before_every_prompt_of_best_effort() -> None:
    node = make_node(hosting=HOSTING, composition=SERVED)
    for number in range(2):
        assert isinstance(place(node, spare_work(number, input_tokens=512)), int)
    assert isinstance(place(node, make_work(9, "a", 256)), int)
    turn = node.next_turn(0.0)
    assert turn is not None
    assert [share.work.id for share in turn.prompts] == [9]
    assert not turn.is_best_effort


@pytest.mark.parametrize(("latency", "rides"), [(FLAT, True), (STEEP, False)], ids=["cheap", "dear"])
def test_it_rides_along_where_an_iteration_hardly_takes_longer(latency: LatencyModel, rides: bool) -> None:
    node = make_node(hosting=replace(HOSTING, latency=latency), composition=SERVED.having(reserve=0.0))
    spare = running(node, spare_work(1))
    work = running(node, make_work(2, "a", 64))
    turns = run(node, 0.0, 1.0)
    assert {work.id in turn.decoding for turn in turns} == {True}
    assert any(spare.id in turn.decoding for turn in turns) is rides
    assert (spare.id in node.instances[0].suspended) is not rides


def test_nobody_rides_along_while_a_prompt_waits() -> None:
    node = make_node(hosting=HOSTING, composition=SERVED)
    spare, work = running(node, spare_work(1)), running(node, make_work(2, "a", 64))
    instance = node.instances[0]
    run(node, 0.0, 0.1)
    assert spare.id in instance.running
    assert isinstance(place(node, make_work(3, "b", 512), 0.1), int)
    seat_beside(list(node.instances.values()), node.device.rule)
    assert list(instance.running) == [work.id]
    assert list(instance.suspended) == [spare.id]


@pytest.mark.parametrize("reserve", [0.0, 0.05])
def test_it_has_its_share_of_the_time_and_no_more(reserve: float) -> None:
    node = make_node(hosting=replace(HOSTING, latency=STEEP), composition=SERVED.having(reserve=reserve))
    spare = running(node, spare_work(1, "b"))
    running(node, make_work(2, "a", 64))
    before, turns = produced(node, spare), run(node, 0.0, 20.0)
    ends = [0.0, *(turn.end_s for turn in turns)]
    spent_s = sum(end - begun for begun, end, turn in zip(ends, ends[1:], turns, strict=False) if turn.is_best_effort)
    assert spent_s / ends[-1] == pytest.approx(reserve / (1 + reserve), abs=0.01)
    assert (produced(node, spare) > before) is (reserve > 0.0)


def test_an_answer_that_is_ahead_is_not_held_back_to_its_pace() -> None:
    """Its next token has time; the one after the last would come later than its pace."""
    node = make_node(hosting=replace(HOSTING, latency=STEEP), composition=SERVED)
    spare = running(node, spare_work(1, "b"))
    work = running(node, make_work(2, "a", 64, ttft_s=60.0, tpot_s=0.035))
    work.first_due_s = 60.0
    before, turns = produced(node, spare), run(node, 0.0, 2.0)
    assert not any(turn.is_best_effort for turn in turns)
    assert produced(node, spare) == before


def test_suspended_ones_keep_their_blocks_and_their_tokens() -> None:
    node = make_node(hosting=replace(HOSTING, latency=STEEP), composition=SERVED.having(reserve=0.0))
    spare = running(node, spare_work(1))
    run(node, 0.0, 0.5)
    had, instance = produced(node, spare), node.instances[0]
    blocks = instance.used_blocks()
    work = running(node, make_work(2, "a", 16), 0.5)
    run(node, 0.5, 0.6)
    assert spare.id in instance.suspended
    assert (produced(node, spare), spare.computed) == (had, spare.known_tokens)
    assert instance.used_blocks() >= blocks
    node.withdraw(instance.id, work, 1.0)
    turns = run(node, 1.0, 1.2)
    assert all(turn.decoding == (spare.id,) for turn in turns)
    assert produced(node, spare) == had + len(turns)


def test_admission_counts_those_who_are_waited_for_only() -> None:
    """Forty answers would be too slow beside one more; of best effort they give way."""
    crowded = SERVED.having(paced_from_first_token=False)
    for number_of in (make_work, spare_work):
        node = make_node(hosting=replace(HOSTING, latency=STEEP), composition=crowded)
        refuses, node.admit.timing.refuses = node.admit.timing.refuses, lambda *_: None  # type: ignore[method-assign]
        for number in range(12):
            running(node, number_of(number, "a"))
        node.admit.timing.refuses = refuses  # type: ignore[method-assign]
        answer = place(node, make_work(99, "a", 16, tpot_s=0.1))
        assert (answer is Refusal.DECODE_OVERCOMMITTED) is (number_of is make_work)


def test_few_prompts_wait_on_an_instance() -> None:
    node = make_node(hosting=HOSTING, composition=SERVED)
    answers = [place(node, spare_work(number)) for number in range(4)]
    assert answers == [0, 0, Refusal.CONCURRENCY, Refusal.CONCURRENCY]


def fill(tokens: int, memory_gib: float = 3.0) -> Node:
    """A device that is full of best effort: one instance with requests of so many tokens each."""
    node = make_node(memory_gib=memory_gib, hosting=replace(HOSTING, kv_bytes_per_token=2**20), composition=SERVED)
    number = 0
    while not isinstance(place(node, work := spare_work(number, input_tokens=tokens)), Refusal):
        running_on(node, work)
        number += 1
    return node


def running_on(node: Node, work: Work) -> None:
    for _ in range(200):
        if work not in node.instances[0].patient:
            return
        turn = node.next_turn(0.0)
        assert turn is not None
        node.turn_done(0.0, [])
        serve_memory(node, 0.0)
    raise AssertionError("its prompt is never computed")


@pytest.mark.parametrize("model", ["a", "b"])
def test_it_gives_way_to_whoever_needs_its_memory_the_last_first(model: str) -> None:
    node = fill(200)
    there = sorted(work.id for work in node.instances[0].works())
    assert len(there) > 1
    assert isinstance(place(node, make_work(99, model, 100, ttft_s=60.0)), int)
    left = sorted(work.id for one in node.instances.values() for work in one.works() if work.is_best_effort)
    assert left == there[: len(left)] != there
    check_node(node)
    assert node.device.ledger.planned <= node.device.ledger.capacity == 3 * GIB


def test_weights_that_only_best_effort_uses_give_way_too() -> None:
    node = fill(200, memory_gib=2.0)
    assert isinstance(place(node, make_work(99, "b", 100, ttft_s=60.0)), int)
    assert [one.model for one in node.instances.values()] == ["b"]
    check_node(node)


def test_it_does_not_give_way_in_vain() -> None:
    node = fill(200)
    there = node.instances[0].best_effort
    assert place(node, make_work(99, "a", 4000, ttft_s=60.0)) is Refusal.MEMORY
    assert node.instances[0].best_effort == there


def test_best_effort_displaces_nobody() -> None:
    node = make_node(memory_gib=3.0, hosting=replace(HOSTING, kv_bytes_per_token=2**20), composition=SERVED)
    running(node, make_work(1, "a", 1000))
    assert place(node, spare_work(2, "b", 1000)) is Refusal.MEMORY
    assert [one.model for one in node.instances.values()] == ["a"]


def test_who_had_enough_in_gaps_has_no_further_share_beside_answers() -> None:
    node = make_node(hosting=HOSTING, composition=SERVED)
    running(node, spare_work(1, "b"))
    assert run(node, 0.0, 6.0)[-1].is_best_effort
    running(node, make_work(2, "a", 64, arrival_s=6.0), 6.0)
    turns = run(node, 6.0, 9.0)
    assert not any(turn.is_best_effort for turn in turns)


def test_its_prompts_are_computed_while_answers_of_the_same_model_go_on() -> None:
    """A decode in which it rode is its turn: then a prompt of its own is next."""
    node = make_node(hosting=HOSTING, composition=SERVED)
    running(node, make_work(99, "a", 64))
    waiting = [spare_work(number) for number in range(2)]
    for work in waiting:
        assert isinstance(place(node, work), int)
    run(node, 0.0, 6.0)
    assert not node.instances[0].patient, "all of them were computed"
    assert all(produced(node, work) > 1 for work in waiting)
