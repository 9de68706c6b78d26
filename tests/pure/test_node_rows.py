"""Batches that decode some rows at a time: what other models' answers wait for, who gets on, and what is kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from driver_builders import Rig, expected
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_builders import make_hosting, make_node, make_work, run_turns, serve_memory

from dovetail.node.events import Turn
from dovetail.node.node import Node
from dovetail.policy import rows
from dovetail.policy import turn as turns
from dovetail.policy.compositions import Composition
from dovetail.policy.headroom import INFINITY, Refusal
from dovetail.policy.latency import Curve, LatencyModel, Surface
from dovetail.policy.lateness import ServeLate
from dovetail.policy.parts import FEWEST_TOKENS, SMOOTH_TOKENS
from dovetail.policy.rounds import LEAST_SINGLES, WORTH_SPLITTING, decode_limit_s
from dovetail.policy.work import Work
from dovetail.sched.blocks import BlockPool
from dovetail.sched.scheduler import Scheduler, SchedulerConfig
from dovetail.sched.sequence import sequences_of
from dovetail.sched.turn import Outcome, RowOutcome
from dovetail.sim.baselines import Unlimited
from dovetail.sim.compositions import SLINFER
from dovetail.sim.storm import check_node, run_storm
from dovetail.types import Request, SamplingParams

WHOLE = SLINFER.having(
    max_silence_s=2.0, part_s=0.1, pack_prompts=True, smooth_answers=True, lateness=ServeLate(), sharing=Unlimited()
)
SPLIT = WHOLE.having(split_decodes=True)
SINGLE_S = 0.01  # an iteration of one; each further one takes a third of that


def make_compute_bound() -> LatencyModel:
    curve = Curve([(1, SINGLE_S), (1001, SINGLE_S + 1000 * SINGLE_S / 3)])
    return LatencyModel(Curve([(1, SINGLE_S), (1024, 1024 * SINGLE_S / 3)]), Surface([(16, curve), (4096, curve)]))


HOSTING = replace(make_hosting(weight_gib=1.0, kv_kib=16), latency=make_compute_bound())


def batch(
    node: Node, model: str, first: int, count: int, *, is_strict: bool = False, tpot_s: float = 0.25
) -> list[Work]:
    """So many requests of the model, each with its first token."""
    works = [make_work(first + number, model, 16, ttft_s=60.0, tpot_s=tpot_s) for number in range(count)]
    refuses, node.admit.timing.refuses = node.admit.timing.refuses, lambda *_: None  # type: ignore[method-assign]
    for work in works:
        work.is_strict = is_strict
        there = [one.id for one in node.instances.values() if one.model == model]
        answer = node.join(there[0], work, 0.0) if there else node.start(work, 0.0)
        assert not isinstance(answer, Refusal)
        serve_memory(node, 0.0)
    while any(one.waiting for one in node.instances.values()):
        assert node.next_turn(0.0) is not None
        node.turn_done(0.0, [])
        serve_memory(node, 0.0)
    node.admit.timing.refuses = refuses  # type: ignore[method-assign]
    return works


def longest_gap_s(turns: list[tuple[float, Turn]], model: str) -> float:
    ends = [end for end, turn in turns if turn.instance.model == model]
    return max(later - earlier for earlier, later in pairwise(ends))


def tokens(node: Node, works: list[Work]) -> list[int]:
    places = {work.id: one for one in node.instances.values() for work in one.works()}
    return [places[work.id].produced(work) for work in works]


@pytest.mark.parametrize("composition", [WHOLE, SPLIT], ids=["whole", "split"])
def test_an_answer_beside_a_flood_of_answers_waits_for_some_of_them(composition: Composition) -> None:
    node = make_node(hosting=HOSTING, composition=composition)
    flood, beside = batch(node, "a", 0, 60), batch(node, "b", 100, 1)
    before = tokens(node, flood)
    turns = run_turns(node, 8.0)
    gap_s, limit_s = longest_gap_s(turns, "b"), LEAST_SINGLES * WORTH_SPLITTING * SINGLE_S
    assert (gap_s <= SINGLE_S + limit_s + 1e-9) is (composition is SPLIT)
    produced = [after - early for early, after in zip(before, tokens(node, flood), strict=True)]
    assert min(produced) > 5
    assert max(produced) - min(produced) <= 1, "rows take turns"
    assert not beside[0].late_tokens


@pytest.mark.parametrize("is_strict", [False, True], ids=["unpromised", "promised"])
def test_an_answer_beside_a_flood_of_prompts_waits_for_a_few_tokens_of_them_unless_they_were_promised_something(
    is_strict: bool,
) -> None:
    """Four tokens take 20 ms here, sixteen 60; the answer's own 10. Who was promised a time is played in the large."""
    node = make_node(hosting=HOSTING, composition=SPLIT)
    batch(node, "b", 100, 1)
    batch(node, "a", 0, 1)
    for number in range(1, 5):
        work = make_work(number, "a", 160, ttft_s=60.0, tpot_s=0.25)
        work.is_strict = is_strict
        assert node.join(1, work, 0.0) is None
        serve_memory(node, 0.0)
    done = run_turns(node, 2.0)
    parts = {share.tokens for _, turn in done for share in turn.prompts}
    assert parts == {FEWEST_TOKENS if is_strict else SMOOTH_TOKENS}
    part_s = HOSTING.latency.prefill_s(max(parts)) * 1.1  # attending to what was before it takes a little
    assert longest_gap_s(done, "b") <= SINGLE_S + max(part_s, LEAST_SINGLES * WORTH_SPLITTING * SINGLE_S)


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_flood_of_short_prompts_comes_along_only_as_far_as_an_answer_may_wait(is_strict: bool) -> None:
    """Where reading the weights is most of an iteration, prompts had better share it: promised ones do."""
    latency = replace(HOSTING.latency, prefill=Curve([(1, 0.01), (4, 0.011), (16, 0.016), (32, 0.022), (1024, 0.4)]))
    node = make_node(hosting=replace(HOSTING, latency=latency), composition=SPLIT)
    batch(node, "b", 100, 1)
    batch(node, "a", 0, 1, tpot_s=60.0)
    node.admit.timing.refuses = lambda *_: None  # type: ignore[method-assign]
    for number in range(24):
        work = make_work(200 + number, "a", 4, ttft_s=60.0, tpot_s=60.0)
        work.is_strict = is_strict
        assert node.join(1, work, 0.0) is None
        serve_memory(node, 0.0)
    done = run_turns(node, 1.0)
    packed = max(len(turn.prompts) for _, turn in done)
    assert packed > 6 if is_strict else packed <= 4
    if not is_strict:
        assert longest_gap_s(done, "b") <= SINGLE_S + 1.01 * LEAST_SINGLES * 0.011


def test_a_batch_that_is_alone_or_beside_its_like_decodes_whole() -> None:
    alone = make_node(hosting=HOSTING, composition=SPLIT)
    batch(alone, "a", 0, 60)
    alike = make_node(hosting=HOSTING, composition=SPLIT)
    batch(alike, "a", 0, 40)
    batch(alike, "b", 100, 42)
    for node in (alone, alike):
        assert all(turn.rows is None for _, turn in run_turns(node, 2.0))


def test_several_floods_share_what_one_may_take() -> None:
    node = make_node(hosting=HOSTING, composition=SPLIT)
    batch(node, "a", 0, 60)
    batch(node, "b", 100, 60)
    batch(node, "c", 200, 1)
    assert longest_gap_s(run_turns(node, 8.0), "c") <= SINGLE_S + 2 * LEAST_SINGLES * WORTH_SPLITTING * SINGLE_S
    assert decode_limit_s(SINGLE_S, [0.01] * 7) == pytest.approx(0.07)
    assert decode_limit_s(SINGLE_S, [0.01, *[0.5] * 6]) == pytest.approx(LEAST_SINGLES * SINGLE_S)


def test_whoever_asked_for_a_pace_has_it_though_others_wait() -> None:
    """Twenty rows take 73 ms, 11 more the answer beside them: at 0.2 s a token that is no time for many parts."""
    node = make_node(hosting=HOSTING, composition=SPLIT)
    strict = batch(node, "a", 0, 20, is_strict=True, tpot_s=0.2)
    patient = batch(node, "a", 50, 40)
    batch(node, "b", 100, 1)
    before = tokens(node, [*strict, *patient])
    for work, produced in zip(strict, before, strict=False):
        work.first_due_s = work.tpot_s - work.tpot_s * produced  # none is ahead of its pace
    node.instances[0].refresh()
    turns = run_turns(node, 8.0)
    assert any(turn.rows is not None for _, turn in turns)
    assert not any(work.late_tokens for work in strict)
    gained = [after - early for early, after in zip(before, tokens(node, [*strict, *patient]), strict=True)]
    assert min(gained[:20]) >= 39
    assert min(gained[20:]) > 3


def test_a_flood_that_asked_for_a_pace_is_split_as_far_as_that_allows() -> None:
    """Thirty rows take 107 ms of the 300 that they asked for: all at once nobody else need wait for them."""
    node = make_node(hosting=HOSTING, composition=SPLIT)
    flood = batch(node, "a", 0, 30, is_strict=True, tpot_s=0.3)
    batch(node, "b", 100, 1)
    for work, produced in zip(flood, tokens(node, flood), strict=True):
        work.first_due_s = work.tpot_s - work.tpot_s * produced
    node.instances[0].refresh()
    turns = run_turns(node, 8.0)
    assert not any(work.late_tokens for work in flood)
    settled = [(end, turn) for end, turn in turns if end > 1.0]
    assert longest_gap_s(settled, "b") < 0.06


@pytest.mark.parametrize("composition", [WHOLE, SPLIT], ids=["whole", "split"])
def test_who_did_not_ask_for_a_pace_gets_one_that_is_kept(composition: Composition) -> None:
    """Else everybody who comes would be refused, because somebody is late."""
    node = make_node(hosting=HOSTING, composition=composition)
    flood = batch(node, "a", 0, 40)
    batch(node, "b", 100, 1)
    now = run_turns(node, 8.0)[-1][0]
    (instance,) = (one for one in node.instances.values() if one.model == "a")
    assert max(work.tpot_s for work in flood) <= (2.0 if composition is SPLIT else 0.25)
    late = [work for work in flood if instance.due_s(work) < now]
    assert len(late) <= 2
    newcomer = make_work(300, "b", 16, arrival_s=now, ttft_s=2.0, tpot_s=1.0)
    assert not isinstance(node.join(node.instances[1].id, newcomer, now), Refusal)


def test_prompts_of_a_split_batch_and_of_its_neighbour_are_computed() -> None:
    node = make_node(hosting=HOSTING, composition=SPLIT)
    flood = batch(node, "a", 0, 60)
    batch(node, "b", 100, 1)
    node.admit.timing.refuses = lambda *_: None  # type: ignore[method-assign]
    coming = [make_work(201, "a", 200, ttft_s=30.0), make_work(202, "b", 200, ttft_s=30.0)]
    for work, instance in zip(coming, node.instances, strict=True):
        work.is_strict = False
        assert node.join(instance, work, 0.0) is None
        serve_memory(node, 0.0)
    turns = run_turns(node, 6.0)
    assert min(tokens(node, coming)) > 1
    assert longest_gap_s(turns, "b") < 0.1
    assert min(tokens(node, flood)) > 1


asked_works = st.lists(
    st.tuples(st.sampled_from("aaab"), st.integers(1, 30), st.booleans(), st.floats(0.1, 0.6)), min_size=2, max_size=6
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(asked_works)
def test_what_is_promised_beside_split_batches_is_kept(asked: list[tuple[str, int, bool, float]]) -> None:
    """Admitted by playing whole batches, served some rows at a time: strict ones are never late, and the books balance
    while requests come and end."""
    node, now, number = make_node(hosting=HOSTING, composition=SPLIT), 0.0, 0
    strict: list[Work] = []
    for model, count, is_strict, tpot_s in asked:
        for _ in range(count):
            work = Work(number, model, 16, now, 2.0, 0.95 * tpot_s, 0.95)
            work.is_strict, number = is_strict, number + 1
            there = [one.id for one in node.instances.values() if one.model == model]
            answer = node.join(there[0], work, now) if there else node.start(work, now)
            strict += [work] if is_strict and not isinstance(answer, Refusal) else []
            serve_memory(node, now)
        for _ in range(20):
            now = _one_turn(node, now)
    for _ in range(3000):
        now = _one_turn(node, now)
    assert all(not one.batch for one in node.instances.values()), "all have ended"
    assert not any(work.late_tokens for work in strict)


def _one_turn(node: Node, now: float) -> float:
    turn = node.next_turn(now)
    if turn is None:
        return now
    now += turn.seconds(turn.instance.hosting.latency)
    instance = turn.instance
    done = [instance.running[id] for id in turn.decoding if instance.produced(instance.running[id]) >= 29]
    node.turn_done(now, done)
    serve_memory(node, now)
    check_node(node)
    return now


def test_the_books_balance_in_storms_where_every_batch_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come, end, fail and move while their rows take turns."""
    found: list[bool] = []

    def spy(*given: Any) -> tuple[int, ...] | None:
        chosen = rows.split_rows(*given)
        found.append(chosen is not None)
        return chosen

    monkeypatch.setattr(rows, "WORTH_SPLITTING", 0.05)
    monkeypatch.setattr(rows, "decode_limit_s", lambda single_s, others_s: 0.5 * min(others_s))
    monkeypatch.setattr(turns, "split_rows", spy)
    assert run_storm([800_005, 800_019, 800_025]) == []  # where several models answer on one node
    assert sum(found) > 1000


def test_a_worker_decodes_some_rows_of_a_flood_and_everybody_has_the_right_text() -> None:
    """Executors that check every block, and a clock that iterations move."""
    gaps = {}
    for splits in (False, True):
        rig = Rig(
            "ab",
            token_s=SINGLE_S / 3,
            max_batch=64,
            max_kv_tokens=4000,
            latency=make_compute_bound(),
            split_decodes=splits,
            max_stall=INFINITY,
        )
        rig.submit("stream", "b", tokens=150)
        while len(rig.events.get(("stream", 0), [])) < 4:
            rig.finish_load() if rig.commands else rig.step()
        for number in range(48):
            rig.submit(f"flood{number}", "a", tokens=12)
        rig.run()
        spoken = rig.heard_s["stream", 0]
        gaps[splits] = max(later - earlier for earlier, later in pairwise(spoken))
        assert rig.tokens("stream") == expected("stream", tokens=150)
        for number in range(48):
            assert rig.tokens(f"flood{number}") == expected(f"flood{number}", tokens=12)
    assert gaps[False] > 12 * SINGLE_S
    assert gaps[True] < 5 * SINGLE_S


def test_what_a_device_has_begun_for_a_whole_batch_is_dropped_when_only_some_rows_are_asked_for() -> None:
    """Alone, a batch is computed ahead; then a stream of another model comes, and the batch is split."""
    rig = Rig(
        "ab", token_s=SINGLE_S / 3, max_batch=64, max_kv_tokens=4000, latency=make_compute_bound(), is_pipelined=True
    )
    for number in range(24):
        rig.submit(f"flood{number}", "a", tokens=40)
    while len(rig.events.get(("flood23", 0), [])) < 6:
        rig.finish_load() if rig.commands else rig.step()
    assert rig.executors[0].num_ahead > 3
    rig.submit("stream", "b", tokens=60)
    rig.run()
    assert rig.tokens("stream") == expected("stream", tokens=60)
    for number in range(24):
        assert rig.tokens(f"flood{number}") == expected(f"flood{number}", tokens=40)


def test_rows_that_were_begun_ahead_are_taken_up_together_or_not_at_all() -> None:
    scheduler = Scheduler(SchedulerConfig(100, max_batch=8, max_turn_tokens=64), BlockPool(32, 4))
    sampling = SamplingParams(max_tokens=9, seed=0)
    made = [sequences_of(Request(f"r{number}", "m", (1, 2, number), sampling), number)[0] for number in range(3)]
    for one in made:
        scheduler.enter(one)
    for _ in range(2):  # prompts, then a decode with another one ahead
        assert scheduler.turn_of(made) is not None
        ahead = scheduler.turn_after()
        scheduler.complete(Outcome(tuple(RowOutcome(one.id, 5) for one in made)))
    assert ahead is not None
    assert scheduler.resume_turn(ahead, made[:2]) is None
    scheduler.leave(made[2])
    resumed = scheduler.resume_turn(ahead, made[:2])
    assert resumed is not None
    assert [row.sequence for row in resumed.rows] == [0, 1]
