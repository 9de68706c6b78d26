"""Answers that move between two workers while they are spoken: one text, unbroken, as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fixture import Server, eventually, read_one_of_many, running_server

from dovetail.local_token import token_for

NUM_STREAMS = 6
NUM_TOKENS = 200
CONFIG = """
models: {{llama: {{source: {folder}, dtype: f64, keep_alive: 60s}}}}
nodes:
  - {{name: left, threads: 1, memory: 64MiB}}
  - {{name: right, threads: 1, memory: 64MiB}}
"""


@pytest.fixture(scope="module")
def server(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tmp_path_factory.mktemp("config") / "dovetail.yaml"
    config.write_text(CONFIG.format(folder=tiny_folder("llama")))
    with running_server("--config", config) as running:
        yield running


def nodes(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/api/nodes").json()
    return found


def change(server: Server, node: str, verb: str) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {token_for(server.url)}"}
    answer = httpx.post(f"{server.url}/api/nodes/{node}/{verb}", headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    state: dict[str, Any] = answer.json()
    return state


async def read_all(server: Server, disturb: Callable[[], None] | None = None) -> list[str]:
    seen = [0] * NUM_STREAMS
    async with server.async_client(timeout=300) as client:
        tasks = [asyncio.create_task(read_one_of_many(client, index, NUM_TOKENS, seen)) for index in range(NUM_STREAMS)]
        while disturb is not None and min(seen) < 4 and not any(one.done() for one in tasks):
            await asyncio.sleep(0.002)
        if disturb is not None:
            await asyncio.to_thread(disturb)
        return await asyncio.gather(*tasks)


def busiest(server: Server) -> str:
    found: str = max(nodes(server)["data"], key=lambda one: one["unfinished"])["name"]
    return found


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[str]:
    return asyncio.run(read_all(server))


def test_a_node_that_is_drained_hands_its_answers_over_while_they_are_spoken(
    server: Server, undisturbed: list[str]
) -> None:
    drained: list[str] = []

    def drain() -> None:
        """The node stands still until one of its answers is on the move: none of them can have ended before."""
        name = busiest(server)
        drained.append(name)
        pid = server.get(f"/api/nodes/{name}").json()["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            change(server, name, "drain")
            eventually(lambda: server.get(f"/api/nodes/{name}").json()["moving_away"])
        finally:
            os.kill(pid, signal.SIGCONT)
        eventually(lambda: server.get(f"/api/nodes/{name}").json()["state"] == "drained", timeout_s=60)

    assert asyncio.run(read_all(server, drain)) == undisturbed
    assert change(server, drained[0], "resume")["state"] == "up"
    assert nodes(server)["migrations"], "answers moved, they did not merely end"
    used = [model["blocks_used"] for node in server.status()["nodes"] for model in node["models"]]
    assert sum(used) == 0, "neither source nor destination keeps anything"


def test_answers_go_back_and_forth(server: Server, undisturbed: list[str]) -> None:
    def there_and_back() -> None:
        for _ in range(3):
            name = busiest(server)
            change(server, name, "drain")
            eventually(lambda: server.get(f"/api/nodes/{name}").json()["state"] == "drained", timeout_s=60)  # noqa: B023
            change(server, name, "resume")

    assert asyncio.run(read_all(server, there_and_back)) == undisturbed


def test_a_node_that_is_not_there_is_named(server: Server) -> None:
    answer = server.get("/api/nodes/middle")
    assert answer.status_code == 404
    assert "there are: left, right" in answer.json()["error"]["message"]
