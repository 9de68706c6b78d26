"""What clients see when a worker is killed in the middle of their streams: the rest of their texts, or an error, and
after how long. A real server process, real HTTP, SIGKILL."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import httpx
import msgspec

from dovetail.errors import EngineFailed
from dovetail.machine import usable_cores

_START_TIMEOUT_S = 120.0
_STREAM_TIMEOUT_S = 600.0


class Stream(msgspec.Struct):
    """One client's view."""

    text: str = ""
    events: int = 0
    text_at_kill: str = ""
    error: str | None = None
    last_at: float = 0.0  # monotonic, of the last event
    longest_pause_s: float = 0.0  # after the kill: what was on its way is still read, then there is nothing
    back_after_s: float | None = None  # from the kill to the end of that pause, by text or an error


class ChaosResult(msgspec.Struct, frozen=True):
    streams: int
    ended_before: int  # had all of their text when the worker was killed
    identical: int  # of the others: the text of the undisturbed run, to the character
    different: int
    errors: int
    back_p50_s: float  # from the kill until a stream goes on or says that it will not
    back_max_s: float
    next_request_works: bool
    prefill_s: (
        float  # the same prompts with what had been said, for one more token each: what computing them anew takes
    )


@contextmanager
def served(model: str, resume_timeout_s: float, num_nodes: int = 1) -> Iterator[str]:
    """`dovetail serve` on a free port, with so many workers that share the cores; its address."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as config:
        config.write(f"server: {{resume_timeout: {resume_timeout_s}}}\n")
        if num_nodes > 1:
            threads = max(usable_cores() // num_nodes, 1)
            nodes = [{"name": f"node{number}", "threads": threads} for number in range(num_nodes)]
            config.write(f"nodes: {json.dumps(nodes)}\n")
        config.flush()
        command = [sys.executable, "-m", "dovetail", "serve", model, "--config", config.name, "--port", "0", "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        yield from _until_ended(process)


def _until_ended(process: subprocess.Popen[str]) -> Iterator[str]:
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise EngineFailed(f"the server ended with code {process.wait(_START_TIMEOUT_S)} before it was ready")
        yield str(json.loads(line)["url"])
    finally:
        process.terminate()
        process.wait(_START_TIMEOUT_S)


def kill_under_streams(
    model: str, num_streams: int, max_tokens: int, resume_timeout_s: float, num_nodes: int = 1
) -> ChaosResult:
    """The same requests twice, the second time with a kill when half of the text is there: of the worker that has most
    of them."""
    with served(model, resume_timeout_s, num_nodes) as url:
        name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        wanted = asyncio.run(_run(url, name, num_streams, max_tokens, None))
        half = sum(stream.events for stream in wanted) // 2
        seen = asyncio.run(_run(url, name, num_streams, max_tokens, half))
        body = _body(name, 0, 4) | {"stream": False}
        works = httpx.post(f"{url}/v1/completions", json=body, timeout=_STREAM_TIMEOUT_S).is_success
        prefill_s = asyncio.run(_prefill_again(url, name, [one for one in seen if one.back_after_s is not None]))
    hit = [(now, before) for now, before in zip(seen, wanted, strict=True) if now.back_after_s is not None]
    back = [now.back_after_s for now, _ in hit if now.back_after_s is not None] or [0.0]
    errors = sum(now.error is not None for now, _ in hit)
    identical = sum(now.error is None and now.text == before.text for now, before in hit)
    return ChaosResult(
        streams=num_streams,
        ended_before=num_streams - len(hit),
        identical=identical,
        different=len(hit) - errors - identical,
        errors=errors,
        back_p50_s=median(back),
        back_max_s=max(back),
        next_request_works=works,
        prefill_s=prefill_s,
    )


async def _prefill_again(url: str, model: str, streams: list[Stream]) -> float:
    """From the first of these requests to the last one's token. No prompt begins as one that was computed before."""
    limits = httpx.Limits(max_connections=len(streams) + 2)
    async with httpx.AsyncClient(base_url=url, timeout=_STREAM_TIMEOUT_S, limits=limits) as client:
        started = time.monotonic()
        bodies = []
        for index, stream in enumerate(streams):
            body = _body(model, index, 1)
            bodies.append(body | {"stream": False, "prompt": f"Again: {body['prompt']}{stream.text_at_kill}"})
        await asyncio.gather(*[client.post("/v1/completions", json=body) for body in bodies])
        return time.monotonic() - started


async def _run(url: str, model: str, num_streams: int, max_tokens: int, kill_at: int | None) -> list[Stream]:
    streams = [Stream() for _ in range(num_streams)]
    killed: list[float] = []
    limits = httpx.Limits(max_connections=num_streams + 2)
    async with httpx.AsyncClient(base_url=url, timeout=_STREAM_TIMEOUT_S, limits=limits) as client:
        tasks = [
            asyncio.create_task(_read(client, _body(model, index, max_tokens), stream, killed))
            for index, stream in enumerate(streams)
        ]
        while kill_at is not None and sum(stream.events for stream in streams) < kill_at:
            await asyncio.sleep(0.01)
        if kill_at is not None:
            nodes = (await client.get("/api/ps")).json()["nodes"]
            pid = max(nodes, key=_num_running)["pid"]
            for stream in streams:
                stream.text_at_kill = stream.text
            killed.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
    return streams


def _num_running(node: dict[str, Any]) -> int:
    return sum(int(model["running"]) for model in node["models"])


def _body(model: str, index: int, max_tokens: int) -> dict[str, object]:
    """Half of them greedy, half drawn; each its own prompt."""
    drawn = {"temperature": 0.8, "top_p": 0.95, "seed": index} if index % 2 else {"temperature": 0}
    prompt = f"Story number {index}. Once upon a time, in a town of {index + 3} houses,"
    return {"model": model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, **drawn}


async def _read(client: httpx.AsyncClient, body: dict[str, object], stream: Stream, killed: list[float]) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.monotonic()
            if killed:
                pause_s = now - max(stream.last_at, killed[0])
                if stream.back_after_s is None or pause_s > stream.longest_pause_s:
                    stream.longest_pause_s, stream.back_after_s = pause_s, now - killed[0]
            record = json.loads(line.removeprefix("data: "))
            if "error" in record:
                stream.error = record["error"]["message"]
            else:
                stream.text += record["choices"][0]["text"]
                stream.events += 1
            stream.last_at = now
