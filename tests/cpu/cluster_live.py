"""Machines that cannot be reached for a while, and machines that come and go all the time, under streams. Real workers
over TCP with keys, through a forwarder in place of a network. Run by `make cluster`; DOVETAIL_JOINS says how many."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fixture import Server, eventually, one_of_many, read_one_of_many

from dovetail.local_token import token_for

NUM_STREAMS = 6
NUM_TOKENS = 200
NUM_JOINS = int(os.environ.get("DOVETAIL_JOINS", "4"))
TIMEOUT_S = 120.0


class Far(Server):
    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in self.get("/api/nodes").json()["data"]}

    def state_of(self, name: str) -> str | None:
        state: str | None = self.nodes().get(name, {}).get("state")
        return state

    def join(self, name: str) -> None:
        self.tell(f"join {name}")
        eventually(lambda: self.state_of(name) == "up", TIMEOUT_S)

    def leave(self, name: str) -> None:
        headers = {"authorization": f"Bearer {token_for(self.url)}"}
        httpx.post(f"{self.url}/api/nodes/{name}/leave", headers=headers, timeout=30).raise_for_status()
        eventually(lambda: name not in self.nodes(), TIMEOUT_S)


@pytest.fixture(scope="module")
def far(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    config = tmp_path_factory.mktemp("far") / "dovetail.yaml"
    models = f"models: {{llama: {{source: {tiny_folder('llama')}, dtype: f64, keep_alive: 600s}}}}"
    config.write_text(f"{models}\nserver: {{resume_timeout: 30s}}\n")
    command = [sys.executable, str(Path(__file__).with_name("far_machines.py")), str(config)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        ready = json.loads(process.stdout.readline())
        running = Far(process, ready["url"], ready["models"])
        for name in ("left", "right"):
            running.join(name)
        yield running
    finally:
        process.terminate()
        process.wait(60)


async def read_all(far: Far, disturb: Callable[[], None] | None = None) -> list[str]:
    seen = [0] * NUM_STREAMS
    async with far.async_client(timeout=TIMEOUT_S) as client:
        reads = [read_one_of_many(client, index, NUM_TOKENS, seen) for index in range(NUM_STREAMS)]
        tasks = [asyncio.create_task(one) for one in reads]
        while disturb is not None and min(seen) < 3 and not any(one.done() for one in tasks):
            await asyncio.sleep(0.002)
        if disturb is not None:
            await asyncio.to_thread(disturb)
        return await asyncio.gather(*tasks)


@pytest.fixture(scope="module")
def undisturbed(far: Far) -> list[str]:
    return asyncio.run(read_all(far))


def test_a_machine_out_of_reach_costs_no_text_and_comes_back_with_its_models(far: Far, undisturbed: list[str]) -> None:
    before = far.nodes()
    cut: list[str] = []

    def part() -> None:
        cut.append(max(far.nodes().values(), key=lambda one: one["unfinished"])["name"])
        far.tell(f"cut {cut[0]}")

    assert asyncio.run(read_all(far, part)) == undisturbed
    eventually(lambda: far.state_of(cut[0]) != "up", TIMEOUT_S)
    assert asyncio.run(read_all(far)) == undisturbed, "the other one serves alone"
    far.tell(f"heal {cut[0]}")
    eventually(lambda: far.state_of(cut[0]) == "up", TIMEOUT_S)
    assert far.nodes()[cut[0]]["pid"] == before[cut[0]]["pid"], "it is the same worker"
    assert far.nodes()[cut[0]]["models"] == before[cut[0]]["models"] or far.nodes()[cut[0]]["models"] == ["llama"]
    assert asyncio.run(read_all(far)) == undisturbed


def test_machines_come_and_go_under_load_and_no_request_fails(far: Far, undisturbed: list[str]) -> None:
    failures: list[str] = []
    counts = [0]

    async def run() -> None:
        is_over = asyncio.Event()
        async with far.async_client(timeout=TIMEOUT_S) as client:

            async def keep_asking(index: int) -> None:
                while not is_over.is_set():
                    text = "".join([piece async for piece in one_of_many(client, index, NUM_TOKENS)])
                    counts[0] += 1
                    if text != undisturbed[index]:
                        failures.append(f"stream {index} said something else")

            clients = [asyncio.create_task(keep_asking(index)) for index in range(3)]
            for number in range(NUM_JOINS):
                await asyncio.to_thread(far.join, f"guest-{number}")
                await asyncio.to_thread(far.leave, f"guest-{number}")
            is_over.set()
            await asyncio.gather(*clients)

    asyncio.run(run())
    assert not failures
    assert counts[0] >= NUM_JOINS, "requests came all the time"
    assert far.nodes().keys() == {"left", "right"}
    print(f"{NUM_JOINS} machines came and went, {counts[0]} streams meanwhile")
