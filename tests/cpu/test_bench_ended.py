"""What a bench has started ends with it, also when it is told to end in the middle."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow  # whole contests of processes

START_TIMEOUT_S = 60


@pytest.mark.parametrize("command", ["chaos", "fronts"])
def test_a_bench_that_is_told_to_end_takes_its_server_with_it(
    command: str, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    arguments = [sys.executable, "-m", "dovetail", "bench", command, str(tiny_folder("llama"))]
    environment = {**os.environ, "DOVETAIL_HOME": str(tmp_path)}
    with (tmp_path / "output").open("w") as output:
        bench = subprocess.Popen(arguments, env=environment, stdout=output, stderr=subprocess.STDOUT)
    server = None
    try:
        server = started_server(bench)
        bench.terminate()
        assert bench.wait(60) == 143
        assert not server.is_running()
    finally:
        bench.kill()
        bench.wait()
        if server is not None and server.is_running():
            server.terminate()


def started_server(bench: subprocess.Popen[bytes]) -> psutil.Process:
    """As soon as it has computed a little: whoever started it knows of it by then."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and bench.poll() is None:
        for child in psutil.Process(bench.pid).children():
            if "serve" in child.cmdline() and child.cpu_times().user > 0.2:
                return child
        time.sleep(0.02)
    raise AssertionError(f"the bench has started no server; it ended with {bench.poll()}")
