"""What a live migration costs its reader: streams on several nodes, one node drained, the gap where each stream moved.

The server's own log says with how many tokens each answer was handed over, each chunk how many there are by then: the
pause is from the last of the source's to the first of the destination's, on the reader's clock.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec

from dovetail.errors import DovetailError
from dovetail.local_token import token_for
from dovetail_bench.servers import Contender, our_server, running

WARM_UP_TOKENS = 12  # of every stream before a node is drained
LATELY = 16  # gaps that a token time is the median of: it grows with the batch, which a drain changes


@dataclass
class Stream:
    text: str = ""
    times_s: list[float] = field(default_factory=list)  # of its chunks
    tokens: list[int] = field(default_factory=list)  # that there were with each


class Pause(msgspec.Struct, frozen=True):
    """Of one move."""

    stream: int
    tokens: int  # that it had
    source: str
    node: str
    rounds: int  # of tokens that the destination computed
    gap: int  # tokens that were left for the end
    seconds: float  # between the last token of the source and the first of the destination
    before: float  # the same in token times of the stream before
    after: float  # and after: a node that takes in a drained one's streams is slower than that


class MigrationReport(msgspec.Struct, frozen=True):
    streams: int
    moved: int  # streams
    moves: int  # of them all
    identical: int  # texts that are the same as undisturbed
    token_p50_s: float  # between two tokens before anything moved
    pause_p50_s: float
    pause_p99_s: float
    pause_p50_tokens: float  # in token times of the stream before
    pause_p99_tokens: float
    pause_p50_after: float  # and after
    pause_p99_after: float
    silence_p99_s: float  # the longest that each stream was silent, moved or not, while nodes were drained
    plain_silence_p99_s: float  # and undisturbed
    rounds_p50: float
    gap_p50: float
    drain_s: float  # until nothing was left on the node, all drains together
    pauses: list[Pause]


def measure(
    model: str,
    streams: int,
    max_tokens: int,
    prompt_words: int,
    nodes: int,
    store: str,
    drains: int = 1,
    tpot: str = "",
) -> MigrationReport:
    """On a server of its own with so many nodes. `drains`: so many of them are emptied, one after the other; of two the
    second time all streams move. `tpot`: what each token may take; a node takes in no more streams than keep to it."""
    with TemporaryDirectory(prefix="dovetail-bench-") as folder:
        log = Path(folder) / "events.jsonl"
        contender = _server(model, nodes, Path(folder), log, store, tpot)
        with running(contender, Path(folder) / "server.log") as server:
            return measure_at(server.url, log, model, streams, max_tokens, prompt_words, drains)


def measure_at(
    url: str, log: Path, model: str, streams: int, max_tokens: int, prompt_words: int, drains: int = 1
) -> MigrationReport:
    """On a server that runs on this machine; `log` is its nodes' `event_log`."""
    asyncio.run(_read_all(url, model, streams, WARM_UP_TOKENS, prompt_words))  # loads the model
    plain, _ = asyncio.run(_read_all(url, model, streams, max_tokens, prompt_words))
    before = _num_arrivals(log)
    moving, drain_s = asyncio.run(_read_all(url, model, streams, max_tokens, prompt_words, drains=drains))
    return _report(plain, moving, _moves(log, before), drain_s)


def _server(model: str, nodes: int, folder: Path, log: Path, store: str, tpot: str) -> Contender:
    config: dict[str, Any] = {
        "models": {model: {"source": model} | ({"slo": {"ttft": "60s", "tpot": tpot}} if tpot else {})},
        "nodes": [
            {"name": f"cpu-{index}", "threads": 1, "memory": "2GiB", "event_log": str(log)} for index in range(nodes)
        ],
    }
    if store:
        config["store"] = {"path": store}
    return our_server(config, folder / "dovetail.yaml")


async def _read_all(
    url: str, model: str, count: int, max_tokens: int, prompt_words: int, *, drains: int = 0
) -> tuple[list[Stream], float]:
    """Streams that begin one after the other, so that the log numbers them in order."""
    streams = [Stream() for _ in range(count)]
    drain_s = 0.0
    async with httpx.AsyncClient(base_url=url, timeout=600.0, trust_env=False) as client:
        tasks = []
        for index, stream in enumerate(streams):
            prompt = " ".join(f"word{(index * 7 + at) % 50}" for at in range(prompt_words))
            tasks.append(asyncio.create_task(_read(client, model, prompt, max_tokens, stream)))
            while not stream.times_s and not tasks[-1].done():
                await asyncio.sleep(0.002)
        if drains:
            while min(len(one.times_s) for one in streams) < WARM_UP_TOKENS and not any(one.done() for one in tasks):
                await asyncio.sleep(0.002)
        for _ in range(drains):
            drain_s += await _drain_busiest(client, url)
        await asyncio.gather(*tasks)
    return streams, drain_s


async def _read(client: httpx.AsyncClient, model: str, prompt: str, max_tokens: int, stream: Stream) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise DovetailError(f"the server answers {response.status_code}: {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                stream.text += "".join(choice["text"] for choice in chunk["choices"])
                if chunk["usage"]["completion_tokens"] > (stream.tokens[-1] if stream.tokens else 0):
                    stream.times_s.append(time.monotonic())
                    stream.tokens.append(chunk["usage"]["completion_tokens"])


async def _drain_busiest(client: httpx.AsyncClient, url: str) -> float:
    nodes = (await client.get("/api/nodes")).json()["data"]
    name = max(nodes, key=lambda one: one["unfinished"])["name"]
    began = time.monotonic()
    headers = {"authorization": f"Bearer {token_for(url)}"}
    (await client.post(f"/api/nodes/{name}/drain", headers=headers)).raise_for_status()
    while (await client.get(f"/api/nodes/{name}")).json()["state"] != "drained":
        await asyncio.sleep(0.02)
    drain_s = time.monotonic() - began
    (await client.post(f"/api/nodes/{name}/resume", headers=headers)).raise_for_status()
    return drain_s


def _num_arrivals(log: Path) -> int:
    return sum('"event": "arrive"' in line for line in log.read_text().splitlines())


def _moves(log: Path, first: int) -> list[dict[str, Any]]:
    """Of the requests after the first so many; one that moved several times counts once for each."""
    found = [json.loads(line) for line in log.read_text().splitlines() if '"event": "migrated"' in line]
    return [one | {"stream": one["request"] - first} for one in found if one["request"] >= first]


def _pause(stream: Stream, move: dict[str, Any]) -> Pause | None:
    """None: there is nothing before or after it to compare with."""
    split = bisect_right(stream.tokens, move["produced"])  # the destination's first chunk
    before = [later - at for at, later in pairwise(stream.times_s[:split])][-LATELY:]
    after = [later - at for at, later in pairwise(stream.times_s[split:])][:LATELY]
    if not before or not after:
        return None
    seconds = stream.times_s[split] - stream.times_s[split - 1]
    told = {key: move[key] for key in ("stream", "source", "node", "rounds", "gap")}
    return Pause(
        tokens=move["produced"],
        seconds=seconds,
        before=seconds / median(before),
        after=seconds / median(after),
        **told,
    )


def _report(plain: list[Stream], moving: list[Stream], moves: list[dict[str, Any]], drain_s: float) -> MigrationReport:
    found = [_pause(moving[move["stream"]], move) for move in moves]
    pauses = [one for one in found if one is not None]
    if not pauses:
        raise DovetailError("nothing moved: all streams were on other nodes, or had ended")
    seconds = sorted(one.seconds for one in pauses)
    times_before, times_after = sorted(one.before for one in pauses), sorted(one.after for one in pauses)
    return MigrationReport(
        streams=len(moving),
        moved=len({one.stream for one in pauses}),
        moves=len(pauses),
        identical=sum(one.text == other.text for one, other in zip(plain, moving, strict=True)),
        token_p50_s=median(one.seconds / one.before for one in pauses),
        pause_p50_s=median(seconds),
        pause_p99_s=_p99(seconds),
        pause_p50_tokens=median(times_before),
        pause_p99_tokens=_p99(times_before),
        pause_p50_after=median(times_after),
        pause_p99_after=_p99(times_after),
        silence_p99_s=_p99(sorted(_longest_s(one) for one in moving)),
        plain_silence_p99_s=_p99(sorted(_longest_s(one) for one in plain)),
        rounds_p50=median(one.rounds for one in pauses),
        gap_p50=median(one.gap for one in pauses),
        drain_s=drain_s,
        pauses=pauses,
    )


def _longest_s(stream: Stream) -> float:
    return max((later - at for at, later in pairwise(stream.times_s)), default=0.0)


def _p99(values: list[float]) -> float:
    return values[min(len(values) - 1, -(-99 * len(values) // 100) - 1)]
