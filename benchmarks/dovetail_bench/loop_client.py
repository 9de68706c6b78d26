"""The streams of a closed loop, of one process: it imports little, so that it is there at once."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import msgspec


class LoopMix(msgspec.Struct, frozen=True):
    streams: int = 256
    input_tokens: tuple[int, int] = (128, 2048)
    output_tokens: tuple[int, int] = (100, 800)
    settle_s: float = 12.0  # all began at once: until prompts come one by one
    seconds: float = 30.0  # that are measured
    seed: int = 0


class Seen(msgspec.Struct):
    firsts: list[float] = []
    gaps: list[float] = []
    worst: list[float] = []
    began: int = 0
    errors: list[str] = []


def stream(port: int, name: str, process: int, streams: int, mix: LoopMix, starts_s: float) -> dict[str, Any]:
    return asyncio.run(_Streams(port, name, process, mix, starts_s).run(streams))


class _Streams:
    """Of one process."""

    def __init__(self, port: int, name: str, process: int, mix: LoopMix, starts_s: float) -> None:
        self._port, self._name, self._mix = port, name, mix
        self._random = random.Random(1000 * mix.seed + process)
        self._begins = time.perf_counter() + starts_s - time.time()
        self._from_s = self._begins + mix.settle_s
        self._to_s = self._from_s + mix.seconds
        self._seen = Seen()

    async def run(self, streams: int) -> dict[str, Any]:
        await asyncio.sleep(max(self._begins - time.perf_counter(), 0.0))
        await asyncio.gather(*(self._go_on() for _ in range(streams)))
        return msgspec.to_builtins(self._seen)  # type: ignore[no-any-return]

    async def _go_on(self) -> None:
        while time.perf_counter() < self._to_s:
            try:
                await self._ask(
                    self._random.randint(*self._mix.input_tokens), self._random.randint(*self._mix.output_tokens)
                )
            except OSError as error:
                self._seen.errors.append(repr(error))
                await asyncio.sleep(0.5)

    async def _ask(self, prompt_tokens: int, answer_tokens: int) -> None:
        prompt = [3 + self._random.randrange(250) for _ in range(prompt_tokens)]
        body = {"model": self._name, "prompt": prompt, "max_tokens": answer_tokens, "temperature": 0, "stream": True}
        content = json.dumps(body | {"ignore_eos": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 22)
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        started = time.perf_counter()
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        self._seen.began += self._from_s <= started < self._to_s
        try:
            await self._hear(reader, started)
        finally:
            writer.close()

    async def _hear(self, reader: asyncio.StreamReader, started: float) -> None:
        """Until it ends, or the time is over."""
        last = worst = 0.0
        while line := await reader.readline():
            now = time.perf_counter()
            if now >= self._to_s:
                return
            if line.startswith(b"data: {"):
                is_measured = now >= self._from_s
                if not last and is_measured:
                    self._seen.firsts.append(now - started)
                elif last and is_measured:
                    self._seen.gaps.append(now - last)
                    worst = max(worst, now - last)
                last = now
            elif line.startswith(b"data: [DONE]"):
                break
            elif b'"error"' in line:
                self._seen.errors.append(line[:300].decode(errors="replace"))
        if worst:
            self._seen.worst.append(worst)
