"""Two workers on one machine behind one controller: a hot model on both, answers that move, a worker that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_fixture import Server, eventually, running_server

NUM_STREAMS = 50
NUM_TOKENS = 120
# 768 bytes of KV a token in float64: room for about a quarter of the streams on each node.
CONFIG = """
models: {{llama: {{source: {folder}, dtype: f64, keep_alive: 2s}}}}
nodes:
  - {{name: left, threads: 1, kv_cache: 1500KiB, memory: 64MiB}}
  - {{name: right, threads: 1, kv_cache: 1500KiB, memory: 64MiB}}
server: {{resume_timeout: 60s, max_resumptions: 3}}
"""


@pytest.fixture(scope="module")
def server(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tmp_path_factory.mktemp("config") / "dovetail.yaml"
    config.write_text(CONFIG.format(folder=tiny_folder("llama")))
    with running_server("--config", config) as running:
        yield running


async def read(client: openai.AsyncOpenAI, index: int, seen: list[int]) -> str:
    way: dict[str, Any] = {"temperature": 0} if index % 2 else {"temperature": 1.0, "seed": index}
    stream = await client.completions.create(
        model="llama",
        max_tokens=NUM_TOKENS,
        prompt=f"stream {index} of many",
        stream=True,
        extra_body={"ignore_eos": True},
        **way,
    )
    text = ""
    async for chunk in stream:
        seen[index] += 1
        text += "".join(choice.text for choice in chunk.choices)
    return text


async def read_all(server: Server, disturb: Callable[[], None] | None = None) -> list[str]:
    seen = [0] * NUM_STREAMS
    async with server.async_client(timeout=300) as client:
        tasks = [asyncio.create_task(read(client, index, seen)) for index in range(NUM_STREAMS)]
        while disturb is not None and sum(map(bool, seen)) < NUM_STREAMS // 4 and not any(one.done() for one in tasks):
            await asyncio.sleep(0.005)
        if disturb is not None:
            await asyncio.to_thread(disturb)
        return await asyncio.gather(*tasks)


def nodes_of(server: Server, model: str = "llama") -> dict[str, int]:
    """Turns by node that has the model."""
    nodes = server.status()["nodes"]
    return {node["name"]: one["turns"] for node in nodes for one in node["models"] if one["name"] == model}


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[str]:
    return asyncio.run(read_all(server))


def test_a_hot_model_is_on_both_nodes_and_on_one_when_it_has_cooled(server: Server, undisturbed: list[str]) -> None:
    seen: set[str] = set()

    def is_on_both() -> bool:
        seen.update(nodes_of(server))
        return seen == {"left", "right"}

    texts = asyncio.run(read_all(server, lambda: eventually(is_on_both, timeout_s=20.0)))
    assert texts == undisturbed, "an answer does not depend on where it is made"
    client = server.client()

    def is_together() -> bool:
        client.completions.create(model="llama", prompt="lukewarm", max_tokens=2, temperature=0)
        return len(nodes_of(server)) == 1

    eventually(is_together, timeout_s=60.0)


def test_fifty_streams_go_on_when_one_of_two_workers_is_killed(server: Server, undisturbed: list[str]) -> None:
    def kill() -> None:
        eventually(lambda: len(nodes_of(server)) == 2, timeout_s=60.0)
        os.kill(server.node()["pid"], signal.SIGKILL)

    assert asyncio.run(read_all(server, kill)) == undisturbed
    eventually(lambda: all(node["state"] == "up" for node in server.status()["nodes"]), timeout_s=60.0)
    used = [model["blocks_used"] for node in server.status()["nodes"] for model in node["models"]]
    assert sum(used) == 0
