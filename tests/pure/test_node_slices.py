"""Turns that stop between two layers: what other models' answers wait for, who is let in, and what is kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise

import pytest
from driver_builders import Rig, expected
from sim_builders import make_hosting, make_node, make_work, serve_memory

from dovetail.node.events import Leave, Turn
from dovetail.node.node import Node
from dovetail.node.runtime import NodeRuntime
from dovetail.policy.compositions import Composition
from dovetail.policy.headroom import INFINITY, Refusal
from dovetail.policy.latency import Curve, LatencyModel, Surface
from dovetail.policy.lateness import ServeLate
from dovetail.policy.parts import FEWEST_TOKENS
from dovetail.policy.placement import DeviceKind
from dovetail.policy.rounds import ANSWER_SLICE, STALL_COSTS, is_almost_done
from dovetail.policy.work import Work
from dovetail.sim.baselines import Unlimited
from dovetail.sim.compositions import SLINFER
from dovetail.sim.storm import check_node, run_storm

KNOBS = SLINFER.having(
    max_silence_s=2.0,
    part_s=0.1,
    pack_prompts=True,
    smooth_answers=True,
    lateness=ServeLate(),
    split_decodes=True,
    max_stall=2.0,
    sharing=Unlimited(),
)
TOKEN_S = 0.01


def latency(token_s: float) -> LatencyModel:
    curve = Curve([(1, token_s), (64, 2 * token_s)])
    return LatencyModel(Curve([(1, token_s), (1024, 60 * token_s)]), Surface([(16, curve), (4096, curve)]))


def shared(composition: Composition = KNOBS, kind: DeviceKind = DeviceKind.CPU) -> Node:
    """A model whose iterations take ten times as long as the other's."""
    hosting = make_hosting(weight_gib=1.0, kv_kib=16)
    node = make_node((), kind=kind, composition=composition, hosting=hosting)
    for model, token_s in (("large", 10 * TOKEN_S), ("small", TOKEN_S)):
        node.device.hostings[model] = replace(hosting, latency=latency(token_s))  # type: ignore[index]
    return node


def accept(node: Node, work: Work, now: float = 0.0) -> Work:
    there = [one.id for one in node.instances.values() if one.model == work.model]
    refuses, node.admit.timing.refuses = node.admit.timing.refuses, lambda *_: None  # type: ignore[method-assign]
    answer = node.join(there[0], work, now) if there else node.start(work, now)
    node.admit.timing.refuses = refuses  # type: ignore[method-assign]
    assert not isinstance(answer, Refusal)
    serve_memory(node, now)
    return work


def answering(node: Node, id: int, model: str, *, is_strict: bool = False, tpot_s: float = 0.5) -> Work:
    work = make_work(id, model, 16, ttft_s=60.0, tpot_s=tpot_s)
    work.is_strict = is_strict
    accept(node, work)
    while any(one.waiting for one in node.instances.values()):
        assert node.next_turn(0.0) is not None
        node.turn_done(0.0, [])
        serve_memory(node, 0.0)
    return work


def run(node: Node, until_s: float) -> list[tuple[float, Turn]]:
    """Turns with their ends, in the order in which they end."""
    now, found = 0.0, []
    while now < until_s and (turn := node.next_turn(now)) is not None:
        left_s = turn.seconds(turn.instance.hosting.latency)
        while left_s > turn.slice_s:
            now, left_s = now + turn.slice_s, left_s - turn.slice_s
            while (inner := node.interlude(now)) is not None:
                assert node.turn is inner
                now += inner.seconds(inner.instance.hosting.latency)
                node.turn_done(now, [])
                check_node(node)
                found.append((now, inner))
        now += left_s
        assert node.turn is turn
        node.turn_done(now, [])
        serve_memory(node, now)
        check_node(node)
        found.append((now, turn))
    return found


def in_turn_of_the_large() -> tuple[Node, Turn]:
    """A node whose small model answers too, and the turn that is under way."""
    node = shared()
    answering(node, 0, "large")
    answering(node, 1, "small")
    while (turn := node.next_turn(0.0)) is not None and turn.instance.model == "small":
        node.turn_done(0.0, [])
    assert turn is not None
    return node, turn


def ends_of(turns: list[tuple[float, Turn]], model: str) -> list[float]:
    return [end for end, turn in turns if turn.instance.model == model]


def longest_gap_s(turns: list[tuple[float, Turn]], model: str) -> float:
    return max(later - earlier for earlier, later in pairwise(ends_of(turns, model)))


@pytest.mark.parametrize("max_stall", [INFINITY, 2.0])
def test_answers_of_a_small_model_do_not_wait_for_whole_iterations_of_a_large_one(max_stall: float) -> None:
    node = shared(KNOBS.having(max_stall=max_stall))
    answering(node, 0, "large")
    answering(node, 1, "small")
    turns = run(node, 4.0)
    gap_s = longest_gap_s(turns, "small")
    assert gap_s <= 2.2 * TOKEN_S if max_stall < INFINITY else gap_s >= 11 * TOKEN_S
    assert len(ends_of(turns, "large")) >= 15, "the large one has half of the time"


@pytest.mark.parametrize(("tokens", "max_stall"), [(FEWEST_TOKENS, 2.0), (160, 2.0), (160, 3.5)])
def test_a_prompt_is_not_cut_small_and_holds_an_answer_as_long_as_it_may(tokens: int, max_stall: float) -> None:
    node = shared(KNOBS.having(max_stall=max_stall))
    answering(node, 1, "small")
    for number in range(2, 5):
        work = make_work(number, "large", tokens, ttft_s=60.0, tpot_s=0.5)
        work.is_strict = False
        accept(node, work)
    turns = run(node, 4.0)
    answers_s = next(end for end, turn in turns if turn.instance.model == "large" and turn.decodes)
    before = [(end, turn) for end, turn in turns if end < answers_s - 20 * TOKEN_S]
    assert len(ends_of(before, "small")) > 50
    assert longest_gap_s(before, "small") <= (max_stall - STALL_COSTS) * TOKEN_S * 1.1 + 1e-9
    parts = [share.tokens for _, turn in turns for share in turn.prompts]
    assert parts
    assert min(parts) >= FEWEST_TOKENS


def test_whoever_asked_for_a_pace_is_not_made_late_by_those_that_are_let_in() -> None:
    node = shared()
    strict = answering(node, 0, "large", is_strict=True, tpot_s=0.14)
    beside = answering(node, 1, "small", tpot_s=0.5)
    turns = run(node, 4.0)
    assert not strict.late_tokens
    assert not beside.late_tokens
    assert any(end for end, turn in turns if turn.slice_s != INFINITY)


@pytest.mark.parametrize("is_strict", [False, True])
def test_an_answer_goes_before_its_turn_only_if_it_asked_for_a_pace(is_strict: bool) -> None:
    """Else one that is about to be late has two turns in a row, and others wait for both."""
    node = shared()
    answering(node, 0, "large", tpot_s=10.0)
    answering(node, 1, "small", is_strict=is_strict)
    large, small = (node.instances[one] for one in sorted(node.instances))
    now = small.running_due_s - 5 * TOKEN_S
    for one, ago_s in ((large, 0.05), (small, 0.01)):
        one.spoke_s = one.turned_s = now - ago_s
    turn = node.next_turn(now)
    assert turn is not None
    assert turn.instance is (small if is_strict else large)


@pytest.mark.parametrize(
    ("spent_s", "expected"), [(0.5, False), (0.69, False), (0.71, True), (1.0, True), (1.2, True), (1.3, False)]
)
def test_an_iteration_that_is_almost_done_is_waited_for_unless_it_should_be_done_long_ago(
    spent_s: float, expected: bool
) -> None:
    assert is_almost_done(spent_s, whole_s=1.0, decode_s=1.0) is expected


def test_nobody_is_let_in_while_a_prompt_waits_that_was_promised_a_time() -> None:
    node = shared()
    answering(node, 0, "large")
    answering(node, 1, "small")
    work = make_work(2, "large", 64, ttft_s=60.0)
    work.is_strict = True
    accept(node, work)
    while node.instances[0].waiting or node.instances[1].waiting:
        turn = node.next_turn(0.0)
        assert turn is not None
        assert turn.slice_s == INFINITY
        node.turn_done(0.0, [])


def test_a_gpu_does_not_stop() -> None:
    node = shared(kind=DeviceKind.GPU)
    answering(node, 0, "large")
    answering(node, 1, "small")
    assert all(turn.slice_s == INFINITY for _, turn in run(node, 2.0))


def test_a_device_is_expected_to_be_free_when_those_are_done_that_it_lets_in() -> None:
    node, turn = in_turn_of_the_large()
    whole_s = 10 * TOKEN_S * 1.1
    assert node._free_at_s(0.0) == pytest.approx(whole_s + whole_s / ANSWER_SLICE, rel=0.1)
    inner = node.interlude(turn.slice_s)
    assert inner is not None
    assert node._free_at_s(turn.slice_s) == pytest.approx(whole_s + whole_s / ANSWER_SLICE, rel=0.1)
    node.turn_done(turn.slice_s + TOKEN_S, [])
    assert node.interlude(turn.slice_s + TOKEN_S) is None, "each answers once"
    assert node.turn is turn


def test_nobody_is_let_in_whose_blocks_are_given_back_only_when_the_turn_has_ended() -> None:
    """They count as free: in the end a token had none (server storm 50802)."""
    node, turn = in_turn_of_the_large()
    small = next(one for one in node.instances.values() if one.model == "small")
    assert node.interlude(turn.slice_s, None, {small.id}) is None
    runtime = NodeRuntime(node)
    runtime.outbox.append(Leave(make_work(9, "small"), small.id))
    assert runtime.interlude(turn.slice_s) is None
    runtime.outbox.clear()
    inner = runtime.interlude(2 * turn.slice_s)
    assert inner is not None
    assert inner.instance is small


def test_storms_violate_no_invariant_where_turns_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come, end, fail and move while turns of others are let in."""
    let_in: list[bool] = []
    interlude = Node.interlude

    def spy(node: Node, now: float, is_layer_here: bool | None = None, leaving: Collection[int] = ()) -> Turn | None:
        turn = interlude(node, now, is_layer_here, leaving)
        let_in.append(turn is not None)
        return turn

    monkeypatch.setattr(Node, "interlude", spy)
    assert run_storm([102_080, 102_092, 102_199]) == []
    assert sum(let_in) > 2000


def rig_with_stream() -> Rig:
    rig = Rig("ab", token_s=TOKEN_S / 5, max_batch=64, max_kv_tokens=4000, latency=latency(TOKEN_S))
    rig.submit("stream", "b", tokens=80)
    while len(rig.events.get(("stream", 0), [])) < 4:
        rig.finish_load() if rig.commands else rig.step()
    return rig


def test_a_worker_lets_a_stream_go_on_in_the_middle_of_a_prompt_and_everybody_has_the_right_text() -> None:
    """Executors that check every block, and a clock that iterations move."""
    rig = rig_with_stream()
    inner = []
    interlude = rig.driver.home.interlude
    rig.driver.home.interlude = lambda now: inner.append(interlude(now)) or inner[-1]  # type: ignore[method-assign, func-returns-value]
    for number in range(6):
        rig.submit(f"flood{number}", "a", prompt=150, tokens=12)
    rig.run()
    assert sum(turn is not None for turn in inner) > 20
    assert rig.tokens("stream") == expected("stream", tokens=80)
    for number in range(6):
        assert rig.tokens(f"flood{number}") == expected(f"flood{number}", prompt=150, tokens=12)


def test_an_iteration_that_fails_where_it_was_let_in_ends_its_own_requests() -> None:
    rig = rig_with_stream()
    rig.submit("flood", "a", prompt=150, tokens=12)
    rig.submit("other", "a", prompt=150, tokens=12)
    while not rig.driver.home.node.instances[1].waiting:
        rig.finish_load() if rig.commands else rig.step()
    rig.executors[0].fails_on = rig.events["stream", 0][-1].token
    rig.run()
    assert rig.events["stream", 0][-1].error is not None
    for name in ("flood", "other"):
        assert rig.tokens(name) == expected(name, prompt=150, tokens=12)


def test_a_fault_of_the_node_s_own_is_not_blamed_on_what_has_stopped() -> None:
    rig = rig_with_stream()
    rig.submit("flood", "a", prompt=150, tokens=12)

    def broken(now: float) -> Turn | None:
        raise ZeroDivisionError("the policy's")

    rig.driver.home.interlude = broken  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="between two layers"):
        rig.run()
    assert ("flood", 0) not in rig.events
