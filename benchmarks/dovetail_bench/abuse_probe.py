"""What a well-behaved client sees: how long `/live` takes, and the gaps in another model's stream. A process of its
own, so that whoever makes the noise does not slow it down.

`python -m dovetail_bench.abuse_probe URL KEY MODEL ATTACKERS GATEWAY WORKER…` (process ids) reads lines from standard
input and answers each with the samples since the last one, as JSON; it ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import httpx
import msgspec

from dovetail_bench.core_time import Cores

_LIVE_EVERY_S = 0.02
_TIMEOUT_S = 60.0
_STREAM_TOKENS = 250  # few: a token takes longer the more there are before it


class Samples(msgspec.Struct):
    """Seconds."""

    live: list[float] = []
    gaps: list[float] = []  # between events of a stream
    taken: list[float] = []  # of each of them: what the attackers' own computing took, at most
    failures: int = 0


class Probe:
    def __init__(self, url: str, key: str, model: str, cores: Cores) -> None:
        self._model = model
        self._cores = cores
        self._samples = Samples()
        self._client = httpx.AsyncClient(
            base_url=url, timeout=_TIMEOUT_S, headers={"authorization": f"Bearer {key}"} if key else {}
        )

    async def run(self) -> None:
        tasks = [asyncio.create_task(self._ask_live()), asyncio.create_task(self._read_streams())]
        try:
            while await asyncio.to_thread(sys.stdin.readline):
                samples, self._samples = self._samples, Samples()
                print(msgspec.json.encode(samples).decode(), flush=True)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.aclose()

    async def _ask_live(self) -> None:
        while True:
            started = time.monotonic()
            try:
                (await self._client.get("/live")).raise_for_status()
            except httpx.HTTPError:
                self._samples.failures += 1
            self._samples.live.append(time.monotonic() - started)
            await asyncio.sleep(_LIVE_EVERY_S)

    async def _read_streams(self) -> None:
        number = 0
        while True:
            number += 1
            body = {"model": self._model, "prompt": f"Story {number}. Once upon a time", "max_tokens": _STREAM_TOKENS}
            last: float | None = None
            try:
                request = self._client.stream(
                    "POST", "/v1/completions", json=body | {"ignore_eos": True, "stream": True, "temperature": 0}
                )
                async with request as response:
                    response.raise_for_status()
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            now, taken_s = time.monotonic(), self._cores.taken_s()
                            if last is not None:
                                self._samples.gaps.append(now - last)
                                self._samples.taken.append(taken_s)
                            last = now
                            if "error" in json.loads(line[6:]):
                                self._samples.failures += 1
            except httpx.HTTPError:
                self._samples.failures += 1
                await asyncio.sleep(0.1)


if __name__ == "__main__":
    _url, _key, _model, *_pids = sys.argv[1:]
    asyncio.run(Probe(_url, _key, _model, Cores(*map(int, _pids))).run())
