"""`dovetail bench store` on a checkpoint of a few kilobytes, with every loader that is here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dovetail.cli.main import build_app
from dovetail_bench import fio

pytestmark = pytest.mark.slow  # whole contests of processes

KEYS = {"loader", "model", "state", "bytes", "seconds_median", "gbps", "ratio_to_fio"}
OPTIONS = ("--rounds", "1", "--no-install", "--no-drop-caches")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    return tmp_path


def bench(*arguments: str):
    return CliRunner().invoke(build_app("bench"), ["bench", "store", *arguments, *OPTIONS])


def test_json_has_every_contender_and_the_folder_is_left_as_it_was(home: Path) -> None:
    done = bench("--models", "tiny", "--folder", str(home), "--breakdown", "--json")
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)
    assert all(result.keys() >= KEYS for result in results)
    cold = {result["loader"]: result for result in results if result["state"] == "cold"}
    warm = {result["loader"]: result for result in results if result["state"] == "warm"}
    ours = {"dovetail (pool)", "dovetail (fresh memory)"}
    peers = {"safetensors mmap", "safetensors load_file", "torch.load"}
    reference = "fio" if fio.is_installed() else "raw read (no fio)"
    steps = ("by tensor", "+ bulk", "+ direct", "+ threads", "+ pipeline")
    assert cold.keys() >= {*ours, *peers, reference, *(f"breakdown: {step}" for step in steps)}
    assert warm.keys() >= {*ours, *peers, reference, "dovetail (in the pool)"}
    assert cold[reference]["ratio_to_fio"] == 1.0
    assert all(result["bytes"] > 100_000 and result["gbps"] > 0 for result in results)
    for missing in {"fastsafetensors", "runai-model-streamer"} - cold.keys():
        assert f"not measured: {missing}: {missing} is not installed" in done.stderr
    assert not (home / "store-bench").exists()


def test_an_adapter_is_loaded_by_ours_and_by_safetensors_and_kept_if_asked(home: Path) -> None:
    options = ("--models", "tiny", "--folder", str(home), "--lora", "--keep")
    done = bench(*options, "--loaders", "dovetail,safetensors mmap")
    assert done.exit_code == 0, done.output
    assert "tiny-lora, cold" in done.stdout
    for loader in ("dovetail (pool)", "dovetail (in the pool)", "safetensors mmap"):
        assert loader in done.stdout
    assert "torch.load" not in done.stdout
    weights = home / "store-bench" / "tiny-lora" / "adapter_model.safetensors"
    before = weights.stat().st_mtime_ns
    assert bench(*options, "--loaders", "dovetail (pool)").exit_code == 0
    assert weights.stat().st_mtime_ns == before


def test_an_unknown_shape_is_refused(home: Path) -> None:
    done = bench("--models", "1b,9z")
    assert done.exit_code != 0
    assert "--models: '9z' is none of 1b, 3b, tiny" in str(done.exception)
