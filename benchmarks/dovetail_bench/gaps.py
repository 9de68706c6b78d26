"""What a batch that never ends costs clients, and what it makes of the time that they leave.

In turns on one server: the batch alone (how fast it can be), clients alone, the same clients beside the batch. On CPUs
with copies of a small model, on a GPU with random weights of a shape.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgspec
import psutil

from dovetail.errors import DovetailError
from dovetail_bench.attainment import meets, percentile, token_times, ttft_s
from dovetail_bench.fleet import FleetModel, Report, prompts_for
from dovetail_bench.load import Answer, Load, Mix, arrivals_of, key_header
from dovetail_bench.servers import Contender, Running, our_server, running, workers_of

LINES = 4000  # of a batch, more than a run answers
LINE_TOKENS = 64  # of an answer
LINE_WORDS = 24  # of a prompt
SETTLED_LINES = 24  # are answered before a batch is measured: it has as many under way as it will have
SETTLE_S = 10.0  # about so long that takes
CAPTURE_S = 20.0  # a GPU's worker captures graphs while nobody asks for anything
SAMPLE_MS = 200  # between two looks at a GPU
ENDED = ("completed", "cancelled", "failed", "expired")


BusyTime = Callable[[], float]


class Lines(msgspec.Struct, frozen=True):
    """Of a batch."""

    words: int = LINE_WORDS
    tokens: int = LINE_TOKENS
    settled: int = SETTLED_LINES


PLAIN = Lines()
LONG = Lines(128, 256, 256)  # for a GPU: as many as it has at a time have ended before


class Side(msgspec.Struct, frozen=True):
    """Clients in one run."""

    requests: int
    attained: int
    first_p50_s: float
    first_p95_s: float
    gap_p99_s: float  # between two tokens


class Round(msgspec.Struct, frozen=True):
    full_tokens_per_s: float  # of the batch alone
    alone: Side
    busy: float  # clients alone, of the processor time (of a GPU: its busy time) that the batch alone takes
    beside: Side
    tokens_per_s: float  # of the batch beside clients
    cores_full: float  # processor seconds in a second, of a GPU the share of the time that it is busy: the batch alone
    cores_beside: float  # and clients and batch

    @property
    def of_idle(self) -> float:
        """What the batch made of the time that clients leave."""
        return self.tokens_per_s / (self.full_tokens_per_s * max(1.0 - self.busy, 1e-9))


class GapsReport(msgspec.Struct, frozen=True):
    rounds: list[Round]
    attainment_alone: float
    attainment_beside: float
    first_p95: float  # medians of rounds, beside / alone
    gap_p99: float
    of_idle: float
    spread: dict[str, tuple[float, float]]  # of the three


def measure(
    models: Sequence[FleetModel], mix: Mix, rounds: int, folder: Path, cores: int, step: Report, device: str = "cpu"
) -> GapsReport:
    found = []
    with running(batch_server(models, folder, cores, device=device), folder / "server.log") as server:
        for model in models:
            warm(server, [model], mix)
        if device != "cpu":
            time.sleep(CAPTURE_S)
        with busy_time(server, device) as busy_s:
            bench = _Bench(server, models, busy_s, PLAIN if device == "cpu" else LONG)
            for number in range(rounds):
                seeded = msgspec.structs.replace(mix, seed=mix.seed + number)
                found.append(bench.round(seeded, is_odd=bool(number % 2)))
                step("rounds", number + 1, rounds)
    return _report(found)


def warm(server: Running, models: Sequence[FleetModel], mix: Mix, key: str = "") -> None:
    """Their weights and their pages are there."""
    ask_clients(server, models, msgspec.structs.replace(mix, minutes=0.05), key)


def batch_server(
    models: Sequence[FleetModel], folder: Path, cores: int, keys: Sequence[str] = (), device: str = "cpu"
) -> Contender:
    """`keys`: names, which are the keys, too."""
    store: dict[str, object] = {"path": str(Path(models[0].card.path).parents[1])}
    node: dict[str, object] = {"name": "cpu-0", "threads": cores, "memory": "4GiB"}
    if device != "cpu":
        node = {"name": "gpu-0", "device": device}
        store["host_pool"] = f"{sum(model.card.size_bytes for model in models) * 5 // 4}B"
    config = {
        "models": {model.name: {"source": model.name, "keep_alive": "10m"} for model in models},
        "nodes": [node],
        "store": store,
        "batch": {"folder": str(folder / "batches")},
        "auth": {"keys": [{"name": key, "key": key} for key in keys]},
    }
    return our_server(config, folder / "dovetail.yaml", models[0].card.dtype)


class _Bench:
    def __init__(self, server: Running, models: Sequence[FleetModel], busy_s: BusyTime, lines: Lines) -> None:
        self._server, self._models, self._busy_s, self._lines = server, models, busy_s, lines

    def round(self, mix: Mix, *, is_odd: bool) -> Round:
        """Which of the two runs of clients is first changes from round to round."""
        with self._batch() as batch:
            full, full_busy = self._rates(batch, lambda: time.sleep(mix.minutes * 20))
        sides: dict[bool, Side] = {}
        tokens_per_s = beside = busy = 0.0
        for is_beside in (is_odd, not is_odd):
            if is_beside:
                with self._batch() as batch:
                    sides[True], tokens_per_s, beside = self._clients(mix, batch)
            else:
                sides[False], _, busy = self._clients(mix, None)
        return Round(full, sides[False], busy / full_busy, sides[True], tokens_per_s, full_busy, beside)

    def _batch(self) -> AbstractContextManager[str]:
        return endless_batch(self._server, self._models, shape=self._lines)

    def _clients(self, mix: Mix, batch: str | None) -> tuple[Side, float, float]:
        sides: list[Side] = []
        rate, busy = self._rates(batch, lambda: sides.append(ask_clients(self._server, self._models, mix)))
        return sides[0], rate, busy

    def _rates(self, batch: str | None, run: Callable[[], None]) -> tuple[float, float]:
        """Tokens of the batch and busy seconds of the device in a second, while something runs."""
        tokens, busy_s, began = _tokens(self._server, batch), self._busy_s(), time.monotonic()
        run()
        seconds = time.monotonic() - began
        return (_tokens(self._server, batch) - tokens) / seconds, (self._busy_s() - busy_s) / seconds


def ask_clients(server: Running, models: Sequence[FleetModel], mix: Mix, key: str = "") -> Side:
    names = [model.name for model in models]
    load = Load(server.url, names, prompts_for(models, mix.seed), sends_targets=False, key=key)
    answers: list[Answer] = asyncio.run(load.run(arrivals_of(mix, len(models))))
    finished = [one for one in answers if one.is_finished]
    if not finished:
        raise DovetailError(f"no answer: {answers[0].error if answers else 'no request'}")
    gaps = [later - early for one in finished for early, later in pairwise(token_times(one))]
    firsts = [ttft_s(one) for one in finished]
    first_s = percentile(firsts, 0.5), percentile(firsts, 0.95)
    return Side(len(answers), sum(map(meets, answers)), *first_s, percentile(gaps, 0.99))


@contextmanager
def busy_time(server: Running, device: str) -> Iterator[BusyTime]:
    """Seconds of processor time of the workers so far; of a GPU, seconds in which kernels ran."""
    if device == "cpu":
        workers = workers_of(server.pid)
        yield lambda: _cpu_s(workers)
        return
    card = device.partition(":")[2] or "0"
    query = ("nvidia-smi", "-i", card, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits")
    process = subprocess.Popen([*query, "-lms", str(SAMPLE_MS)], stdout=subprocess.PIPE, text=True)
    watch = _GpuWatch()
    assert process.stdout is not None
    thread = threading.Thread(target=watch.read, args=(process.stdout,), daemon=True)
    thread.start()
    try:
        yield lambda: watch.busy_s
    finally:
        process.terminate()
        process.wait()
        thread.join()


class _GpuWatch:
    def __init__(self) -> None:
        self.busy_s = 0.0

    def read(self, lines: Iterable[str]) -> None:
        last_s = time.monotonic()
        for line in lines:
            now = time.monotonic()
            self.busy_s += (now - last_s) * float(line) / 100
            last_s = now


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [one.cpu_times() for one in processes]
    return sum(one.user + one.system for one in times)


def _tokens(server: Running, batch: str | None) -> int:
    return 0 if batch is None else usage_of(server, batch)["output_tokens"]


def usage_of(server: Running, batch: str, key: str = "") -> dict[str, int]:
    usage: dict[str, int] = _get(server, f"/v1/batches/{batch}", key)["usage"]
    return usage


def _get(server: Running, path: str, key: str = "") -> dict[str, Any]:
    response = httpx.get(server.url + path, timeout=60.0, trust_env=False, headers=key_header(key))
    response.raise_for_status()
    found: dict[str, Any] = response.json()
    return found


@contextmanager
def endless_batch(server: Running, models: Sequence[FleetModel], key: str = "", shape: Lines = PLAIN) -> Iterator[str]:
    """One that has more lines than time."""
    with httpx.Client(base_url=server.url, timeout=120.0, trust_env=False, headers=key_header(key)) as client:
        lines = {"file": ("lines.jsonl", _lines(models, shape))}
        file = client.post("/v1/files", files=lines, data={"purpose": "batch"}).raise_for_status().json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.post("/v1/batches", json=body).raise_for_status().json()["id"]
        try:
            while _get(server, f"/v1/batches/{batch}", key)["request_counts"]["completed"] < shape.settled:
                time.sleep(0.2)
            yield batch
        finally:
            client.post(f"/v1/batches/{batch}/cancel").raise_for_status()
            until_s = time.monotonic() + 120.0
            while client.get(f"/v1/batches/{batch}").json()["status"] not in ENDED and time.monotonic() < until_s:
                time.sleep(0.2)


def _lines(models: Sequence[FleetModel], shape: Lines) -> bytes:
    prompts = prompts_for(models, 0)
    lines = []
    for number in range(LINES):
        name = models[number % len(models)].name
        body = {"model": name, "prompt": prompts[name].make(shape.words), "max_tokens": shape.tokens}
        body["ignore_eos"] = True
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(line).encode())
    return b"\n".join(lines)


def _report(rounds: Sequence[Round]) -> GapsReport:
    figures = {
        "first_p95": [one.beside.first_p95_s / one.alone.first_p95_s for one in rounds],
        "gap_p99": [one.beside.gap_p99_s / one.alone.gap_p99_s for one in rounds],
        "of_idle": [one.of_idle for one in rounds],
    }
    requests = sum(one.alone.requests for one in rounds)
    middle = {name: median(values) for name, values in figures.items()}
    return GapsReport(
        rounds=list(rounds),
        attainment_alone=sum(one.alone.attained for one in rounds) / requests,
        attainment_beside=sum(one.beside.attained for one in rounds) / requests,
        first_p95=middle["first_p95"],
        gap_p99=middle["gap_p99"],
        of_idle=middle["of_idle"],
        spread={name: (min(values), max(values)) for name, values in figures.items()},
    )
