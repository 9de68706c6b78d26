"""How long a function runs: on a CPU by vCPUs, on a GPU by batch and share of the card, partitioned by stages (P1).

Pure formulas over coefficients; `fits` finds the coefficients, `function_profile` keeps them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

Z99 = NormalDist().inv_cdf(0.99)
_TINY = 1e-9


@dataclass(frozen=True)
class ExpCurve:
    """α·e^(−c/β) + γ seconds on c vCPUs (4.1)."""

    alpha: float
    beta: float
    gamma: float

    def __call__(self, vcpus: float) -> float:
        return self.alpha * math.exp(-vcpus / self.beta) + self.gamma


@dataclass(frozen=True)
class StepCurve:
    """A curve for each number of threads. A further thread is a step, which no exponential follows: 1.1 vCPUs run two
    threads for a part of the time, and what these lose by waiting for each other is lost at once."""

    first: ExpCurve
    steps: tuple[tuple[float, ExpCurve], ...] = ()  # the curve above so many vCPUs, rising

    def __call__(self, vcpus: float) -> float:
        curve = self.first
        for above, step in self.steps:
            if vcpus > above:
                curve = step
        return curve(vcpus)


@dataclass(frozen=True)
class CpuLatency:
    """One function on a CPU: a curve for each batch size that was profiled, of mean and 99th percentile."""

    mean: Mapping[int, StepCurve]
    p99: Mapping[int, StepCurve]

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(sorted(self.mean))

    def mean_s(self, batch: int, vcpus: float) -> float:
        return self.mean[self._profiled(batch)](vcpus)

    def p99_s(self, batch: int, vcpus: float) -> float:
        """Never under the mean: the two are fitted apart."""
        size = self._profiled(batch)
        return max(self.p99[size](vcpus), self.mean[size](vcpus))

    def _profiled(self, batch: int) -> int:
        """A batch that was not profiled runs no longer than the next larger one."""
        return next(size for size in self.batches if size >= batch)


@dataclass(frozen=True)
class GpuLatency:
    """ξ1·b + ξ2 on a whole card (4.3); a part waits for its turns (4.4); κ1·L + κ2 at the 99th percentile (4.5).

    A small batch does not fill a large card, which bends the line: where batch sizes were measured, the line goes from
    one to the next.
    """

    xi1: float
    xi2: float
    kappa1: float
    kappa2: float
    max_batch: int
    measured: tuple[tuple[int, float], ...] = ()  # batch size and mean, rising

    def mean_s(self, batch: int) -> float:
        for (size, seconds), (next_size, next_s) in itertools.pairwise(self.measured):
            if size <= batch <= next_size:
                return seconds + (next_s - seconds) * (batch - size) / (next_size - size)
        return self.line_s(batch)

    def line_s(self, batch: float) -> float:
        return self.xi1 * batch + self.xi2

    def longest_s(self, batch: int, part_gb: float, card_gb: float, slice_s: float) -> float:
        alone_s = self.mean_s(batch)
        if not slice_s or part_gb >= card_gb:
            return alone_s
        turns = math.ceil(alone_s / (part_gb * slice_s) - _TINY)
        return turns * (card_gb - part_gb) * slice_s + alone_s

    def p99_s(self, batch: int, part_gb: float, card_gb: float, slice_s: float) -> float:
        longest_s = self.longest_s(batch, part_gb, card_gb, slice_s)
        return max(self.kappa1 * longest_s + self.kappa2, longest_s)


@dataclass(frozen=True)
class Transfer:
    """Passing a batch from one stage to the next: θ0 + θ1·b (4.10)."""

    theta0: float
    theta1: float

    def __call__(self, batch: int) -> float:
        return self.theta0 + self.theta1 * batch


def spread_of(mean_s: float, p99_s: float) -> float:
    """σ of the log-normal distribution with this mean and 99th percentile; a tail too long for one gets its largest."""
    if p99_s <= mean_s:
        return 0.0
    ratio = math.log(p99_s / mean_s)  # = z·σ − σ²/2
    inner = Z99 * Z99 - 2 * ratio
    return Z99 if inner <= 0 else Z99 - math.sqrt(inner)


def share_above(limit_s: float, mean_s: float, sigma: float) -> float:
    """P(L > limit) for a log-normal L."""
    if limit_s <= 0:
        return 1.0
    if sigma == 0.0:
        return 1.0 if mean_s > limit_s + _TINY else 0.0
    z = (math.log(limit_s / mean_s) + sigma * sigma / 2) / sigma
    return 0.5 * math.erfc(z / math.sqrt(2))


def mean_billed_s(mean_s: float, p99_s: float, quantum_s: float) -> float:
    """E[⌈L/q⌉]·q: rounding up costs about half a quantum more than the mean, and a whole one where L < q."""
    if quantum_s <= 0 or quantum_s < mean_s / 500:  # a quantum that no longer shows
        return mean_s + quantum_s / 2
    sigma = spread_of(mean_s, p99_s)
    certain_s = mean_s * math.exp(-sigma * sigma / 2 - 6 * sigma)  # every run takes at least so long
    step = int(certain_s / quantum_s)
    total = float(step)
    while (share := share_above(step * quantum_s, mean_s, sigma)) > 1e-6:
        total += share
        step += 1
    return total * quantum_s
