"""Learning from what turns took."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from sim_builders import make_hosting, make_latency, make_node, make_work

from dovetail.eventlog import EventLog
from dovetail.node.events import Computed, Turn
from dovetail.node.feedback import ENOUGH, TIMINGS_TURNS, LatencyFeedback, Observation
from dovetail.node.underway import Underway
from dovetail.policy.headroom import Refusal
from dovetail.policy.latency import Curve, LatencyModel, Surface
from dovetail.policy.parts import Share
from dovetail.profiles.live import LiveLatency


def make_feedback() -> tuple[LatencyFeedback, LiveLatency, io.StringIO]:
    file = io.StringIO()
    return LatencyFeedback(EventLog(file)), LiveLatency(make_latency()), file


def test_decode_turns_are_learnt_from_when_there_are_enough_of_them_or_time() -> None:
    feedback, latency, _ = make_feedback()
    before = latency.decode_s(4, 400)
    slow = Observation(latency, 4, 400, 1.5 * before, 0.0, is_beside_load=False)
    for _ in range(ENOUGH - 1):
        feedback.add(slow, 1.0)
    assert latency.decode_s(4, 400) == before
    feedback.add(slow, 1.0)
    assert latency.decode_s(4, 400) == pytest.approx(1.5 * before)
    feedback.add(slow._replace(took_s=3.0 * before), 1.0)
    assert latency.decode_s(4, 400) == pytest.approx(1.5 * before)
    feedback.learn(1.0)
    assert latency.decode_s(4, 400) > 1.5 * before


def test_a_prefill_is_learnt_from_at_once() -> None:
    feedback, latency, _ = make_feedback()
    before = latency.prefill_s(100)
    feedback.add(Observation(latency, 0, 100, 1.3 * before, 0.0, is_beside_load=False), 1.0)
    assert latency.prefill_s(100) == pytest.approx(1.3 * before)


def test_what_parts_of_prompts_take_is_learnt_as_it_is_whatever_was_learnt_before() -> None:
    """Sizes that were seen, of parts, have corrections of their own; what lies before a part is of sizes that were not,
    and their difference is no measure of anything."""
    feedback, _, _ = make_feedback()
    base = LatencyModel(Curve([(1, 0.019), (16, 0.050), (32, 0.083), (64, 0.149), (128, 0.300)]), make_latency().decode)
    latency = LiveLatency(base)
    node = make_node("a", hosting=replace(make_hosting(weight_gib=1.0, kv_kib=16), latency=latency))
    work = make_work(0, "a", 96, ttft_s=60.0)
    assert not isinstance(node.start(work, 0.0), Refusal)
    turns = [Turn(node.instances[0], (Share(work, start, 16),), decodes=False) for start in range(0, 96, 16)]
    whole = Turn(node.instances[0], (Share(work, 0, 96),), decodes=False)
    takes_s = {turn: 0.36 * turn.seconds(base) for turn in turns} | {whole: 0.6 * whole.seconds(base)}
    for turn in 40 * [*turns, whole]:
        feedback.observe(Underway(turn, 0.0), Computed(), 0.0, takes_s[turn], is_beside_load=False)
    for turn, seconds in takes_s.items():
        assert turn.seconds(latency) == pytest.approx(seconds, rel=0.05)


def test_a_size_that_was_slow_once_is_expected_to_be_like_the_others() -> None:
    _, latency, _ = make_feedback()
    latency.observe_prefill(100, 3.0 * latency.base.prefill_s(100))
    for _ in range(40):
        latency.observe_prefill(16, 0.5 * latency.base.prefill_s(16))
    assert latency.prefill_s(16) == pytest.approx(0.5 * latency.base.prefill_s(16), rel=0.05)
    assert latency.prefill_s(100) < 0.85 * latency.base.prefill_s(100)
    for _ in range(40):  # unless it is slow each time
        latency.observe_prefill(100, 3.0 * latency.base.prefill_s(100))
    assert latency.prefill_s(100) == pytest.approx(3.0 * latency.base.prefill_s(100), rel=0.1)


def test_the_log_says_how_long_turns_took_beside_what_was_expected() -> None:
    feedback, latency, file = make_feedback()
    expected = latency.decode_s(2, 100)
    for _ in range(TIMINGS_TURNS):
        feedback.add(Observation(latency, 2, 100, 2 * expected, 0.001, is_beside_load=True), 5.0)
    feedback.learn(5.0)
    (line,) = [json.loads(text) for text in file.getvalue().splitlines()]
    assert line["event"] == "pace"
    assert line["turns"] == TIMINGS_TURNS
    assert line["gap_s"] == pytest.approx(0.1)
    assert set(line["took_s"]) == {"decode_beside_load", "decode_beside_load/4"}
    assert line["took_s"]["decode_beside_load"] == pytest.approx(TIMINGS_TURNS * 2 * expected)
    assert line["expected_s"]["decode_beside_load/4"] == pytest.approx(TIMINGS_TURNS * expected)


def test_what_a_prompt_takes_beside_running_requests_is_learnt_without_reading_their_contexts() -> None:
    feedback, _, _ = make_feedback()
    rows = [(length, Curve([(1, 0.004 + 4e-6 * length), (64, 0.004 + 2e-4 * length)])) for length in (64, 4096)]
    base = LatencyModel(Curve([(1, 0.005), (1024, 0.030)]), Surface(rows))
    latency = LiveLatency(base)
    node = make_node("a", hosting=replace(make_hosting(weight_gib=1.0, kv_kib=16), latency=latency))
    running, work = make_work(0, "a", 1000, ttft_s=60.0), make_work(1, "a", 96, ttft_s=60.0)
    for one in (running, work):
        answer = node.join(0, one, 0.0) if node.instances else node.start(one, 0.0)
        assert not isinstance(answer, Refusal)
    instance = node.instances[0]
    instance.waiting.remove(running)
    instance.join(running)
    turn = Turn(instance, (Share(work, 0, 96),))
    takes_s = 1.5 * base.prefill_s(97) + base.reading_s(1, 1000)
    for _ in range(40):
        feedback.observe(Underway(turn, 0.0), Computed(), 0.0, takes_s, is_beside_load=False)
    assert latency.prefill_s(97) == pytest.approx(1.5 * base.prefill_s(97), rel=0.02)
    assert latency.decode_s(1, 1000) == base.decode_s(1, 1000)
    assert turn.seconds(latency) == pytest.approx(takes_s, rel=0.02)
