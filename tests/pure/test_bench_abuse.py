"""Noisy neighbours of the bench, each for a moment against a real gateway, and how what the probe saw is summed up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from edge_server import Edge, running_edge

from dovetail.bench.abuse import _seen
from dovetail.bench.abuse_cases import CASES, Target, case
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
