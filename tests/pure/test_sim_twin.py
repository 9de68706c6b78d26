"""The log of a real node, read, explained and simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from driver_builders import Rig

from dovetail.errors import ConfigError
from dovetail.eventlog import open_log
from dovetail.profiles.timings import TurnTimings, kind_of
from dovetail.sim import real_log, twin
from dovetail.sim.explain import explain_log
from dovetail.sim.metrics import Fate


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "node.jsonl")


def write_log(path: Path, longest: int = 7) -> Path:
    """Thirty requests to three models, one refused, one aborted."""
    rig = Rig("abc", log=open_log(path))
    for i in range(30):
        rig.submit(f"r{i}", "abc"[i % 3], prompt=20 + i, tokens=1 + i % longest)
        rig.clock.now += 0.2
        if rig.commands:
            rig.finish_load()
        rig.step()
    rig.submit("impossible", "a", ttft_s=0.001, tpot_s=0.001)
    rig.submit("unwanted", "a", tokens=50)
    rig.step()
    rig.abort("unwanted")
    rig.run()
    return path


def test_a_real_log_says_what_became_of_every_request(log: Path) -> None:
    real = real_log.real_result(real_log.read_real(log))
    assert len(real.records) == 31
    finished = [record for record in real.records if record.fate is Fate.FINISHED]
    assert [record.output_tokens for record in finished[:30]] == [1 + i % 7 for i in range(30)]
    assert [record.fate for record in real.records].count(Fate.DROPPED) == 1
    assert real.cold_starts == 3
    assert all(record.ttft_s >= 0 for record in real.records if record.first_token_s is not None)


def test_its_twin_serves_the_same_requests_on_the_same_node(log: Path) -> None:
    stored = real_log.read_real(log)
    real = real_log.real_result(stored)
    simulated = twin.simulate(stored, real)
    assert [record.input_tokens for record in simulated.records] == [record.input_tokens for record in real.records]
    assert [record.fate is Fate.FINISHED for record in simulated.records].count(False) == 1, "the impossible one"
    assert simulated.cold_starts == 3
    rows = twin.side_by_side(real, [simulated])
    assert [row["run"] for row in rows] == ["real", "simulated"]
    assert twin.simulate(stored, real).summary() | {"wall_s": 0} == simulated.summary() | {"wall_s": 0}


def test_a_request_of_a_real_log_is_explained(log: Path) -> None:
    text = explain_log(log, 0)
    assert "started a new instance on node" in text
    assert "first token" in text
    with pytest.raises(ConfigError, match=r"no request 99; the last is \d+"):
        explain_log(log, 99)


def test_a_log_that_cannot_be_read_is_named_with_its_line(log: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text(log.read_text() + "{half\n")
    with pytest.raises(ConfigError, match=r"broken.jsonl: line \d+: not JSON"):
        real_log.read_real(broken)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"dovetail_sim": 1}) + "\n")
    assert not real_log.is_real(other)
    with pytest.raises(ConfigError, match="line 1: not the header"):
        real_log.read_real(other)


def test_a_refused_request_weighs_in_the_twin_what_it_asked_for(log: Path) -> None:
    real = real_log.real_result(real_log.read_real(log))
    (refused,) = [record for record in real.records if record.fate is Fate.DROPPED]
    assert refused.output_tokens == 4  # finished ones came to all that they asked for


def test_the_twin_learns_of_what_comes_during_a_turn_when_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "node.jsonl"
    rig = Rig("ab", log=open_log(path))
    rig.submit("long", "a", prompt=200, tokens=2)
    rig.finish_load()
    began = rig.clock.now
    rig.step()
    rig.submit("during", "b", prompt=20, tokens=2, age_s=rig.clock.now - began - 0.02)
    rig.run()
    stored = real_log.read_real(path)
    told = tmp_path / "twin.jsonl"
    twin.simulate(stored, real_log.real_result(stored), log=open_log(told))
    events = [json.loads(line) for line in told.read_text().splitlines()]
    arrived = next(event["t"] for event in events if event["event"] == "arrive" and event["request"] == 1)
    first = next(event["t"] for event in events if event["event"] == "first_token" and event["request"] == 0)
    assert arrived == first
    assert real_log.real_result(stored).records[1].arrival_s < first


def test_the_twin_takes_as_long_as_turns_took_beside_loads_and_without(tmp_path: Path) -> None:
    pace = real_log.timings(real_log.read_real(write_log(tmp_path / "longer.jsonl", longest=15)))
    assert pace.turns == 100, "as of the last line on it"
    pace = TurnTimings()
    beside, quiet = kind_of(True, True, 100), kind_of(True, False, 100)
    pace.add(beside, took_s=0.3, expected_s=0.2, gap_s=0.001)
    pace.add(quiet, took_s=0.1, expected_s=0.2, gap_s=0.003)
    assert pace.factor(beside) == pytest.approx(1.5)
    assert pace.factor(quiet) == pytest.approx(0.5)
    assert pace.factor(kind_of(True, True, 7)) == pytest.approx(1.5), "of another size: the kind as a whole"
    assert pace.factor(kind_of(False, False, 1)) == 1.0
    assert pace.mean_gap_s == pytest.approx(0.002)


def test_loads_beside_turns_are_told_apart(log: Path) -> None:
    times = real_log.load_times_s(real_log.read_real(log))
    assert [len(times[is_busy]) for is_busy in (False, True)] == [2, 1]  # r1 was still being answered
    stored = real_log.read_real(log)
    stored.events[:0] = [  # somebody had a place on an instance that was ready when the first of them began
        {"t": 0.0, "event": "load", "instance": 99},
        {"t": 1.0, "event": "instanceready", "instance": 99},
        {"t": 1.0, "event": "placed", "request": 99, "instance": 99},
    ]
    times = real_log.load_times_s(stored)
    assert [len(times[is_busy]) for is_busy in (False, True)] == [1, 3]
