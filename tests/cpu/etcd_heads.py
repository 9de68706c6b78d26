"""Two heads of one Ray cluster on one machine, with one state in a real etcd: when the leading one is killed the other
has the machine that joined, with its worker and what that has loaded. Run by `make cluster`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from etcd_fixture import free_port, running_etcd
from server_fixture import COMMAND, Server
from test_server_restart import kill, metric, nodes, text

pytest.importorskip("ray")

LEASE_S = 3
TIMEOUT_S = 120.0
CONFIG = "models: {{llama: {{source: {folder}, dtype: f64, keep_alive: 600s}}}}\nstore: {{path: {store}}}\n"


@contextmanager
def command(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([*COMMAND, *map(str, arguments)], stdout=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


@contextmanager
def ended_ray(processes: list[int]) -> Iterator[None]:
    """Of a head that was killed: in sessions of their own, which it would have ended."""
    try:
        yield
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)


def seconds_until(condition: Callable[[], object]) -> float:
    """A server that is not there yet has not met it."""
    began = time.monotonic()
    while time.monotonic() - began < TIMEOUT_S:
        with suppress(httpx.TransportError, KeyError):
            if condition():
                return time.monotonic() - began
        time.sleep(0.1)
    raise AssertionError("it never happened")


@pytest.mark.timeout(600)
def test_a_second_head_takes_the_machines_over_with_what_they_have_loaded(
    tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("h")
    config = folder / "dovetail.yaml"
    config.write_text(CONFIG.format(folder=tiny_folder("llama"), store=folder / "s"))
    cluster, orphans = free_port(), list[int]()
    with running_etcd(folder / "etcd") as etcd, ended_ray(orphans), ExitStack() as stack:

        def head() -> Server:
            ports = ["--port", str(port := free_port()), "--cluster-port", str(cluster)]
            state = ["--state", etcd.state("heads", LEASE_S)]
            process = stack.enter_context(command("up", "--config", config, "--head-only", *ports, *state))
            return Server(process, f"http://127.0.0.1:{port}", [])

        first = head()
        seconds_until(lambda: first.get("/api/nodes").status_code == 200)
        stack.enter_context(
            command("join", f"127.0.0.1:{cluster}", "--name", "far", "--threads", "1", "--memory", "64MiB")
        )
        seconds_until(lambda: nodes(first)["far"]["state"] == "up")
        second = head()
        seconds_until(lambda: second.get("/health").json()["status"] == "waiting")
        said, before = text(first), nodes(first)["far"]["pid"]
        orphans += [one.pid for one in psutil.Process(first.process.pid).children() if "--head" in one.cmdline()]
        kill(first)
        up_s = seconds_until(lambda: nodes(second)["far"]["state"] == "up")
        assert nodes(second)["far"]["pid"] == before, "no worker was started"
        assert text(second) == said
        assert metric(second, "model_load_seconds_count") == 0, "nothing was loaded"
        print(f"\nlease {LEASE_S} s: the head killed, its machine was the other's {up_s:.1f} s later")
