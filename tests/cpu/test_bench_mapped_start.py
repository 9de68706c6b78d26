"""The bench of mapped starts, on a model small enough to try it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # whole contests of processes


def test_a_start_from_the_pool_copies_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dovetail", "bench", "mapped-start", "--shape", "tiny", "--runs", "2", "--json"]
    done = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert (result["copied_bytes"], result["pool_growth_bytes"], result["runs"]) == (0, 0, 2)
    assert result["weight_bytes"] > 100_000
    assert list(tmp_path.iterdir()) == []
