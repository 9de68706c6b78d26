"""What a server survives: workers that are killed, and what its clients see of it."""

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
# As many ways to choose a token as there are states that a resumed answer must bring along.
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 8, "frequency_penalty": 0.5, "extra_body": {"repetition_penalty": 1.2}},
    {"temperature": 1.0, "seed": 9, "n": 2},
    {"temperature": 1.0, "seed": 10, "logprobs": 2, "extra_body": {"min_tokens": NUM_TOKENS}},
]

Texts = dict[int, str]


@pytest.fixture(scope="module")
def server(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tmp_path_factory.mktemp("config") / "dovetail.yaml"
    # In float64, so that rounding cannot decide a draw; and patient, because this machine may be busy with other tests.
    config.write_text(
        f"models: {{llama: {{source: {tiny_folder('llama')}, dtype: f64}}, slow: {{source: {tiny_folder('qwen3')}}}}}\n"
        "server: {resume_timeout: 60s, max_resumptions: 3}\n"
    )
    with running_server("--config", config, "--threads", "1", "--kv-cache", "64MiB") as running:
        yield running


async def read(client: openai.AsyncOpenAI, index: int, seen: list[int]) -> Texts:
    """The text of every choice of one stream; `seen` counts events as they come."""
    options = {"model": "llama", "max_tokens": NUM_TOKENS, "prompt": f"stream {index} of many", "stream": True}
    way = WAYS[index % len(WAYS)]
    extra = {"ignore_eos": True, **way.get("extra_body", {})}
    texts: Texts = {}
    stream = await client.completions.create(**{**options, **way, "extra_body": extra})
    async for chunk in stream:
        seen[index] += 1
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


async def read_all(server: Server, disturb: Callable[[], None] | None) -> list[Texts]:
    seen = [0] * NUM_STREAMS
    async with server.async_client(timeout=300) as client:
        tasks = [asyncio.create_task(read(client, index, seen)) for index in range(NUM_STREAMS)]
        while disturb is not None and min(seen) == 0:  # the worker is far ahead of what is read here
            await asyncio.sleep(0.005)
        if disturb is not None:
            disturb()
        return await asyncio.gather(*tasks)


def metric(server: Server, name: str) -> float:
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def kill_worker(server: Server, *, other_than: int | None = None) -> int:
    eventually(lambda: server.node()["pid"] not in (None, other_than))
    pid: int = server.node()["pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_worker_is_in_the_gateways_session_where_its_niceness_counts_and_in_a_group_of_its_own(
    server: Server,
) -> None:
    eventually(lambda: server.node()["pid"] is not None)
    pid: int = server.node()["pid"]
    assert os.getsid(pid) == os.getsid(server.process.pid)
    assert os.getpgid(pid) == pid  # a Ctrl-C in the terminal is the gateway's to answer


def test_fifty_streams_go_on_when_the_worker_is_killed(server: Server) -> None:
    undisturbed = asyncio.run(read_all(server, None))
    assert len(set(map(str, undisturbed))) > NUM_STREAMS // 2
    disturbed = asyncio.run(read_all(server, lambda: os.kill(server.node()["pid"], signal.SIGKILL)))
    assert disturbed == undisturbed
    assert metric(server, 'dovetail:request_resumptions_total{model_name="llama"}') > NUM_STREAMS // 2
    assert server.node()["starts"] == 2
    eventually(lambda: server.blocks_used() == 0)


def test_a_worker_killed_while_it_starts_or_loads_costs_nothing_but_time(server: Server) -> None:
    async def ask() -> str:
        async with server.async_client(timeout=300) as client:
            task = asyncio.create_task(client.completions.create(model="slow", prompt="a", max_tokens=4, temperature=0))
            first = await asyncio.to_thread(kill_worker, server)  # it may have the Load already, or not
            await asyncio.to_thread(kill_worker, server, other_than=first)  # and this one is importing
            return (await task).choices[0].text

    wanted = server.client().completions.create(model="slow", prompt="a", max_tokens=4, temperature=0).choices[0].text
    assert asyncio.run(ask()) == wanted
    eventually(lambda: server.get("/health").status_code == 200)
