"""Noisy neighbours of the bench, each for a moment against a real gateway, and how what the probe saw is summed up."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from edge_server import Edge, running_edge

from dovetail_bench.abuse import CaseResult, _attackers, _seen
from dovetail_bench.abuse_cases import CASES, Target, case
from dovetail_bench.abuse_noise import NICENESS
from dovetail_bench.abuse_probe import Samples
from dovetail_bench.core_time import Cores, Had, Look, taken_s

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
    seen = _seen(Samples(live=[0.001] * 98 + [0.2, 0.5], gaps=[0.03, 0.02, 0.01], taken=[0.015, 0.0, 0.0], failures=1))
    assert (seen.live_p50, seen.live_p99, seen.live_max) == (1.0, 500.0, 500.0)
    assert (seen.gap_p50, seen.gap_max, seen.failures) == (20.0, 30.0, 1)
    assert (seen.gap_p99, seen.gap_p99_alone) == (30.0, 20.0)
    assert _seen(Samples()).live_p99 == 0.0


def test_gaps_are_told_in_token_times_of_the_stream_alone() -> None:
    before, during = (
        Samples(gaps=[0.02] * 9 + [0.05], taken=[0.0] * 10),
        Samples(gaps=[0.03] * 9 + [0.06], taken=[0.0] * 10),
    )
    result = CaseResult("nothing", "", _seen(before), _seen(during), 0, 0, 0)
    assert (result.token_ms, result.p99_tokens, result.longest_tokens) == (20.0, 3.0, 3.0)


def test_attackers_took_no_more_than_they_ran_and_than_others_waited() -> None:
    before = Look({1: Had(1.0)}, {2: Had(5.0, 1.0), 3: Had(5.0, 1.0)}, {4: Had(), 5: Had()})
    waited = {2: Had(5.1, 1.01), 3: Had(5.1, 1.03)}  # the iteration waits for the slower of them
    after = Look({1: Had(1.2)}, waited, {4: Had(0.1, 0.002), 5: Had()})
    assert taken_s(before, after) == pytest.approx(0.032)
    assert taken_s(before, after._replace(attackers={1: Had(1.004)})) == pytest.approx(0.004)
    assert taken_s(before, after._replace(attackers={})) == 0.0


def test_a_process_that_computes_beside_another_on_one_core_takes_from_it() -> None:
    core = {min(os.sched_getaffinity(0))}
    loop = f"import os\nos.sched_setaffinity(0, {core})\nwhile True: pass"
    both = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(2)]
    try:
        cores = Cores(both[0].pid, os.getpid(), both[1].pid)
        until, taken = time.monotonic() + 20.0, 0.0
        while taken < 0.05 and time.monotonic() < until:
            time.sleep(0.1)
            taken += cores.taken_s()
        assert taken >= 0.05
        assert Cores(2**22 + 1, os.getpid(), os.getpid()).taken_s() == 0.0  # nobody has that number
    finally:
        for one in both:
            one.kill()
            one.wait()


def test_attackers_are_a_process_of_low_priority_that_says_when_its_noise_is_over(edge: Edge, tmp_path: Path) -> None:
    with _attackers(edge.url, "looping", tmp_path) as (pid, make_noise):
        child = psutil.Process(pid)
        is_over = make_noise("wrong-ids", 0.2)
        while not is_over():
            pass
        assert "dovetail_bench.abuse_noise" in child.cmdline()  # which is empty for a moment when it has just begun
        assert child.ppid() == os.getpid()
        assert child.nice() == min(psutil.Process().nice() + NICENESS, 19)
    assert not child.is_running()
