"""Profiles: measured with the serving code, kept, found again, and followed by what is seen live."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail import messages
from dovetail.cli.profile import unsteady_warning
from dovetail.engine.devices.cpu import CpuDevice
from dovetail.errors import ConfigError
from dovetail.native.dispatch import levels
from dovetail.profiles.live import LiveLatency
from dovetail.store import Catalogue, describe
from dovetail.store.format.manifest import partition_files
from dovetail.store.host_pool.pool import HostPool
from dovetail.worker.hosting import Profiles
from dovetail.worker.loading import InstanceConfig, build_runner
from dovetail.worker.profiling import Measured, Profiler
from dovetail_bench.page_cache import drop
from dovetail_bench.worker_process import WorkerProcess

DEVICE = CpuDevice(1)


def test_a_profile_covers_the_grid_and_leaves_nothing_behind(tiny_folder: Callable[[str], Path]) -> None:
    card = describe(tiny_folder("llama"), "llama")
    runner, _ = build_runner(InstanceConfig(card, "f32", 1 << 22, 4, 4, 16, 200), DEVICE)
    profiler = Profiler(runner, max_tokens=40, max_batch=4)
    measured = profiler.run()
    assert [sample.tokens for sample in measured.prefill] == [4, 8, 16, 32]
    assert {(sample.batch, sample.mean_length) for sample in measured.decode} == {(b, 32) for b in (1, 2, 3, 4)}
    assert len(measured.spread) == 8
    assert min(measured.spread.values()) >= 1.0
    errors = profiler.check(measured.model, loads=3)
    assert errors.loads == 3
    pool = runner.scheduler.pool
    pool.check()
    assert pool.num_available == pool.target
    runner.close()


def test_figures_that_vary_are_kept_with_a_warning() -> None:
    measured = Measured(spread={"prefill of 4 tokens": 3.1, "decode of 1 x 32 tokens": 1.2})
    assert measured.unsteady() == {"prefill of 4 tokens": 3.1}
    assert unsteady_warning(measured.unsteady(), 2).startswith(
        "warning: 1 of 2 points varied more than twofold between repeats (worst: prefill of 4 tokens, 3.1 times)"
    )
    assert unsteady_warning({}, 2) == ""


def test_the_command_keeps_a_profile_that_workers_find(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    Catalogue(tmp_path).pull(str(tiny_folder("llama")), name="tiny", dtype="f32")
    command = [sys.executable, "-m", "dovetail", "profile", "tiny", "--store", str(tmp_path), "--json"]
    options = ["--max-tokens", "64", "--max-batch", "2", "--threads", "1", "--check", "2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=True)
    (result,) = json.loads(done.stdout)
    assert result["errors"]["loads"] == 2
    card = Catalogue(tmp_path).get("tiny")
    profiles = Profiles(tmp_path / "profiles", DEVICE)
    measured = profiles.measured(card, "f32")
    assert measured is not None
    assert measured.prefill_s(16) == pytest.approx(dict(result["prefill_ms"])[16] / 1e3, rel=0.01)
    assert profiles.latency(card, "f32") is profiles.latency(card, "f32")
    assert Profiles(tmp_path / "profiles", CpuDevice(7)).measured(card, "f32") is None
    (tmp_path / "profiles" / f"{profiles.device}.json").write_text("{")
    with pytest.raises(ConfigError, match=r"line 1: not valid JSON"):
        profiles.measured(card, "f32")


def test_shapes_that_differ_have_different_names(tiny_folder: Callable[[str], Path]) -> None:
    cards = [describe(tiny_folder(name), name) for name in ("llama", "qwen3", "opt")]
    profiles = Profiles(None, DEVICE)
    assert len({profiles.shape_name(card, dtype) for card in cards for dtype in ("f32", "bf16")}) == 6


@pytest.mark.skipif(levels() == ["torch"], reason="no native kernels")
def test_quantised_models_take_what_they_are_stored_in(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path)
    plain = catalogue.pull(str(tiny_folder("llama")), name="plain", dtype="f32")
    small = catalogue.pull(str(tiny_folder("llama")), name="small", dtype="f32", layout="int8")
    profiles = Profiles(None, DEVICE)
    assert profiles.shape_name(plain, "f32") != profiles.shape_name(small, "f32")
    runner, loaded = build_runner(InstanceConfig(small, "f32", 1 << 22, 4, 4, 16, 200), DEVICE)
    runner.close()
    assert profiles.weight_bytes(small, "f32") == small.size_bytes < profiles.weight_bytes(plain, "f32") * 2 / 3
    assert loaded.weight_bytes == pytest.approx(small.size_bytes, rel=0.2)  # without the gaps between tensors


@pytest.mark.skipif(levels() == ["torch"], reason="no native kernels")
def test_a_cache_of_int8_is_another_shape_with_a_quarter_of_the_bytes(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    card = describe(tiny_folder("qwen3"), "qwen3")
    profiles = Profiles(tmp_path, DEVICE)
    assert profiles.shape_name(card, "f32") != profiles.shape_name(card, "f32", "int8")
    whole, small = (profiles.shape_of(card, "f32", kv).kv_kib_per_token for kv in ("auto", "int8"))
    assert small == whole * 20 / 64  # 16 floats, or 16 codes and a scale
    limits = {"block_size": 4, "max_kv_tokens": 64, "keep_alive_s": 1.0, "load_s": 0.0}
    hosting = profiles.hosting(card, "f32", "int8", **limits)
    runner, _ = build_runner(InstanceConfig(card, "f32", hosting.kv_bytes_per_token * 64, 4, 4, 16, 60, "int8"), DEVICE)
    assert runner.executor.max_blocks == 64 // 4
    runner.close()


def test_what_is_seen_live_corrects_what_was_expected(tiny_folder: Callable[[str], Path]) -> None:
    live = Profiles(None, DEVICE).latency(describe(tiny_folder("llama"), "llama"), "f32")
    assert isinstance(live, LiveLatency)
    wanted = live.base.prefill_s(64) * 5
    for _ in range(40):
        live.observe_prefill(64, wanted)
    assert live.prefill_s(64) == pytest.approx(wanted, rel=0.05)
    assert live.prefill_s(500) == pytest.approx(live.base.prefill_s(500) * 5, rel=0.05)  # not seen: as its kind
    live.observe_prefill(64, wanted * 1000)  # a hiccup
    assert live.prefill_s(64) < wanted * 1.2


def test_a_model_of_the_store_stays_in_the_pool_and_starts_from_there(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    card = Catalogue(tmp_path).pull(str(tiny_folder("llama")), name="tiny", dtype="f32")
    drop([path for path, _ in partition_files(Path(card.path))])
    pool = HostPool.create(1 << 26)
    options = ("--threads", "1", "--pool", str(pool.file), "--host-keep-alive", "-1")
    with WorkerProcess(*options, pass_fds=[pool.file]) as worker:
        worker.wait_for(messages.Hello)
        tiers = []
        for _ in range(2):
            worker.load(card)
            loaded = worker.wait_for(messages.Loaded)
            assert loaded.mapped
            tiers.append(loaded.tier)
            worker.send(messages.Unload("tiny"))
            worker.wait_for(messages.Unloaded)
    assert tiers == ["disk", "host"]
    assert pool.stats().pinned_bytes == 0
    pool.close()
