"""The GPU's Triton kernels by Triton's interpreter, where Triton is installed; on a GPU itself: tests/gpu."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (dovetail[cuda])"
)


@needs_triton
def test_every_kernel_computes_what_torch_does() -> None:
    """In a process of its own: whether Triton interprets is decided when it is imported."""
    script = Path(__file__).with_name("interpret_gpu_kernels.py")
    own = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(script.parents[1])}
    done = subprocess.run([sys.executable, script], env=os.environ | own, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
def test_threads_that_load_kernels_at_the_same_time_have_each_its_own() -> None:
    script = Path(__file__).with_name("load_gpu_launchers.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
