"""Generated workloads: Zipf popularity, Gamma arrivals of a given CV, a daily wave, bursts, lengths from a table."""

from __future__ import annotations

import csv
import gzip
import math
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random

from dovetail.errors import ConfigError
from dovetail.sim.trace import Arrival


@dataclass(frozen=True)
class Workload:
    requests: int
    models: int
    rate_per_s: float  # mean over the run
    zipf: float = 1.0  # popularity of the model of rank r falls as r^-zipf; 0 = all alike
    cv: float = 1.0  # coefficient of variation of the gaps; 1 = Poisson, 8 = very bursty
    wave: float = 0.0  # share by which the rate swings around its mean
    wave_period_s: float = 86_400.0
    burst_every_s: float = 0.0  # mean time between bursts; 0 = none
    burst_requests: int = 20  # calls of one model within one second


DEFAULT_LENGTHS = ((200, 60), (500, 120), (900, 200), (1300, 300), (2500, 400))  # (input, output) tokens


def generate(workload: Workload, seed: int, lengths: Sequence[tuple[int, int]] = DEFAULT_LENGTHS) -> list[Arrival]:
    """In order of arrival; the same seed gives the same requests."""
    if workload.requests < 1 or workload.models < 1 or workload.rate_per_s <= 0 or workload.cv <= 0:
        raise ConfigError("a workload needs at least one request and one model, a positive rate and a positive cv")
    rng = Random(seed)
    weights = list(accumulate((rank + 1) ** -workload.zipf for rank in range(workload.models)))
    shape = 1.0 / workload.cv**2  # of the Gamma distribution of gaps
    arrivals: list[Arrival] = []
    now = 0.0
    next_burst = rng.expovariate(1.0 / workload.burst_every_s) if workload.burst_every_s else math.inf
    while len(arrivals) < workload.requests:
        rate = workload.rate_per_s * (1 + workload.wave * math.sin(2 * math.pi * now / workload.wave_period_s))
        now += rng.gammavariate(shape, 1.0 / (shape * max(rate, 1e-9)))
        if now >= next_burst:
            model = _draw_model(rng, weights)
            for _ in range(workload.burst_requests):
                arrivals.append(Arrival(next_burst + rng.random(), model, *rng.choice(lengths)))
            next_burst += rng.expovariate(1.0 / workload.burst_every_s)
        arrivals.append(Arrival(now, _draw_model(rng, weights), *rng.choice(lengths)))
    arrivals.sort(key=lambda arrival: arrival.arrival_s)
    return arrivals[: workload.requests]


def _draw_model(rng: Random, weights: Sequence[float]) -> int:
    return bisect(weights, rng.random() * weights[-1])


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """A table whose first two numeric columns are input and output tokens; a header line is skipped."""
    opener = gzip.open if path.suffix == ".gz" else open
    pairs: list[tuple[int, int]] = []
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            for line, cells in enumerate(csv.reader(file), start=1):
                numbers = [cell for cell in cells if cell.strip().isdigit()]
                if len(numbers) >= 2:
                    pairs.append((max(int(numbers[0]), 1), max(int(numbers[1]), 1)))
                elif line > 1 and cells:
                    raise ConfigError(f"{path}: line {line}: expected input and output tokens, got {','.join(cells)!r}")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not pairs:
        raise ConfigError(f"{path}: line 1: no lengths")
    return pairs
