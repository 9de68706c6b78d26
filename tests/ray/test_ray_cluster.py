"""A server over several Ray nodes, as a user starts it: `up`, `join`, `nodes`, `leave`; all on this machine, each in a
network namespace of its own, or with ports of its own where these are refused. Run by `make cluster`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
import pytest
from namespaces import HEAD, Network, is_possible

from dovetail.local_token import token_for

pytest.importorskip("ray.exceptions", reason="the extra `cluster` is not installed; `make cluster` runs these")

COMMAND = [sys.executable, "-c", "from dovetail.cli.main import main; main()"]
NUM_TOKENS = 200
NUM_STREAMS = 50
NAMES = ("north", "east", "south", "west")
TIMEOUT_S = 240.0  # Ray takes its time where others compute


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def eventually(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.1)


class Cluster:
    """A head without a worker, and the machines that joined."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.network = Network() if is_possible() else None
        self.host = HEAD if self.network is not None else "127.0.0.1"
        print("each in a namespace of its own" if self.network is not None else "with ports of their own")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.address = f"{self.host}:{free_port()}"
        self.joined: dict[str, subprocess.Popen[bytes]] = {}
        self.orphans: list[int] = []  # Ray's own processes, of heads that were killed
        self.config = folder / "dovetail.yaml"
        self.config.write_text(f"models: {{llama: {{source: {model}, dtype: f64, keep_alive: 600s}}}}\n")
        self.head = self.up()

    def up(self) -> subprocess.Popen[bytes]:
        ports = [
            "--port",
            str(self.port),
            "--cluster-port",
            self.address.rpartition(":")[2],
            "--cluster-host",
            self.host,
        ]
        state = ["--state", str(self.folder / "state")]
        self.head = self.start("up", "--config", str(self.config), "--head-only", *ports, *state, "--json")
        eventually(self.is_healthy)
        return self.head

    def kill_head(self) -> None:
        self.orphans += [one.pid for one in psutil.Process(self.head.pid).children() if "--head" in one.cmdline()]
        self.head.kill()
        self.head.wait(30)

    def start(self, *arguments: str, within: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{arguments[0]}-{len(self.joined)}.log").open("wb")
        return subprocess.Popen([*within, *COMMAND, *arguments], stdout=log, stderr=subprocess.STDOUT)

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [*COMMAND, *arguments, "--url", self.url], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def is_healthy(self) -> bool:
        assert self.head.poll() is None, (self.folder / "up-0.log").read_text()
        with suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/live", timeout=5).status_code == 200
        return False

    def join(self, name: str) -> None:
        """One after the other: two of Ray's that start at once on one machine may take each other's ports."""
        options = ["--name", name, "--threads", "1", "--memory", "64MiB"]
        within: Sequence[str] = ()
        if self.network is not None:
            options += ["--host", self.network.add(name)]
            within = self.network.within(name)
        self.joined[name] = self.start("join", self.address, *options, within=within)
        eventually(lambda: self.state_of(name) == "up")

    def nodes(self) -> dict[str, dict[str, Any]]:
        answer = httpx.get(f"{self.url}/api/nodes", timeout=30).json()
        return {one["name"]: one for one in answer["data"]}

    def leave(self, name: str) -> None:
        """As the command does, and sooner: the command takes a second to start."""
        headers = {"authorization": f"Bearer {token_for(self.url)}"}
        httpx.post(f"{self.url}/api/nodes/{name}/leave", headers=headers, timeout=30).raise_for_status()

    def num_migrations(self) -> int:
        found: int = httpx.get(f"{self.url}/api/nodes", timeout=30).json()["migrations"]
        return found

    def state_of(self, name: str) -> str | None:
        state: str | None = self.nodes().get(name, {}).get("state")
        return state

    def ask(self, index: int, seen: list[int], silences: list[float] | None = None) -> str:
        """`silences`: gets the longest time between two pieces of the answer, in that of the median."""
        body = {"model": "llama", "prompt": f"stream {index}", "max_tokens": NUM_TOKENS, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True}
        text = ""
        times_s: list[float] = []
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=TIMEOUT_S) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    assert "choices" in chunk, chunk
                    text += chunk["choices"][0]["text"]
                    seen[index] += 1
                    times_s.append(time.monotonic())
        if silences is not None:
            gaps_s = [after - before for before, after in pairwise(times_s)]
            silences.append(max(gaps_s) / median(gaps_s))
        return text

    def ask_all(self, count: int, disturb: Callable[[], None] = lambda: None) -> list[str]:
        seen, texts = [0] * count, [""] * count
        silences: list[float] = []

        def ask(index: int) -> None:
            texts[index] = self.ask(index, seen, silences)

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        eventually(lambda: min(seen) >= 3 or not any(one.is_alive() for one in threads))
        disturb()
        for thread in threads:
            thread.join(TIMEOUT_S)
        silences.sort()
        print(f"longest silence in token times: p50 {median(silences):.1f}, worst of {count} {silences[-1]:.1f}")
        return texts

    def close(self) -> None:
        for process in (self.head, *self.joined.values()):
            process.send_signal(signal.SIGTERM)
        for process in (self.head, *self.joined.values()):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
        for group in self.orphans:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        if self.network is not None:
            self.network.close()


@pytest.fixture(scope="module")
def cluster(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("cluster"), tiny_folder("llama"))
    try:
        for name in NAMES:
            running.join(name)
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[str]:
    return cluster.ask_all(NUM_STREAMS)


def busiest(cluster: Cluster) -> str:
    found: str = max(cluster.nodes().values(), key=lambda one: one["unfinished"])["name"]
    return found


def test_machines_that_join_serve(cluster: Cluster, undisturbed: list[str]) -> None:
    assert all(undisturbed)
    assert set(NAMES) <= {line.split()[0] for line in cluster.run("nodes").splitlines()}


def test_a_worker_that_is_killed_comes_back_and_answers_go_on(cluster: Cluster, undisturbed: list[str]) -> None:
    def kill() -> None:
        os.kill(cluster.nodes()[busiest(cluster)]["pid"], signal.SIGKILL)

    assert cluster.ask_all(NUM_STREAMS, kill) == undisturbed
    eventually(lambda: all(one["state"] == "up" for one in cluster.nodes().values()))


def test_a_machine_leaves_while_it_answers_and_nobody_notices(cluster: Cluster, undisturbed: list[str]) -> None:
    left: list[str] = []

    def leave() -> None:
        left.append(busiest(cluster))
        cluster.leave(left[0])

    assert cluster.ask_all(NUM_STREAMS, leave) == undisturbed
    eventually(lambda: left[0] not in cluster.nodes())
    print(f"answers that moved: {cluster.num_migrations()}")
    assert cluster.num_migrations(), "answers moved, they did not merely end"
    assert cluster.joined[left[0]].wait(30) == 0, "the command that joined it has ended well"
    cluster.join(left[0])


def test_every_machine_is_restarted_under_load_and_no_request_fails(cluster: Cluster, undisturbed: list[str]) -> None:
    texts: list[tuple[int, str]] = []
    failures: list[str] = []
    is_over = threading.Event()

    def keep_asking(first: int) -> None:
        index, seen = first, [0] * NUM_STREAMS
        while not is_over.is_set():
            try:
                texts.append((index, cluster.ask(index, seen)))
            except (AssertionError, httpx.HTTPError) as error:
                failures.append(str(error))
            index = (index + 4) % NUM_STREAMS

    clients = [threading.Thread(target=keep_asking, args=(first,)) for first in range(4)]
    for client in clients:
        client.start()
    try:
        for name in list(cluster.nodes()):
            cluster.run("leave", name)
            eventually(lambda: name not in cluster.nodes())  # noqa: B023
            cluster.join(name)
    finally:
        is_over.set()
        for client in clients:
            client.join(TIMEOUT_S)
    assert not failures
    assert len(texts) > len(clients), "requests came all the time"
    assert all(text == undisturbed[index] for index, text in texts)


def test_a_head_that_is_killed_finds_its_machines_again(cluster: Cluster, undisturbed: list[str]) -> None:
    there = {name: node["pid"] for name, node in cluster.nodes().items()}
    cluster.kill_head()
    cluster.up()
    eventually(
        lambda: cluster.nodes().keys() == there.keys() and all(one["state"] == "up" for one in cluster.nodes().values())
    )
    assert {name: node["pid"] for name, node in cluster.nodes().items()} == there, "no worker was started"
    assert any(node["models"] for node in cluster.nodes().values()), "and their models are there"
    assert cluster.ask_all(NUM_STREAMS) == undisturbed


def test_a_machine_that_goes_without_a_word_is_missed(cluster: Cluster, undisturbed: list[str]) -> None:
    def vanish() -> None:
        process = cluster.joined[busiest(cluster)]
        process.send_signal(signal.SIGTERM)
        process.wait(30)

    assert cluster.ask_all(NUM_STREAMS, vanish) == undisturbed
    eventually(lambda: len(cluster.nodes()) == len(NAMES) - 1)
