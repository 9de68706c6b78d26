"""What a second gateway adds: the same streams through the leading one, through a front, and through both.

Beside tokens a second it says what a token costs each process, because where workers, gateways and clients share a few
cores these decide, and not the number of gateways.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import psutil
import yaml

from dovetail.errors import DovetailError
from dovetail_bench.servers import OURS, Contender, Running, free_port, running, workers_of


class Way(msgspec.Struct, frozen=True):
    """All streams through these gateways."""

    through: str
    tokens: int
    seconds: float
    tokens_per_s: float
    leader_us: float  # CPU time of the leading gateway for a token
    front_us: float  # of the front
    worker_us: float  # of the worker
    client_us: float  # of the readers, which are one process


def measure(model: str, streams: int, max_tokens: int, runs: int, store: str, *, pins: bool = False) -> list[Way]:
    """Ways one after another, `runs` times round, the fastest of each. `pins`: gateways, worker and readers have a core
    each, as far as there are cores."""
    with TemporaryDirectory(prefix="dovetail-") as folder:
        leader, front = _contenders(model, Path(folder), store)
        with (
            running(leader, Path(folder) / "leader.log") as first,
            running(front, Path(folder) / "front.log") as second,
        ):
            if pins:
                _pin(first.pid, second.pid, workers_of(first.pid)[0].pid, os.getpid())
            ways = {"leader": [first], "front": [second], "both": [first, second]}
            best: dict[str, Way] = {}
            for attempt in range(runs + 1):  # the first one loads the model
                for name, servers in ways.items():
                    way = _stream_through(name, servers, (first, second), streams, max_tokens)
                    if attempt and (name not in best or way.tokens_per_s > best[name].tokens_per_s):
                        best[name] = way
            return list(best.values())


def _contenders(model: str, folder: Path, store: str) -> tuple[Contender, Contender]:
    state = folder / "state"
    node = {"name": "cpu-0", "threads": 1, "max_batch": 256}
    config = {"models": {"model": {"source": model}}, "nodes": [node], "store": {"path": store} if store else {}}
    path = folder / "dovetail.yaml"
    path.write_text(yaml.safe_dump(config))
    ports = free_port(), free_port()
    serve = (*OURS, "serve", "--config", str(path), "--state", str(state), "--port", str(ports[0]), "--json")
    front = (*OURS, "front", str(state), "--config", str(path), "--port", str(ports[1]), "--json")
    return Contender("leader", "", serve, ports[0], "/health"), Contender("front", "", front, ports[1], "/health")


def _stream_through(
    name: str, servers: list[Running], both: tuple[Running, Running], streams: int, max_tokens: int
) -> Way:
    pids = (both[0].pid, both[1].pid, workers_of(both[0].pid)[0].pid, os.getpid())
    before = [_cpu_s(pid) for pid in pids]
    began = time.monotonic()
    tokens = asyncio.run(_read_all([server.url for server in servers], streams, max_tokens))
    seconds = time.monotonic() - began
    spent = [1e6 * (_cpu_s(pid) - at) / tokens for pid, at in zip(pids, before, strict=True)]
    return Way(name, tokens, seconds, tokens / seconds, *spent)


def _pin(*pids: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    for index, pid in enumerate(pids):
        for thread in psutil.Process(pid).threads():
            os.sched_setaffinity(thread.id, {cores[index % len(cores)]})


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def _read_all(urls: list[str], streams: int, max_tokens: int) -> int:
    """Tokens that came."""
    reads = [_read(urls[index % len(urls)], index, max_tokens) for index in range(streams)]
    return sum(await asyncio.gather(*reads))


async def _read(url: str, index: int, max_tokens: int) -> int:
    """Bare sockets: a client that looked at every event would take more of the cores than what is measured."""
    prompt = [1, 2, 3 + index % 100]  # tokens that every vocabulary has
    body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    content = json.dumps(body | {"ignore_eos": True}).encode()
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
    end = b""
    while data := await reader.read(1 << 16):
        end = end[-300:] + data
    writer.close()
    if b"data: [DONE]" not in end:
        raise DovetailError(f"{url} did not finish: {end[-300:]!r}")
    return max_tokens
