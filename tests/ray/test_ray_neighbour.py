"""A machine that joins by Ray with an empty store, as a user starts it, serves what the head has. `make cluster` runs
this."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from dovetail.store import Catalogue

pytest.importorskip("ray.exceptions", reason="the extra `cluster` is not installed; `make cluster` runs these")

COMMAND = [sys.executable, "-c", "from dovetail.cli.main import main; main()"]
TIMEOUT_S = 240.0  # Ray takes its time where others compute


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.1)


def is_live(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/live", timeout=5).status_code == 200
    return False


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """From a folder of its own: what the head finds under /proc/self/cwd the machine does not."""
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*COMMAND, *arguments], stdout=log, stderr=log, cwd=folder)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()


def test_a_machine_that_joins_without_models_serves_them(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    head, machine = tmp_path / "head", tmp_path / "machine"
    Catalogue(head / "store").pull(str(tiny_folder("llama")), name="llama")
    port, cluster_port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    up = ["up", "--head-only", "--port", port, "--cluster-port", cluster_port]
    up += ["--store", "/proc/self/cwd/store", "--state", str(head / "state")]

    def states() -> dict[str, Any]:
        with suppress(httpx.TransportError):
            return {one["name"]: one["state"] for one in httpx.get(f"{url}/api/nodes", timeout=30).json()["data"]}
        return {}

    with running(head, *up) as process:
        eventually(lambda: is_live(url) or process.poll() is not None)
        assert process.poll() is None, (head / "log").read_text()
        join = ["join", f"127.0.0.1:{cluster_port}", "--name", "far", "--threads", "1", "--memory", "64MiB"]
        with running(machine, *join, "--store", str(machine / "models-here"), "--max-size", "1GB"):
            eventually(lambda: states() == {"far": "up"})
            body = {"model": "llama", "prompt": "fox", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S).json()
            assert answer["usage"]["completion_tokens"] == 8, answer
            (copy,) = (machine / "models-here" / "models").iterdir()
            assert copy.name.startswith("llama-")
            assert 'tier="neighbour"' in httpx.get(f"{url}/metrics", timeout=30).text
