"""Noisy neighbours of the bench, each for a moment against a real gateway, and how what the probe saw is summed up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from edge_server import Edge, running_edge

from dovetail.bench.abuse import CaseResult, _attackers, _seen
from dovetail.bench.abuse_cases import CASES, Target, case
from dovetail.bench.abuse_noise import NICENESS
from dovetail.bench.abuse_probe import Samples

KEYS = [{"name": "noisy", "key": "sk-noisy"}, {"name": "probe", "key": "sk-probe"}]


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with running_edge(tmp_path_factory.mktemp("noise"), {"auth": {"keys": KEYS}}) as made:
        yield made


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_noise_leaves_the_server_answering_and_small(edge: Edge, name: str, tmp_path: Path) -> None:
    _, noise = CASES[name]
    target = Target(edge.url, "sk-noisy", "fake", "looping", "sk-probe", tmp_path)
    before = edge.resident_bytes
    asyncio.run(asyncio.wait_for(noise(target, time.monotonic() + 0.3), 60))
    body = {"model": "fake", "prompt": "hi ", "max_tokens": 2}
    assert edge.post("/v1/completions", body, headers={"authorization": "Bearer sk-probe"}).status_code == 200
    assert edge.resident_bytes - before < 200_000_000


def test_a_case_has_a_name_of_its_own() -> None:
    with pytest.raises(AssertionError):
        case("tokenize", "again")(CASES["nothing"][1])


def test_what_the_probe_saw_is_told_in_milliseconds() -> None:
    seen = _seen(Samples(live=[0.001] * 98 + [0.2, 0.5], gaps=[0.03, 0.02, 0.01], failures=1))
    assert (seen.live_p50, seen.live_p99, seen.live_max) == (1.0, 500.0, 500.0)
    assert (seen.gap_p50, seen.gap_max, seen.failures) == (20.0, 30.0, 1)
    assert _seen(Samples()).live_p99 == 0.0


def test_gaps_are_told_in_token_times_of_the_stream_alone() -> None:
    before, during = Samples(gaps=[0.02] * 9 + [0.05]), Samples(gaps=[0.03] * 9 + [0.06])
    result = CaseResult("nothing", "", _seen(before), _seen(during), 0, 0, 0)
    assert (result.token_ms, result.p99_tokens, result.longest_tokens) == (20.0, 3.0, 3.0)


def test_attackers_are_a_process_of_low_priority_that_says_when_its_noise_is_over(edge: Edge, tmp_path: Path) -> None:
    with _attackers(edge.url, "looping", tmp_path) as make_noise:
        (child,) = [one for one in psutil.Process().children() if "dovetail.bench.abuse_noise" in one.cmdline()]
        is_over = make_noise("wrong-ids", 0.2)
        while not is_over():
            pass
        assert child.nice() == min(psutil.Process().nice() + NICENESS, 19)
    assert not child.is_running()
