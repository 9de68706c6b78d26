"""A server over several Ray nodes, as a user starts it: `up` and `join`; all on this machine, each in a network
namespace of its own or, where these are refused, with ports of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
from namespaces import HEAD, Network, is_possible

from dovetail.local_token import token_for

COMMAND = [sys.executable, "-c", "from dovetail.cli.main import main; main()"]
NUM_TOKENS = 200
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
    """A head, with a worker of its own or without, and the machines that joined."""

    def __init__(self, folder: Path, config: str, memory: str, *, has_worker: bool = False) -> None:
        self.folder = folder
        self._memory = memory
        self._has_worker = has_worker
        self.network = Network() if is_possible() else None
        self.host = HEAD if self.network is not None else "127.0.0.1"
        print("each in a namespace of its own" if self.network is not None else "with ports of their own")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.address = f"{self.host}:{free_port()}"
        self.joined: dict[str, subprocess.Popen[bytes]] = {}
        self.orphans: list[int] = []  # Ray's own processes, of heads that were killed
        self.config = folder / "dovetail.yaml"
        self.config.write_text(config)
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
        worker = [] if self._has_worker else ["--head-only"]
        self.head = self.start("up", "--config", str(self.config), *worker, *ports, *state, "--json")
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
        options = ["--name", name, "--threads", "1", "--memory", self._memory]
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
        """`silences`: gets the longest time between two pieces of the answer, in seconds."""
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
            silences.append(max(after - before for before, after in pairwise(times_s)))
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
        print(f"longest silence of an answer: p50 {median(silences):.2f} s, worst of {count} {silences[-1]:.2f} s")
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
