"""Answers that are smooth: an answer waits for one turn of each other model at most, and what is admitted is kept."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sim_builders import make_hosting, make_node, make_work, run_turns, serve_memory

from dovetail.node.node import Node
from dovetail.policy import shadow
from dovetail.policy.compositions import Composition
from dovetail.policy.headroom import INFINITY, Refusal
from dovetail.policy.latency import Curve, LatencyModel, Surface
from dovetail.policy.parts import lost_s, part_limit_s, split_s
from dovetail.policy.placement import Hosting
from dovetail.policy.rounds import SMOOTH_LIMIT, may_compute, next_to_answer, part_between_s
from dovetail.policy.work import Work
from dovetail.sim.compositions import SLINFER

SMOOTH = SLINFER.having(guard_decodes=True, max_silence_s=2.0, part_s=0.1, pack_prompts=True, smooth_answers=True)
LINEAR = make_hosting(prefill_s_per_k=1.0)  # some 1,000 tokens a second, a decode in 20 ms


@dataclass(eq=False)
class Model:
    name: str
    decode_s: float
    prompts_s: float  # left to compute
    is_answering: bool
    turned_s: float = 0.0
    prompted_s: float = 0.0
    spoke_s: float = INFINITY
    latest_s: float = INFINITY


models = st.lists(
    st.tuples(st.integers(5, 200), st.sampled_from([0, 300, 5000]), st.booleans()), min_size=1, max_size=5
)


def play(rotating: list[Model], turns: int) -> list[tuple[float, float, Model, bool]]:
    """(begin, end, whose, is a part) of each turn, in milliseconds; answers have no end."""
    now, parted_s, found = 0.0, -1.0, []
    for one in rotating:
        one.spoke_s = 0.0 if one.is_answering else INFINITY
    for _ in range(turns):
        answering = [one for one in rotating if one.is_answering]
        prompter = next((one for one in rotating if one.prompts_s), None)
        is_part = prompter is not None and may_compute(prompter, answering, parted_s)
        if prompter is not None and is_part:
            seconds = min(part_between_s(prompter, answering, 100, 2), prompter.prompts_s)
            one = prompter
            one.prompts_s -= seconds
            one.prompted_s += seconds
            parted_s = now + seconds
        elif answering:
            one = next_to_answer(answering, now)
            seconds, one.prompted_s, one.spoke_s = one.decode_s, 0.0, now + one.decode_s
        else:
            break
        found.append((now, now + seconds, one, is_part))
        now = one.turned_s = now + seconds
    return found


@settings(max_examples=50)
@given(models)
def test_an_answer_waits_for_one_turn_of_each_other_model_and_for_one_part(
    asked: list[tuple[int, int, bool]],
) -> None:
    rotating = [Model(f"m{number}", *one) for number, one in enumerate(asked)]
    turns = play(rotating, 80)
    for model in [one for one in rotating if one.is_answering]:
        spoken = [index for index, (_, _, one, is_part) in enumerate(turns) if one is model and not is_part]
        for earlier, later in pairwise(spoken):
            between = [(one, is_part) for _, _, one, is_part in turns[earlier + 1 : later] if one is not model]
            own = later - earlier - 1 - len(between)  # parts of its own prompts: as long as a token of it takes
            rounds = own + 1  # everyone else has a turn after each of its own
            names = [one.name for one, _ in between]
            assert all(names.count(name) <= rounds for name in names)
            if not own:
                assert sum(is_part for _, is_part in between) <= 1


@settings(max_examples=50)
@given(models)
def test_everybody_gets_on(asked: list[tuple[int, int, bool]]) -> None:
    rotating = [Model(f"m{number}", *one) for number, one in enumerate(asked)]
    turns = play(rotating, 80)
    tokens = Counter(one.name for _, _, one, is_part in turns if not is_part)
    parts = sum(is_part for _, _, _, is_part in turns)
    assert all(tokens[one.name] for one in rotating if one.is_answering)
    if any(one.prompts_s for one in rotating):  # they were never over
        assert not tokens or 2 * parts + 2 >= min(tokens.values())


def test_whoever_would_be_late_goes_first_unless_another_is_late_already() -> None:
    strict, patient = Model("strict", 0.02, 0.0, True, 1.0), Model("patient", 0.1, 0.0, True, 0.5)
    strict.latest_s, patient.latest_s = 2.1, 9.0
    assert next_to_answer([strict, patient], 2.0) is strict
    assert next_to_answer([strict, patient], 1.0) is patient
    patient.latest_s = 1.5
    assert next_to_answer([strict, patient], 2.0) is patient


# On a node


def answering(node: Node, work: Work) -> Work:
    """With its first token."""
    started = node.start(work, 0.0)
    assert isinstance(started, int)
    serve_memory(node, 0.0)
    while work.id not in node.instances[started].running:
        assert node.next_turn(0.0) is not None
        node.turn_done(0.0, [])
        serve_memory(node, 0.0)
    return work


@pytest.mark.parametrize("ttft_s", [0.1, 2.2, 60.0], ids=["late", "in a hurry", "in no hurry"])
@pytest.mark.parametrize("is_answering", [False, True])
def test_a_prompt_holds_an_answer_of_another_model_for_one_part_however_urgent(
    ttft_s: float, is_answering: bool
) -> None:
    """Whether or not its own model answers too. The answer is far ahead of its pace, so that nothing is late. The last
    part is longer where one more would take longer than that."""
    node = make_node(hosting=LINEAR, composition=SMOOTH)
    beside = answering(node, make_work(0, "a", input_tokens=64, ttft_s=4.0, tpot_s=0.25))
    if is_answering:
        answering(node, make_work(1, "b", input_tokens=64, ttft_s=4.0, tpot_s=0.25))
    node.admit.timing.refuses = lambda *_: None  # type: ignore[method-assign]  # as if it had been there before
    node.admit.timing.is_too_late = lambda *_: False  # type: ignore[method-assign]
    prompt = make_work(2, "b", input_tokens=2000, ttft_s=60.0)
    prompt.first_due_s = ttft_s
    if is_answering:
        assert node.join(1, prompt, 0.0) is None
    else:
        assert isinstance(node.start(prompt, 0.0), int)
    serve_memory(node, 0.0)
    turns = run_turns(node, 20.0)
    ends = [end for end, turn in turns if turn.instance.model == "a"]
    gaps_s = [later - earlier for earlier, later in pairwise(ends)]
    part_s = SMOOTH_LIMIT * split_s(LINEAR.latency)
    assert max(gaps_s) <= 1.1 * (0.02 + part_s + lost_s(LINEAR.latency))
    assert sum(gap_s > 1.1 * (0.02 + part_s) for gap_s in gaps_s) <= 1
    assert prompt.produced == 1 or prompt.id in next(one for one in node.instances.values() if one.model == "b").running
    assert not beside.late_tokens


def test_prompts_with_time_are_computed_together_where_that_saves() -> None:
    """Beside an answer of their own model, a part of a prompt takes about as long as a token; several prompts whose
    weights are read once take as long as pays."""
    hosting = make_hosting(decode_s=0.01, prefill_s_per_k=0.04)  # up to some 300 tokens cost no more than one
    node = make_node(hosting=hosting, composition=SMOOTH)
    answering(node, make_work(0, "a", input_tokens=64, ttft_s=4.0, tpot_s=0.25))
    for id in range(1, 5):
        assert node.join(0, make_work(id, "a", input_tokens=64, ttft_s=30.0, tpot_s=0.25), 0.0) is None
    serve_memory(node, 0.0)
    prompted = [[share.work.id for share in turn.prompts] for _, turn in run_turns(node, 1.0) if turn.prompts]
    assert prompted[-1] == [1, 2, 3, 4]


asked_works = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(16, 1500), st.floats(0.2, 8.0), st.floats(0.06, 0.5)),
    min_size=1,
    max_size=10,
)


# Few tokens take nearly as long as many: what parts cost is most of what small ones take.
FLAT = replace(
    LINEAR,
    latency=LatencyModel(
        Curve([(1, 0.06), (128, 0.085), (256, 0.13), (512, 0.25), (1024, 0.5), (2048, 1.1)]),
        Surface([(length, Curve([(1, 0.06), (8, 0.08), (32, 0.13)])) for length in (512, 2048)]),
    ),
)


def serve(
    asked: list[tuple[str, int, float, float]], composition: Composition = SMOOTH, hosting: Hosting = LINEAR
) -> list[Work]:
    """One after the other asks for a place, a turn after each, and turns take what admission takes them for; those who
    had a place, when all is done."""
    node, scale = make_node(hosting=hosting, composition=composition), SMOOTH.admission.slo_scale
    coming = [
        Work(number, model, tokens, 0.0, scale * ttft_s, scale * tpot_s, scale)
        for number, (model, tokens, ttft_s, tpot_s) in enumerate(asked)
    ]
    taken: list[Work] = []
    now = 0.0
    for _ in range(6000):
        if coming:
            work = coming.pop(0)
            work.arrival_s, work.first_due_s = now, now + work.ttft_s
            there = [one.id for one in node.instances.values() if one.model == work.model]
            answer = node.join(there[0], work, now) if there else node.start(work, now)
            taken += [] if isinstance(answer, Refusal) else [work]
            serve_memory(node, now)
        turn = node.next_turn(now)
        if turn is None:
            break
        now += turn.seconds(turn.instance.hosting.latency) * turn.instance.overestimate
        done = [one for one in turn.instance.running.values() if turn.instance.produced(one) >= 39]
        node.turn_done(now, done if turn.decodes else [])
        serve_memory(node, now)
    return taken


# One prompt of the model comes along with another; one that has time stands before others that have none.
@example(
    [
        ("b", 133, 1.423, 0.322),
        ("b", 1238, 7.75, 0.424),
        ("b", 667, 5.361, 0.322),
        ("b", 209, 4.998, 0.213),
        ("c", 858, 4.601, 0.343),
        ("a", 150, 3.941, 0.469),
        ("b", 1260, 7.327, 0.418),
        ("b", 463, 2.546, 0.263),
        ("a", 68, 7.877, 0.371),
        ("b", 30, 0.385, 0.447),
    ]
)
@example([("a", 151, 1.0, 0.5), ("a", 150, 0.21875, 0.5)])
@example([("a", 16, 1.0, 0.5), ("a", 478, 1.375, 0.25), ("a", 424, 1.25, 0.5)])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(asked_works)
def test_what_is_admitted_beside_smooth_answers_is_kept(asked: list[tuple[str, int, float, float]]) -> None:
    """As played, so done: nobody is late, whatever the parts of prompts cost."""
    for hosting in (LINEAR, FLAT):
        pace_s = 2 * hosting.latency.decode_s(1, 512)  # no faster than the device answers
        taken = serve([(*one, max(tpot_s, pace_s)) for *one, tpot_s in asked], hosting=hosting)
        assert not any(one.late_tokens for one in taken)
        assert all(one.produced for one in taken)


def test_a_prompt_is_not_cut_where_a_part_less_costs_more_than_others_wait() -> None:
    node = make_node(hosting=FLAT, composition=SMOOTH)
    answering(node, make_work(0, "a", input_tokens=64, ttft_s=4.0, tpot_s=0.5))
    prompt = make_work(1, "b", input_tokens=160, ttft_s=4.0, tpot_s=0.5)
    limit_s = part_limit_s(SMOOTH.turns.part_s, split_s(FLAT.latency))
    assert SMOOTH_LIMIT * split_s(FLAT.latency) < FLAT.latency.prefill_s(160) < limit_s
    assert isinstance(node.start(prompt, 0.0), int)
    serve_memory(node, 0.0)
    parts = [share.tokens for _, turn in run_turns(node, 1.0) for share in turn.prompts if share.work is prompt]
    assert parts == [160]


def test_more_is_taken_where_parts_are_counted_as_they_are() -> None:
    """Three prompts beside an answer: what each of their parts takes, not an estimate by the smallest one."""
    asked = [("a", 64, 4.0, 0.25), *[("b", 400, 2.6, 0.25)] * 3]
    assert len(serve(asked)) == 3


@pytest.mark.parametrize("tokens", [64, 400])
def test_a_crowd_with_time_has_its_place_and_is_kept(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More prompts wait than are played one by one: what comes after that is counted."""
    monkeypatch.setattr(shadow, "MAX_TURNS_IN_ROUNDS", 12)
    taken = serve([("ab"[number % 2], tokens, 60.0, 2.0) for number in range(60)])
    assert len(taken) > 24, "playing alone ends after 12 turns"
    assert not any(one.late_tokens for one in taken)
    assert all(one.produced for one in taken)
    strict = serve([("ab"[number % 2], tokens, 2.0, 0.25) for number in range(60)])
    assert 0 < len(strict) < 60
    assert not any(one.late_tokens for one in strict)
