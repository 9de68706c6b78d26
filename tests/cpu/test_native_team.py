"""Threads of the native kernels that sleep at a barrier are woken: a wake-up that is lost hangs a worker for ever."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dovetail.native.dispatch import load_kernels

_PROGRAM = """
import sys
from dovetail.native import _kernels
_kernels.pass_barriers(*map(int, sys.argv[1:]))
"""


@pytest.mark.skipif(load_kernels() is None, reason="the native kernels were not built")
@pytest.mark.parametrize(
    ("threads", "rounds", "spins"), [(1, 1000, 0), (2, 100_000, 0), (5, 50_000, 0), (3, 100_000, 200)]
)
def test_no_thread_sleeps_through_a_barrier(threads: int, rounds: int, spins: int) -> None:
    """In a process of its own, which can be ended when it hangs. `make sanitize` runs millions of rounds."""
    command = [sys.executable, "-c", _PROGRAM, str(threads), str(rounds), str(spins)]
    subprocess.run(command, check=True, timeout=200)
