"""Prompts in parts: who goes first, how much of a prompt a turn computes, and that the books balance meanwhile."""

from __future__ import annotations

from itertools import pairwise

import pytest
from driver_builders import Rig, expected
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_builders import end_turn, make_hosting, make_node, make_work, serve_memory

from dovetail.node.events import Turn
from dovetail.node.node import Node
from dovetail.policy.compositions import SERVED, Composition
from dovetail.policy.headroom import Refusal
from dovetail.policy.latency import Curve, LatencyModel, Surface, mixed_s, prompts_s
from dovetail.policy.parts import FEWEST_TOKENS, SMOOTH_TOKENS, part_limit_s, saves, split_s, tokens_within
from dovetail.policy.placement import DeviceKind
from dovetail.policy.work import Work
from dovetail.sim.compositions import SLINFER

WHOLE = SLINFER.having(guard_decodes=True, max_silence_s=2.0, paced_from_first_token=False)
PARTS = WHOLE.having(part_s=0.1, pack_prompts=True)
SMOOTH = PARTS.having(smooth_answers=True)
LINEAR = make_hosting(prefill_s_per_k=1.0)  # some 1,000 tokens a second: nothing is saved by packing
FLAT = make_hosting(prefill_s_per_k=0.02)  # a thousand tokens take as long as one


def running(node: Node, work: Work, now: float = 0.0) -> Work:
    """With its first token."""
    assert isinstance(node.start(work, now), int)
    serve_memory(node, now)
    while work.id not in next(iter(node.instances.values())).running:
        assert node.next_turn(now) is not None
        node.turn_done(now, [])
    serve_memory(node, now)
    return work


def turns_until(node: Node, work: Work, now: float) -> list[tuple[float, Turn]]:
    """When each turn ends, until the work has its next token; turns take what they should."""
    produced, found = work.produced, []
    while work.produced == produced and len(found) < 500:
        turn = node.next_turn(now)
        assert turn is not None
        now = end_turn(node, turn, now)
        found.append((now, turn))
    return found


@pytest.mark.parametrize("composition", [WHOLE, PARTS, SMOOTH], ids=["whole", "parts", "smooth"])
def test_a_long_prompt_that_has_time_lets_the_answers_of_other_models_go_on(composition: Composition) -> None:
    node = make_node(hosting=LINEAR, composition=composition)
    running(node, make_work(0, "a", input_tokens=64, ttft_s=0.25, tpot_s=0.25))
    prompt = make_work(1, "b", input_tokens=1000, ttft_s=8.0)
    node.admit.timing.refuses = lambda *_: None  # type: ignore[method-assign]  # as if it had been there before
    assert isinstance(node.start(prompt, 0.0), int)
    serve_memory(node, 0.0)
    turns = turns_until(node, prompt, 0.0)
    begun = next(index for index, (_, turn) in enumerate(turns) if turn.prompts)
    spoken = [turns[begun - 1][0] if begun else 0.0, *(end for end, turn in turns[begun:] if turn.decodes)]
    longest_s = max(later - earlier for earlier, later in pairwise([*spoken, turns[-1][0]]))
    if composition is SMOOTH:
        assert longest_s <= 0.08  # a part of three times what splitting costs, and its own iteration
        assert turns[-1][0] < 3.0
    else:
        assert longest_s > 0.5  # it is far ahead of its pace, so that nothing is late


def test_whole_prompts_are_refused_where_parts_would_be_kept() -> None:
    answers = {}
    for composition in (WHOLE, PARTS):
        node = make_node(hosting=LINEAR, composition=composition)
        running(node, make_work(0, "a", input_tokens=64, ttft_s=0.25, tpot_s=0.25))
        answers[composition.turns.part_s] = node.start(make_work(1, "b", input_tokens=2000, ttft_s=8.0), 0.0)
    assert answers == {float("inf"): Refusal.NEIGHBOUR_LATE, 0.1: 1}


def test_what_is_admitted_beside_strict_answers_is_kept() -> None:
    """As played, so done: the prompt in time, and no answer beside it late."""
    node = make_node(hosting=LINEAR, composition=PARTS.having(slo_scale=1.0))
    beside = running(node, make_work(0, "a", input_tokens=64, ttft_s=0.25, tpot_s=0.1))
    for ttft_s in (2.0, 2.5, 2.8, 3.1, 3.4, 3.7):
        prompt = make_work(1, "b", input_tokens=2000, ttft_s=ttft_s)
        if isinstance(node.start(prompt, 0.0), int):
            break
    assert 2.5 < ttft_s < 3.7  # alone it takes 2 s
    serve_memory(node, 0.0)
    assert turns_until(node, prompt, 0.0)[-1][0] <= ttft_s
    assert not beside.late_tokens


def test_a_begun_prompt_is_not_overtaken_by_prompts_that_are_less_urgent() -> None:
    node = make_node(hosting=LINEAR, composition=PARTS)
    first, second = make_work(0, "a", 900, ttft_s=4.0), make_work(1, "b", 900, ttft_s=5.0)
    for work in (first, second):
        assert isinstance(node.start(work, 0.0), int)
    serve_memory(node, 0.0)
    models = [turn.instance.model for _, turn in turns_until(node, second, 0.0) if turn.prompts]
    assert models == sorted(models)
    assert len(models) > 10


def test_whoever_is_more_urgent_does_not_wait_for_the_end_of_a_prompt() -> None:
    node = make_node(kind=DeviceKind.CPU, hosting=make_hosting(in_place=True, prefill_s_per_k=1.0), composition=PARTS)
    long = make_work(0, "a", 3000, ttft_s=8.0)
    assert isinstance(node.start(long, 0.0), int)
    serve_memory(node, 0.0)
    turn = node.next_turn(0.0)
    assert turn is not None
    short = make_work(1, "b", 64, arrival_s=0.05, ttft_s=0.5)
    assert isinstance(node.start(short, 0.05), int)
    serve_memory(node, 0.05)
    node.turn_done(0.1, [])
    assert turns_until(node, short, 0.1)[-1][0] < 0.3
    assert long.computed > 0


def test_several_prompts_share_an_iteration_where_that_saves_time() -> None:
    counts = {}
    for name, hosting in (("flat", FLAT), ("linear", LINEAR)):
        node = make_node(hosting=hosting, composition=PARTS.having(part_s=1.0))
        instance = node.start(make_work(0, input_tokens=200, ttft_s=4.0), 0.0)
        assert isinstance(instance, int)
        for number in range(1, 5):
            assert node.join(instance, make_work(number, input_tokens=200, ttft_s=4.0), 0.0) is None
        serve_memory(node, 0.0)
        turn = node.next_turn(0.0)
        assert turn is not None
        counts[name] = len(turn.prompts)
        node.turn_done(0.02, [])
        assert len(node.instances[instance].running) == counts[name]
    assert counts == {"flat": 5, "linear": 1}


def test_decodes_and_prompts_may_share_an_iteration() -> None:
    node = make_node(hosting=LINEAR, composition=PARTS.having(mix_decodes=True))
    first = running(node, make_work(0, ttft_s=4.0))
    second = make_work(1, input_tokens=300, ttft_s=4.0)
    assert node.join(0, second, 0.0) is None
    serve_memory(node, 0.0)
    turns = turns_until(node, second, 0.0)
    assert all(turn.decodes for _, turn in turns)
    assert len(turns) > 2
    instance = node.instances[0]
    assert instance.produced(first) == 1 + len(turns)
    assert instance.produced(second) == 1
    assert instance.held_tokens == 0


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(0.001, 5.0)), min_size=1, max_size=6),
    st.integers(0, 4000),
    st.integers(1, 4000),
    st.floats(0.0, 2.0),
    st.sampled_from([SMOOTH_TOKENS, FEWEST_TOKENS]),
)
def test_a_part_fits_its_time_or_is_the_smallest(
    points: list[tuple[int, float]], start: int, pending: int, seconds: float, fewest: int
) -> None:
    values = dict(points)
    curve = Curve([(x, y) for x, y in zip(sorted(values), sorted(values.values()), strict=True)])
    latency = LatencyModel(curve, Surface([(1.0, Curve([(1, 0.01)]))]))
    tokens = tokens_within(latency, start, pending, seconds, fewest)
    assert 0 < tokens <= pending
    if tokens < pending:
        least_s = prompts_s(latency, [(start, fewest)])
        assert prompts_s(latency, [(start, tokens)]) <= max(seconds, least_s)
        assert tokens % fewest == 0
        assert pending - tokens >= fewest or fewest < FEWEST_TOKENS  # no crumbs


def test_packing_saves_only_where_more_tokens_take_hardly_longer() -> None:
    assert saves(FLAT.latency, 100, 100)
    assert not saves(LINEAR.latency, 400, 400)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 200), st.integers(1, 12), st.booleans()), min_size=1, max_size=8))
@pytest.mark.parametrize("mixes", [False, True], ids=["apart", "mixed"])
def test_every_request_gets_its_tokens_whatever_the_parts(mixes: bool, asked: list[tuple[int, int, bool]]) -> None:
    """Through the real scheduler, with an executor that insists on finding in each block what was computed into it."""
    rig = Rig("ab", token_s=0.0005, part_s=0.012, mix_decodes=mixes)
    for number, (prompt, tokens, is_second) in enumerate(asked):
        rig.submit(str(number), "b" if is_second else "a", prompt=prompt, tokens=tokens)
    rig.run(5000)
    for number, (prompt, tokens, _) in enumerate(asked):
        assert rig.tokens(str(number)) == expected(str(number), prompt, tokens)
    assert not any(instance.held_tokens for instance in rig.driver.home.node.instances.values())


def test_an_abort_between_two_parts_frees_what_was_computed() -> None:
    rig = Rig("a", token_s=0.001, part_s=0.02)
    rig.submit("long", prompt=1500)
    rig.finish_load()
    rig.step()
    (instance,) = rig.driver.home.node.instances.values()
    assert 0 < instance.waiting[0].computed < 1500
    rig.abort("long")
    assert instance.held_tokens == 0
    assert rig.driver.runners[instance.id].scheduler.pool.num_held == 0


def test_on_a_cpu_parts_are_bounded_too() -> None:
    hosting = make_hosting(in_place=True, prefill_s_per_k=2.0)
    node = make_node(kind=DeviceKind.CPU, composition=PARTS, hosting=hosting)
    work = make_work(0, input_tokens=900, ttft_s=8.0)
    assert isinstance(node.start(work, 0.0), int)
    serve_memory(node, 0.0)
    turns = turns_until(node, work, 0.0)
    limit_s = part_limit_s(0.1, split_s(hosting.latency))
    assert max(turn.seconds(hosting.latency) for _, turn in turns) <= 1.1 * limit_s < 0.2


@pytest.mark.parametrize("has_promise", [False, True], ids=["others have time", "somebody would be late"])
def test_a_prompt_that_goes_first_is_computed_first_unless_somebody_is_late_by_that(has_promise: bool) -> None:
    node = make_node(hosting=LINEAR, composition=SMOOTH)
    others = [make_work(0, "a", 500, ttft_s=1.2 if has_promise else 4.0), make_work(1, "b", 500, ttft_s=8.0)]
    first = make_work(2, "b", 400, ttft_s=6.0)
    first.goes_first = True
    for work in (*others, first):
        there = [one.id for one in node.instances.values() if one.model == work.model]
        answer = node.join(there[0], work, 0.0) if there else node.start(work, 0.0)
        assert not isinstance(answer, Refusal), answer
        serve_memory(node, 0.0)
    now, order = 0.0, []
    while len(order) < 3 and (turn := node.next_turn(now)) is not None:
        now = end_turn(node, turn, now)
        order += [work.id for work in (*others, first) if work.produced == 1 and work.id not in order]
    assert order == ([0, 2, 1] if has_promise else [2, 0, 1])
    assert first.record().goes_first is not has_promise


def test_an_answer_that_takes_longer_than_a_silence_may_last_goes_on_all_the_same() -> None:
    """No turn of it keeps that, alone on the device or not."""
    slow = make_hosting(decode_s=2.4, prefill_s_per_k=1.0)
    node = make_node(hosting=slow, composition=SMOOTH)
    resumed = make_work(0, "a", 64, ttft_s=60.0, tpot_s=8.0)
    resumed.produced, resumed.is_strict = 5, False
    assert isinstance(node.start(resumed, 0.0), int)


@pytest.mark.parametrize("kind", list(DeviceKind))
@pytest.mark.parametrize(("ttft_s", "has_time"), [(8.0, True), (0.5, False)], ids=["unhurried", "in a hurry"])
def test_a_server_mixes_decodes_with_prompts_that_have_time_on_gpus(
    kind: DeviceKind, ttft_s: float, has_time: bool
) -> None:
    """A token of those who run comes with each part, in no longer than the two would take one after the other."""
    hosting = make_hosting(prefill_s_per_k=1.0, in_place=kind is DeviceKind.CPU)
    node = make_node(kind=kind, hosting=hosting, composition=SERVED)
    first = running(node, make_work(0, ttft_s=4.0))
    second = make_work(1, input_tokens=300, ttft_s=ttft_s)
    assert node.join(0, second, 0.0) is None
    serve_memory(node, 0.0)
    turns = turns_until(node, second, 0.0)
    prompts = [turn for _, turn in turns if turn.prompts]
    mixed = [turn for turn in prompts if turn.decodes]
    assert len(mixed) == (len(prompts) if has_time and kind is DeviceKind.GPU else 0)
    if mixed:
        assert mixed == [turn for _, turn in turns]
        assert node.instances[0].produced(first) == 1 + len(turns)


def test_a_prompt_beside_running_requests_takes_less_than_one_after_the_other() -> None:
    """Milliseconds of the 8B shape on an H200: docs/measurements/gpu.md."""
    contexts = {
        256: {1: 4.22, 8: 4.82, 32: 5.01, 128: 6.83, 256: 9.58},
        1024: {1: 4.14, 8: 5.07, 32: 5.76, 128: 9.81, 256: 15.5},
    }
    rows = [(float(length), Curve([*points.items()])) for length, points in contexts.items()]
    latency = LatencyModel(Curve([(128, 5.6), (1024, 25.6), (3900, 98.3)]), Surface(rows))
    measured = {(32, 128): 6.6, (32, 512): 15.5, (128, 128): 9.4, (128, 256): 12.0, (250, 256): 15.85}
    for (batch, tokens), ms in measured.items():
        expected = mixed_s(latency, batch, 256 * batch, [(0, tokens)])
        assert expected == pytest.approx(ms, rel=0.12)
        assert ms * 0.95 < expected <= latency.decode_s(batch, 256 * batch) + latency.prefill_s(tokens)
