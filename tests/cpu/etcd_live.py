"""Two gateways on one machine with one state in a real etcd: the one that leads is killed, stopped, and left without
etcd, under streams. Run by `make etcd`; prints what it saw."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from etcd_fixture import Etcd, free_port, running_etcd
from server_fixture import COMMAND, Server, eventually, running_server
from test_server_restart import begin_streams, kill, metric, nodes, post, text

from dovetail.gateway.workers.etcd import EtcdClient, parse_address

LEASE_S = 3
CONFIG = """
models:
  llama: {{source: {folder}, dtype: f64, keep_alive: 600s}}
server: {{state: "{state}", outlive: 60s, drain_timeout: 2s}}
store: {{path: {store}}}
nodes:
  - {{name: left, threads: 1, memory: 64MiB}}
"""


class Gateway(Server):
    """One that may have to wait for its turn: its lines are read as they come."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        super().__init__(process, url, [])
        self.said: list[dict[str, Any]] = []
        self.threads = threading.Thread(target=self._read, daemon=True)
        self.threads.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(json.loads(line))

    @property
    def waits(self) -> bool:
        return any("waiting" in one for one in self.said)

    @property
    def serves(self) -> bool:
        return any("models" in one for one in self.said)


@contextmanager
def gateway(config: Path) -> Iterator[Gateway]:
    port = free_port()
    command = [*COMMAND, "serve", "--config", str(config), "--port", str(port), "--json"]
    with (config.parent / f"gateway-{port}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        running = Gateway(process, f"http://127.0.0.1:{port}")
        try:
            yield running
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                process.wait(60)
            running.threads.join(10)


def log_of(server: Server) -> str:
    port = server.url.rpartition(":")[2]
    (file,) = Path(os.environ["DOVETAIL_ETCD_LIVE"]).glob(f"gateway-{port}.log")
    return file.read_text()


@pytest.fixture
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def config(
    etcd: Etcd, tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any
) -> Path:
    folder = tmp_path_factory.mktemp("g")
    monkeypatch.setenv("DOVETAIL_ETCD_LIVE", str(folder))
    file = folder / "dovetail.yaml"
    state = etcd.state("live", LEASE_S)
    file.write_text(CONFIG.format(folder=tiny_folder("llama"), state=state, store=folder / "s"))
    return file


def leader_of(etcd: Etcd) -> str:
    """As etcd has it; nobody: an empty text."""
    client = EtcdClient(parse_address(etcd.state("live")), 5.0)
    found = client.range("live/leader")
    client.close()
    return found[0].value if found else ""


def seconds_until(condition: Callable[[], object], timeout_s: float = 60.0) -> float:
    began = time.monotonic()
    eventually(condition, timeout_s)
    return time.monotonic() - began


@pytest.mark.timeout(300)
def test_when_the_leading_gateway_is_killed_the_other_leads_with_its_workers_and_a_front_loses_no_stream(
    etcd: Etcd, config: Path, tiny_folder: Callable[[str], Path]
) -> None:
    with gateway(config) as first:
        eventually(lambda: first.serves, 90)
        with (
            gateway(config) as second,
            running_server(etcd.state("live", LEASE_S), "--config", config, verb="front") as front,
        ):
            eventually(lambda: second.waits)
            assert second.get("/live").status_code == 200
            health, answer = second.get("/health"), second.post("/v1/completions", {"model": "llama"})
            assert (health.status_code, health.json()["status"]) == (503, "waiting")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_leading")
            assert "retry-after" in answer.headers
            undisturbed = begin_streams(front)[0].result(120)
            post(first, "/api/models", {"name": "added", "source": str(tiny_folder("llama"))})
            before = {name: node["pid"] for name, node in nodes(first).items()}

            said, seen = begin_streams(front)
            broken, seen_too = begin_streams(first)
            eventually(lambda: min(*seen, *seen_too) > 2 or said.done(), 60)
            kill(first)
            lead_s = seconds_until(lambda: second.url in leader_of(etcd))
            serve_s = lead_s + seconds_until(lambda: second.serves)
            assert said.result(120) == undisturbed, "every client of the front got all of its text"
            with pytest.raises((openai.APIConnectionError, httpx.TransportError)):
                broken.result(60)
            assert {name: node["pid"] for name, node in nodes(second).items()} == before, "no worker was started"
            assert metric(second, "model_load_seconds_count") == 0, "nothing was loaded"
            assert text(second) == text(front)
            assert "added" in second.get("/v1/models").text
            print(f"\nlease {LEASE_S} s: killed; the other led {lead_s:.1f} s later, and served after {serve_s:.1f} s")

            with gateway(config) as third:
                eventually(lambda: third.waits)
                kill(second)
                os.kill(before["left"], signal.SIGKILL)
                eventually(lambda: third.serves, 60)
                eventually(lambda: nodes(third)["left"]["models"], 60)  # it was ready, and nobody has asked for it
                assert metric(third, "model_load_seconds_count") == 1
                third.terminate()
                assert third.wait() == 0
                assert leader_of(etcd) == "", "one that ends lets the next one lead at once"


@pytest.mark.timeout(300)
def test_a_leader_that_slept_too_long_ends_and_says_so_and_its_workers_serve_the_next(etcd: Etcd, config: Path) -> None:
    with gateway(config) as first:
        eventually(lambda: first.serves, 90)
        undisturbed = text(first)
        before = {name: node["pid"] for name, node in nodes(first).items()}
        with gateway(config) as second:
            eventually(lambda: second.waits)
            first.process.send_signal(signal.SIGSTOP)
            lead_s = seconds_until(lambda: second.url in leader_of(etcd))
            first.process.send_signal(signal.SIGCONT)
            assert first.process.wait(30) == 75
            assert "deposed" in log_of(first)
            eventually(lambda: second.serves, 60)
            assert text(second) == undisturbed
            assert {name: node["pid"] for name, node in nodes(second).items()} == before
            print(f"\nlease {LEASE_S} s: stopped; the other led {lead_s:.1f} s later")


@pytest.mark.timeout(300)
def test_without_etcd_streams_go_on_and_after_the_lease_nothing_new_begins_until_it_is_back(
    etcd: Etcd, config: Path
) -> None:
    with gateway(config) as only:
        eventually(lambda: only.serves, 90)
        undisturbed = begin_streams(only)[0].result(120)
        said, seen = begin_streams(only)
        eventually(lambda: min(seen) > 2 or said.done(), 60)
        etcd.pause()
        try:
            assert said.result(120) == undisturbed
            eventually(lambda: only.get("/health").json()["status"] == "not leading")
            refused = only.post("/v1/completions", {"model": "llama", "prompt": "so", "max_tokens": 1})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_leading")
        finally:
            etcd.resume()
        eventually(lambda: only.get("/health").status_code == 200)
        assert text(only)
        assert etcd.host in log_of(only)
        assert "leads as before" in log_of(only)
