"""Two workers on one machine behind one controller: a hot model on both, answers that move, a worker that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from server_fixture import Server, eventually, one_of_many, running_server

NUM_STREAMS = 50
NUM_TOKENS = 120
KILLED = -1  # among the times at which streams went on
# 768 bytes of KV a token in float64: room for about a quarter of the streams on each node.
CONFIG = """
models: {{llama: {{source: {folder}, dtype: f64, keep_alive: 2s}}}}
nodes:
  - {{name: left, threads: 1, kv_cache: 1500KiB, memory: 64MiB, event_log: {log}}}
  - {{name: right, threads: 1, kv_cache: 1500KiB, memory: 64MiB, event_log: {log}}}
server: {{resume_timeout: 60s, max_resumptions: 3}}
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config") / "decisions.jsonl"


@pytest.fixture(scope="module")
def server(tiny_folder: Callable[[str], Path], log: Path) -> Iterator[Server]:
    config = log.parent / "dovetail.yaml"
    config.write_text(CONFIG.format(folder=tiny_folder("llama"), log=log))
    with running_server("--config", config) as running:
        yield running


async def read(client: openai.AsyncOpenAI, index: int, seen: list[int], back: dict[int, float]) -> str:
    text = ""
    async for piece in one_of_many(client, index, NUM_TOKENS):
        seen[index] += 1
        if KILLED in back:
            back.setdefault(index, time.monotonic() - back[KILLED])
        text += piece
    return text


async def read_all(
    server: Server, disturb: Callable[[], None] | None = None, back: dict[int, float] | None = None
) -> list[str]:
    """`back`: when a worker was killed, and by stream, how long after that its next text came."""
    seen = [0] * NUM_STREAMS
    times = {} if back is None else back
    async with server.async_client(timeout=300) as client:
        tasks = [asyncio.create_task(read(client, index, seen, times)) for index in range(NUM_STREAMS)]
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


def moves_in_mid_answer(log: Path) -> int:
    """Of answers that had begun, to another node, live or by computing them anew. Lines of two processes, by time."""
    lines = sorted((json.loads(line) for line in log.read_text().splitlines()[1:]), key=lambda said: said["t"])
    node_of: dict[int, str] = {}
    begun: set[int] = set()
    moves = 0
    for said in lines:
        if said["event"] in ("placed", "migrated"):
            moves += said["request"] in begun and node_of.get(said["request"], said["node"]) != said["node"]
            node_of[said["request"]] = said["node"]
        elif said["event"] == "first_token":
            begun.add(said["request"])
    return moves


def test_answers_that_must_move_in_their_midst_to_another_node_have_the_same_text(
    server: Server, undisturbed: list[str], log: Path
) -> None:
    """A node whose memory is short lets answers go, which the other one goes on with."""
    client = server.client()
    for index in range(0, NUM_STREAMS, 7):  # alone, nothing has to move
        way: dict[str, Any] = {"temperature": 0} if index % 2 else {"temperature": 1.0, "seed": index}
        body = {"ignore_eos": True}
        prompt = f"stream {index} of many"
        alone = client.completions.create(model="llama", max_tokens=NUM_TOKENS, prompt=prompt, extra_body=body, **way)
        assert alone.choices[0].text == undisturbed[index]
    assert moves_in_mid_answer(log)


def test_fifty_streams_go_on_when_one_of_two_workers_is_killed(server: Server, undisturbed: list[str]) -> None:
    back: dict[int, float] = {}

    def kill() -> None:
        eventually(lambda: len(nodes_of(server)) == 2, timeout_s=60.0)
        os.kill(server.node()["pid"], signal.SIGKILL)
        back[KILLED] = time.monotonic()

    assert asyncio.run(read_all(server, kill, back)) == undisturbed
    del back[KILLED]
    print(
        f"first text after the kill: {sorted(back.values())[len(back) // 2]:.2f} s (median), {max(back.values()):.2f} s"
    )
    eventually(lambda: all(node["state"] == "up" for node in server.status()["nodes"]), timeout_s=60.0)
    used = [model["blocks_used"] for node in server.status()["nodes"] for model in node["models"]]
    assert sum(used) == 0


NUM_LONG = 64


async def first_word(client: openai.AsyncOpenAI, **way: Any) -> str:
    """Text or a refusal, whichever comes first."""
    body = {"model": "llama", "prompt": "me too", "max_tokens": 3, "stream": True, "temperature": 0} | way
    try:
        stream = await client.completions.create(**body)
        async for _ in stream:
            return "text"
    except openai.APIStatusError as error:
        return str(error.status_code)
    return "nothing"


class Newcomer(NamedTuple):
    got: str
    still_answered: int  # long answers that had not ended when it came


async def crowd(server: Server) -> tuple[list[Newcomer], set[str | None]]:
    """Newcomers beside long answers without targets and one request for 128 answers; and how the long ones ended."""
    async with server.async_client(timeout=300) as client:
        begun = asyncio.Event()

        async def long(index: int) -> str | None:
            body = {"model": "llama", "prompt": f"long {index}", "max_tokens": 150, "stream": True}
            stream = await client.completions.create(**body, extra_body={"ignore_eos": True})
            count, end = 0, None
            async for chunk in stream:
                count += 1
                end = chunk.choices[0].finish_reason
                if count == 20:
                    begun.set()
            return end

        many = {"model": "llama", "prompt": "many", "max_tokens": 20, "n": 128, "extra_body": {"ignore_eos": True}}
        tasks = [asyncio.create_task(long(index)) for index in range(NUM_LONG)]
        choices = asyncio.create_task(client.completions.create(**many))
        await begun.wait()
        targets = {"x-slo-ttft-ms": "1000", "x-slo-tpot-ms": "40"}
        newcomers = []
        for headers in ({}, targets):
            got = await first_word(client, extra_headers=headers)
            newcomers.append(Newcomer(got, sum(not task.done() for task in tasks)))
        ends = await asyncio.gather(*tasks)
        assert len((await choices).choices) == 128
        return newcomers, set(ends)


def test_newcomers_wait_neither_for_long_streams_nor_for_128_choices_to_end(server: Server) -> None:
    (newcomer, strict), ends = asyncio.run(crowd(server))
    assert newcomer.got == "text"
    assert newcomer.still_answered > NUM_LONG / 2
    assert strict.got in ("text", "503")
    assert strict.still_answered > NUM_LONG / 2
    assert ends == {"length"}, "the long ones end as they should"
