"""A thousand requests, a fifth of whose clients hang up at random: nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import httpx
import psutil
import pytest
from busy_soak import busy_processes
from busy_soak import soak as busy_soak
from server_fixture import Server, eventually
from sse import event_data

pytestmark = pytest.mark.slow  # minutes of load

CONCURRENCY = 32


def make_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "model": rng.choice(["llama", "qwen3"]),
        "max_tokens": rng.randint(1, 12),
        "n": rng.choice([1, 1, 1, 2]),
        "stream": rng.random() < 0.6,
        "seed": rng.randrange(2**32),
    }
    text = "".join(rng.choices("abc é🗼", k=rng.randint(1, 100)))
    if rng.random() < 0.5:
        return "/v1/completions", body | {"prompt": text}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}


async def ask(client: httpx.AsyncClient, rng: random.Random) -> str:
    """The whole answer, checked to have an end for each choice."""
    path, body = make_request(rng)
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        finishes = [choice["finish_reason"] for choice in response.json()["choices"]]
    else:
        lines = event_data(response)
        assert lines[-1] == "[DONE]"
        choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
        finishes = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(finishes) == body["n"]
    assert set(finishes) <= {"stop", "length"}
    return "answered"


async def hang_up(client: httpx.AsyncClient, rng: random.Random) -> str:
    """Leave before the headers, or after some of the text."""
    path, body = make_request(rng)
    body |= {"max_tokens": 100, "stream": True, "ignore_eos": True}
    try:
        async with asyncio.timeout(rng.uniform(0, 0.1)):
            async with client.stream("POST", path, json=body) as response:
                async for _ in response.aiter_raw():
                    if rng.random() < 0.3:
                        break
    except TimeoutError:
        return "left early"
    return "left midway"


async def soak(url: str, count: int, seed: int) -> Counter[str]:
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=CONCURRENCY * 2)
    outcomes: Counter[str] = Counter()
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        gate = asyncio.Semaphore(CONCURRENCY)

        async def one(number: int) -> None:
            own = random.Random(seed * 1_000_000 + number)
            async with gate:
                outcomes[await (hang_up if rng.random() < 0.2 else ask)(client, own)] += 1

        await asyncio.gather(*(one(number) for number in range(count)))
    return outcomes


def test_a_thousand_requests_with_clients_that_hang_up_leave_nothing_behind(tiny_server: Server) -> None:
    worker = psutil.Process(tiny_server.node()["pid"])
    asyncio.run(soak(tiny_server.url, 500, seed=1))  # until every page of the KV pools has been used
    before = worker.memory_info().rss
    outcomes = asyncio.run(soak(tiny_server.url, 1000, seed=2))
    assert sum(outcomes.values()) == 1000
    assert 150 <= outcomes["left early"] + outcomes["left midway"] <= 250

    eventually(lambda: tiny_server.status()["unfinished"] == 0, timeout_s=10)
    eventually(lambda: all(model["running"] + model["waiting"] == 0 for model in tiny_server.node()["models"]))
    eventually(lambda: tiny_server.blocks_used() == 0)
    assert tiny_server.node()["starts"] == 1
    assert worker.memory_info().rss <= before * 1.05
    metrics = tiny_server.get("/metrics").text
    assert 'finished_reason="aborted"' in metrics


def test_streams_end_while_other_processes_keep_the_cores_busy(tiny_server: Server) -> None:
    with busy_processes(2):
        outcome = asyncio.run(busy_soak(tiny_server.url, tiny_server.models[0], 5.0, seed=1, most_words=20))
    assert outcome.streams > 0
    assert outcome.finishes <= {"stop", "length"}
