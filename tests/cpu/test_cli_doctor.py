"""`doctor` and what it looks at: the answers of `machine` for several kinds of processor, and a report on this one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.cli.doctor import examine, explain_large, measure_read
from dovetail.engine.dtypes import compute_dtype
from dovetail.errors import ConfigError
from dovetail.machine import (
    Cpu,
    memory_bytes,
    parse_gpu_list,
    preferred_dtype,
    read_cpu,
    read_gpus,
    usable_gpus,
)
from dovetail.native import explain, levels, select
from dovetail.native.dispatch import VARIABLE
from dovetail.store import Catalogue

XEON = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) 8480+\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16\n\n"
OLD_XEON = (
    "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) E5\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t: fpu amx_bf16\n"
)
GRAVITON3 = "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n\n"
NEOVERSE_N1 = "processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\n"


@pytest.mark.parametrize(
    ("text", "model", "bf16", "amx"),
    [
        (XEON, "Intel(R) Xeon(R) 8480+", True, True),
        (OLD_XEON, "Intel(R) Xeon(R) E5", False, False),
        (GRAVITON3, "Neoverse-V1", True, False),
        (NEOVERSE_N1, "Neoverse-N1", False, False),
    ],
)
def test_features_are_read_from_the_kernel(text: str, model: str, bf16: bool, amx: bool, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    cpu = read_cpu(tmp_path / "cpuinfo")
    assert (cpu.model, cpu.has_fast_bf16, cpu.has_amx) == (model, bf16, amx)
    assert cpu.cores >= 1


def test_a_machine_without_cpuinfo_is_still_described(tmp_path: Path) -> None:
    cpu = read_cpu(tmp_path / "none")
    assert cpu.model
    assert cpu.features == frozenset()


def test_the_answers_about_this_machine_agree() -> None:
    assert read_cpu().has_amx <= read_cpu().has_fast_bf16
    fastest = "bf16" if read_cpu().has_fast_bf16 else "f16" if read_cpu().has_fast_f16 else "f32"
    assert preferred_dtype() == fastest
    total, available = memory_bytes()
    assert total >= available > 0


def test_gpus_are_read_from_the_driver_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "NVIDIA H200, 143771, 570.1"\necho "Broken, [N/A], 570.1"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (gpu,) = read_gpus()
    assert (gpu.name, gpu.memory_bytes, gpu.driver) == ("NVIDIA H200", 143771 * 2**20, "570.1")
    monkeypatch.setenv("PATH", "/nowhere")
    assert read_gpus() == ()


def test_the_report_says_what_follows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = Cpu("plain", "x86_64", frozenset({"avx2"}), 4)
    monkeypatch.setattr("dovetail.cli.doctor.read_cpu", lambda: plain)
    monkeypatch.setattr("dovetail.cli.doctor.read_gpus", lambda: ())
    monkeypatch.setattr("dovetail.cli.doctor._read_torch", lambda: None)
    report = examine(tmp_path / "not" / "yet")
    assert any("no bf16 matrix instructions" in note for note in report.notes)
    assert any("no NVIDIA GPU" in note for note in report.notes)
    assert report.missing == ["torch cannot be imported: nothing can be served"]
    assert report.store_read_bytes_per_s is None or report.store_read_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_not_measured(tmp_path: Path) -> None:
    assert measure_read(tmp_path / "none") is None


def test_doctor_runs_here() -> None:
    import sys

    line = [sys.executable, "-m", "dovetail", "doctor", "--json"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["torch"]["import_s"] > 0
    assert report["dtype"] == preferred_dtype()
    assert report["kernels"] in levels()
    assert report["kernels_why"]


def test_a_forced_level_is_taken_or_named_as_impossible() -> None:
    assert select("auto", {VARIABLE: "torch"}).kernels is None
    assert explain({VARIABLE: "torch"}) == ("torch", "DOVETAIL_KERNELS says so")
    assert "cannot run here" in explain({VARIABLE: "abacus"})[1]
    with pytest.raises(ConfigError, match="DOVETAIL_KERNELS: unknown kernel level 'abacus'"):
        select("auto", {VARIABLE: "abacus"})
    assert select("torch", {VARIABLE: "abacus"}).level == "torch", "who names a level does not ask the environment"
    best = select("auto", {})
    assert (best.level, best.kernels is not None) == (levels()[-1], levels()[-1] != "torch")


def test_float16_is_computed_by_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_KERNELS", "torch")
    assert compute_dtype("auto", "f16") == ("bf16" if read_cpu().has_fast_bf16 else "f32"), (
        "torch's own would take minutes"
    )


LISTED = """GPU 0: NVIDIA H200 (UUID: GPU-0b9ee7b9-0f4e-5d84-a2a4-7ad8a9a7b1d0)
GPU 1: NVIDIA H200 (UUID: GPU-1c9ee7b9-0f4e-5d84-a2a4-7ad8a9a7b1d0)
  MIG 3g.71gb     Device  0: (UUID: MIG-2d9ee7b9-0f4e-5d84-a2a4-7ad8a9a7b1d0)
  MIG 1g.18gb     Device  1: (UUID: MIG-3e9ee7b9-0f4e-5d84-a2a4-7ad8a9a7b1d0)
"""


def test_a_gpu_is_named_by_its_number_and_one_in_slices_by_those() -> None:
    slices = ("MIG-2d9ee7b9-0f4e-5d84-a2a4-7ad8a9a7b1d0", "MIG-3e9ee7b9-0f4e-5d84-a2a4-7ad8a9a7b1d0")
    assert parse_gpu_list(LISTED) == ("cuda:0", *slices)
    assert parse_gpu_list("no devices") == ()


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("", 0), ("-1", 0), ("0", 1), ("1, 0", 2), ("0,-1,1", 1), ("7", 0), ("MIG-2d9ee7b9", 1), ("GPU-5", 0)],
)
def test_a_gpu_that_cuda_does_not_show_is_nobodys(visible: str, seen: int) -> None:
    assert parse_gpu_list(LISTED, visible) == ("cuda:0", "cuda:1")[:seen]


@pytest.mark.skipif(bool(usable_gpus()), reason="there is a GPU")
def test_preparing_kernels_without_a_gpu_is_an_error_that_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dovetail", "doctor", "--prepare", "--store", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "--prepare: there is no GPU here that models could run on" in done.stderr


def test_models_that_are_larger_than_a_cpu_node_are_named(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    card = Catalogue(tmp_path).pull(str(tiny_folder("llama")), name="large")
    memory = card.size_bytes  # of which a node takes three quarters
    (note,) = explain_large([card], memory, read_bytes_per_s=card.size_bytes / 40)
    assert "large" in note
    assert "10.0 s" in note
    (note,) = explain_large([card], memory, None)
    assert " s at" not in note
    assert explain_large([card], 2 * memory, None) == []
