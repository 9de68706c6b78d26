"""Learning from what turns took."""

from __future__ import annotations

import io
import json

import pytest
from sim_builders import make_latency

from dovetail.eventlog import EventLog
from dovetail.node.feedback import ENOUGH, TIMINGS_TURNS, LatencyFeedback, Observation
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
