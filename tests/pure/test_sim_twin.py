"""The log of a real node, read, explained and simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stage_builders import Rig

from dovetail.errors import ConfigError
from dovetail.sim import twin
from dovetail.sim.explain import explain_log
from dovetail.sim.log import open_log
from dovetail.sim.metrics import Fate


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Thirty requests to three models, one refused, one aborted."""
    path = tmp_path / "node.jsonl"
    rig = Rig("abc", log=open_log(path))
    for i in range(30):
        rig.submit(f"r{i}", "abc"[i % 3], prompt=20 + i, tokens=1 + i % 7)
        rig.clock.now += 0.2
        if rig.commands:
            rig.finish_load()
        rig.step()
    rig.submit("impossible", "a", ttft_s=0.001, tpot_s=0.001)
    rig.submit("unwanted", "a", tokens=50)
    rig.step()
    rig.stage.abort("unwanted")
    rig.run()
    return path


def test_a_real_log_says_what_became_of_every_request(log: Path) -> None:
    real = twin.real_result(twin.read_real(log))
    assert len(real.records) == 31
    finished = [record for record in real.records if record.fate is Fate.FINISHED]
    assert [record.output_tokens for record in finished[:30]] == [1 + i % 7 for i in range(30)]
    assert [record.fate for record in real.records].count(Fate.FAILED) == 1
    assert real.cold_starts == 3
    assert all(record.ttft_s >= 0 for record in real.records if record.first_token_s is not None)


def test_its_twin_serves_the_same_requests_on_the_same_node(log: Path) -> None:
    stored = twin.read_real(log)
    real = twin.real_result(stored)
    simulated = twin.simulate(stored, real)
    assert [record.input_tokens for record in simulated.records] == [record.input_tokens for record in real.records]
    assert all(record.fate is Fate.FINISHED for record in simulated.records)
    assert simulated.cold_starts == 3
    rows = twin.side_by_side(real, simulated)
    assert [row["run"] for row in rows] == ["real", "simulated"]
    assert twin.simulate(stored, real).summary() | {"wall_s": 0} == simulated.summary() | {"wall_s": 0}


def test_a_request_of_a_real_log_is_explained(log: Path) -> None:
    text = explain_log(log, 0)
    assert "started a new instance on node" in text
    assert "first token" in text
    assert "no request 99" in explain_log(log, 99)


def test_a_log_that_cannot_be_read_is_named_with_its_line(log: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text(log.read_text() + "{half\n")
    with pytest.raises(ConfigError, match=r"broken.jsonl: line \d+: not JSON"):
        twin.read_real(broken)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"dovetail_sim": 1}) + "\n")
    assert not twin.is_real(other)
    with pytest.raises(ConfigError, match="line 1: not the header"):
        twin.read_real(other)
