"""A real server process, started by the command line, for tests that speak HTTP to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
COMMAND = [sys.executable, "-c", "from dovetail.cli.main import main; main()"]


class Server:
    def __init__(self, process: subprocess.Popen[str], url: str, models: list[str]) -> None:
        self.process = process
        self.url = url
        self.models = models

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._client_options(options))

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._client_options(options))

    def _client_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 120} | options

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **options)

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, **options)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.get("/api/ps").json()
        return status

    def node(self) -> dict[str, Any]:
        node: dict[str, Any] = self.status()["nodes"][0]
        return node

    def blocks_used(self) -> int:
        return sum(model["blocks_used"] for model in self.node()["models"])

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def hang_up(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    def wait(self) -> int:
        return self.process.wait(STOP_TIMEOUT_S)


def eventually(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


@contextmanager
def running_server(
    *arguments: str | Path, environment: dict[str, str] | None = None, log: Path | None = None, verb: str = "serve"
) -> Iterator[Server]:
    """`dovetail serve …` on a free port; ended by SIGTERM, or killed when that does not help."""
    command = [*COMMAND, verb, *map(str, arguments), "--port", "0", "--json"]
    errors = log.open("w") if log is not None else None
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **(environment or {})}
    )
    try:
        ready = json.loads(_first_line(process))
        yield Server(process, ready["url"], ready["models"])
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
        assert process.stdout is not None
        process.stdout.close()
        if errors is not None:
            errors.close()


def run_command(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=START_TIMEOUT_S, **options
    )


def _first_line(process: subprocess.Popen[str]) -> str:
    """What the server says when it is ready. A server that says nothing is killed, so that the read ends."""
    assert process.stdout is not None
    timer = threading.Timer(START_TIMEOUT_S, process.kill)
    timer.start()
    line = process.stdout.readline()
    timer.cancel()
    assert line, f"the server ended with code {process.wait()} before it was ready"
    return line


async def one_of_many(client: openai.AsyncOpenAI, index: int, max_tokens: int) -> AsyncIterator[str]:
    """The pieces of a stream that is like no other, greedy or drawn, and the same in each run."""
    way: dict[str, Any] = {"temperature": 0} if index % 2 else {"temperature": 1.0, "seed": index}
    stream = await client.completions.create(
        model="llama",
        max_tokens=max_tokens,
        prompt=f"stream {index} of many",
        stream=True,
        extra_body={"ignore_eos": True},
        **way,
    )
    async for chunk in stream:
        yield "".join(choice.text for choice in chunk.choices)


async def read_one_of_many(client: openai.AsyncOpenAI, index: int, max_tokens: int, seen: list[int]) -> str:
    """All of it; `seen` counts the pieces of each stream while they come."""
    text = ""
    async for piece in one_of_many(client, index, max_tokens):
        seen[index] += 1
        text += piece
    return text
