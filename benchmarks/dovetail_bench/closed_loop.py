"""A closed loop of streams on one model: each is replaced by another one when it ends, so that prompts come one by one
beside many answers. Through HTTP, by processes of its own; random weights on a GPU.
"""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import msgspec

from dovetail.errors import DovetailError
from dovetail_bench.attainment import percentile
from dovetail_bench.fleet import Report
from dovetail_bench.gaps import CAPTURE_S, batch_server
from dovetail_bench.loop_client import LoopMix, Seen, stream
from dovetail_bench.many import read_metrics
from dovetail_bench.random_models import random_models
from dovetail_bench.servers import running

PROCESSES = 4
START_S = 2.0  # that those take
WARM_STREAMS = (1, 8, 64)  # at a time, before anything is measured: what compiles has done so


class LoopFigures(msgspec.Struct, frozen=True):
    streams: int
    seconds: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    requests: int  # that began in this time
    first_s: dict[str, float]  # p50, p95, p99
    gap_s: dict[str, float]  # between two pieces of an answer: p50, p99, max
    worst_gap_p50_s: float  # of an answer, median
    turns: float  # iterations in a second
    in_turns: float  # share of the time


def measure(
    folder: Path, shape: str, device: str, mix: LoopMix, rounds: int, step: Report = lambda what, done, total: None
) -> list[LoopFigures]:
    (model,) = random_models(folder, shape, 1, step)
    with running(batch_server([model], folder, 0, device=device), folder / "server.log") as server:
        port = server.contender.port
        for streams in WARM_STREAMS:
            run_loop(port, model.name, LoopMix(streams, (128, 512), (8, 32), 0.0, 3.0))
        time.sleep(CAPTURE_S)
        found = []
        for number in range(rounds):
            found.append(run_loop(port, model.name, msgspec.structs.replace(mix, seed=mix.seed + number)))
            step("rounds", number + 1, rounds)
    return found


def run_loop(port: int, name: str, mix: LoopMix) -> LoopFigures:
    context = multiprocessing.get_context("spawn")
    processes = min(PROCESSES, mix.streams)
    starts_s = time.time() + START_S  # when all are there
    shares = [mix.streams // processes + (at < mix.streams % processes) for at in range(processes)]
    with context.Pool(processes) as pool:
        under_way = pool.starmap_async(
            stream, [(port, name, at, share, mix, starts_s) for at, share in enumerate(shares)]
        )
        time.sleep(max(starts_s + mix.settle_s - time.time(), 0.0))
        before = _counters(port)
        time.sleep(mix.seconds)
        after = _counters(port)
        seen = [msgspec.convert(one, Seen) for one in under_way.get(mix.seconds + 120.0)]
    gaps, firsts = [gap for one in seen for gap in one.gaps], [first for one in seen for first in one.firsts]
    errors = [error for one in seen for error in one.errors]
    if errors:
        raise DovetailError(f"{len(errors)} errors, the first: {errors[0]}")
    seconds = after["at"] - before["at"]
    rates = {key: (after[key] - before[key]) / seconds for key in before}
    return LoopFigures(
        streams=mix.streams,
        seconds=round(seconds, 2),
        tokens_per_s=round(rates["generation_tokens_total"], 1),
        prompt_tokens_per_s=round(rates["prompt_tokens_total"], 1),
        requests=sum(one.began for one in seen),
        first_s={name: percentile(firsts, share) for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))},
        gap_s={name: percentile(gaps, share) for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))},
        worst_gap_p50_s=percentile([worst for one in seen for worst in one.worst], 0.5),
        turns=round(rates["turns_total"], 1),
        in_turns=round(rates["turn_seconds_total"], 3),
    )


def _counters(port: int) -> dict[str, float]:
    metrics = read_metrics(f"http://127.0.0.1:{port}")
    found = {"at": time.monotonic()}
    for name in ("generation_tokens_total", "prompt_tokens_total", "turns_total", "turn_seconds_total"):
        found[name] = sum(value for _, value in metrics.get(f"dovetail:{name}", ()))
    return found
