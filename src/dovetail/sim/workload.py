"""Generated workloads: Zipf popularity, Gamma arrivals of a given CV, a daily wave, bursts, lengths from a table.

Also new workloads from a trace: its arrivals shifted and its models renamed by the seed, with lengths of another kind.
"""

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


def rearrange(arrivals: Sequence[Arrival], seed: int) -> list[Arrival]:
    """The trace begun at another moment (what came before follows at its end), its models under each other's numbers:
    as likely a trace as the one that was recorded."""
    rng = Random(seed)
    models = sorted({arrival.model for arrival in arrivals})
    renamed = dict(zip(models, rng.sample(models, len(models)), strict=True))
    span_s = arrivals[-1].arrival_s + 1e-3
    start_s = rng.random() * span_s
    moved = [a._replace(arrival_s=(a.arrival_s - start_s) % span_s, model=renamed[a.model]) for a in arrivals]
    return sorted(moved, key=lambda arrival: arrival.arrival_s)


def with_lengths(arrivals: Sequence[Arrival], lengths: Sequence[tuple[int, int]], seed: int) -> list[Arrival]:
    """The same arrivals with lengths drawn from a table."""
    rng = Random(seed)
    drawn = (rng.choice(lengths) for _ in arrivals)
    return [a._replace(input_tokens=i, output_tokens=o) for a, (i, o) in zip(arrivals, drawn, strict=True)]


def with_best_effort(arrivals: Sequence[Arrival], per_s: float, seed: int) -> list[Arrival]:
    """The same, with so many requests of best effort a second, of any model and any length among the arrivals."""
    rng = Random(seed)
    added, now = list(arrivals), arrivals[0].arrival_s
    while (now := now + rng.expovariate(per_s)) < arrivals[-1].arrival_s:
        added.append(rng.choice(arrivals)._replace(arrival_s=now, is_best_effort=True))
    return sorted(added, key=lambda arrival: arrival.arrival_s)


def with_priority(arrivals: Sequence[Arrival], share: float, seed: int) -> list[Arrival]:
    """The same, where this share of those that are waited for goes first."""
    rng = Random(seed)
    return [a._replace(goes_first=rng.random() < share and not a.is_best_effort) for a in arrivals]


@dataclass(frozen=True)
class Spread:
    """A log-normal length, by its median and its 99th percentile."""

    median: float
    p99: float

    def draw(self, rng: Random, longest: int) -> int:
        deviation = math.log(max(self.p99 / self.median, 1.0)) / 2.326  # standard deviations up to the percentile
        return min(max(round(self.median * math.exp(rng.gauss(0.0, deviation))), 1), longest)


@dataclass(frozen=True)
class Client:
    """One who calls: how long prompts and answers are."""

    input_tokens: Spread
    output_tokens: Spread


def with_clients(
    arrivals: Sequence[Arrival], clients: Sequence[Client], seed: int, longest: int = 4096
) -> list[Arrival]:
    """The same arrivals, each model called by one client."""
    rng = Random(seed)
    of_model = {model: rng.choice(clients) for model in sorted({arrival.model for arrival in arrivals})}
    drawn = []
    for arrival in arrivals:
        client = of_model[arrival.model]
        prompt, answer = client.input_tokens.draw(rng, longest), client.output_tokens.draw(rng, longest)
        drawn.append(arrival._replace(input_tokens=prompt, output_tokens=answer))
    return drawn


CLIENT_COLUMNS = ("in_p50", "in_p99", "out_p50", "out_p99")


def read_clients(path: Path) -> list[Client]:
    """A table with the columns above; clients of which a length is not known are left out."""
    clients = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for line, row in enumerate(csv.DictReader(file), start=2):
                values = [_length(path, line, row, column) for column in CLIENT_COLUMNS]
                if all(value >= 1.0 for value in values):  # nan is not
                    clients.append(Client(Spread(*values[:2]), Spread(*values[2:])))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not clients:
        raise ConfigError(f"{path}: no client with known lengths")
    return clients


def _length(path: Path, line: int, row: dict[str, str], column: str) -> float:
    try:
        return float(row[column])
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: line {line}: column {column!r}: expected a number") from error


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
