"""What a batch that never ends costs clients, and what it makes of the time that they leave.

In turns on one server: the batch alone (how fast it can be), clients alone, the same clients beside the batch.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
ENDED = ("completed", "cancelled", "failed", "expired")


class Lines(msgspec.Struct, frozen=True):
    """Of a batch."""

    words: int = LINE_WORDS
    tokens: int = LINE_TOKENS
    settled: int = SETTLED_LINES


PLAIN = Lines()


class Side(msgspec.Struct, frozen=True):
    """Clients in one run."""

    requests: int
    attained: int
    first_p95_s: float
    gap_p99_s: float  # between two tokens


class Round(msgspec.Struct, frozen=True):
    full_tokens_per_s: float  # of the batch alone
    alone: Side
    busy: float  # clients alone, of the processor time that the batch alone takes
    beside: Side
    tokens_per_s: float  # of the batch beside clients

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


def measure(models: Sequence[FleetModel], mix: Mix, rounds: int, folder: Path, cores: int, step: Report) -> GapsReport:
    found = []
    with running(batch_server(models, folder, cores), folder / "server.log") as server:
        for model in models:
            warm(server, [model], mix)
        for number in range(rounds):
            seeded = msgspec.structs.replace(mix, seed=mix.seed + number)
            found.append(_round(server, models, seeded, is_odd=bool(number % 2)))
            step("rounds", number + 1, rounds)
    return _report(found)


def warm(server: Running, models: Sequence[FleetModel], mix: Mix, key: str = "") -> None:
    """Their weights and their pages are there."""
    ask_clients(server, models, msgspec.structs.replace(mix, minutes=0.05), key)


def batch_server(models: Sequence[FleetModel], folder: Path, cores: int, keys: Sequence[str] = ()) -> Contender:
    """`keys`: names, which are the keys, too."""
    store = Path(models[0].card.path).parents[1]
    config = {
        "models": {model.name: {"source": model.name, "keep_alive": "10m"} for model in models},
        "nodes": [{"name": "cpu-0", "threads": cores, "memory": "4GiB"}],
        "store": {"path": str(store)},
        "batch": {"folder": str(folder / "batches")},
        "auth": {"keys": [{"name": key, "key": key} for key in keys]},
    }
    return our_server(config, folder / "dovetail.yaml", models[0].card.dtype)


def _round(server: Running, models: Sequence[FleetModel], mix: Mix, *, is_odd: bool) -> Round:
    """Which of the two runs of clients is first changes from round to round."""
    with endless_batch(server, models) as batch:
        full, full_cpu = _rates(server, batch, lambda: time.sleep(mix.minutes * 20))
    sides: dict[bool, Side] = {}
    tokens_per_s = cpu = 0.0
    for is_beside in (is_odd, not is_odd):
        if is_beside:
            with endless_batch(server, models) as batch:
                sides[True], tokens_per_s, _ = _clients(server, models, mix, batch)
        else:
            sides[False], _, cpu = _clients(server, models, mix, None)
    return Round(full, sides[False], cpu / full_cpu, sides[True], tokens_per_s)


def _clients(server: Running, models: Sequence[FleetModel], mix: Mix, batch: str | None) -> tuple[Side, float, float]:
    sides: list[Side] = []
    rate, cpu = _rates(server, batch, lambda: sides.append(ask_clients(server, models, mix)))
    return sides[0], rate, cpu


def ask_clients(server: Running, models: Sequence[FleetModel], mix: Mix, key: str = "") -> Side:
    names = [model.name for model in models]
    load = Load(server.url, names, prompts_for(models, mix.seed), sends_targets=False, key=key)
    answers: list[Answer] = asyncio.run(load.run(arrivals_of(mix, len(models))))
    finished = [one for one in answers if one.is_finished]
    if not finished:
        raise DovetailError(f"no answer: {answers[0].error if answers else 'no request'}")
    gaps = [later - early for one in finished for early, later in pairwise(token_times(one))]
    firsts = [ttft_s(one) for one in finished]
    return Side(len(answers), sum(map(meets, answers)), percentile(firsts, 0.95), percentile(gaps, 0.99))


def _rates(server: Running, batch: str | None, run: Callable[[], None]) -> tuple[float, float]:
    """Tokens of the batch and seconds of processor time in a second, while something runs."""
    workers = workers_of(server.pid)
    tokens, cpu_s, began = _tokens(server, batch), _cpu_s(workers), time.monotonic()
    run()
    seconds = time.monotonic() - began
    return (_tokens(server, batch) - tokens) / seconds, (_cpu_s(workers) - cpu_s) / seconds


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
