"""Partition templates: where a chain is cut into stages, and how many workers share each stage's rows (P3).

Contiguous stages by dynamic programming on compute + transfer. The latency-optimal template (Gillis-LO) is the fastest
of all; ours is the one with the most latency gained per cost added over one CPU function of the same size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dovetail.errors import ConfigError
from dovetail.plan.chains import Chain
from dovetail.plan.prices import PriceSheet
from dovetail_bench.thesis_hardware import Platform
from dovetail_bench.thesis_work import can_share, passed_bytes, slowest_flops

WORKERS = (1, 2, 3, 4)  # that a stage may have
EPSILON = 1e-9  # of cost, so that templates that cost no more are ranked by what they gain
LEAST_GAIN = 0.02  # of the whole model's latency: less is not worth a partition
GB = 1e9


@dataclass(frozen=True)
class StageCut:
    first: int
    end: int  # one past its last layer
    workers: int


@dataclass(frozen=True)
class Template:
    stages: tuple[StageCut, ...]
    latency_s: float  # at the reference vCPUs
    cost: float  # of one request
    memory_gb: float  # of the largest function


@dataclass(frozen=True)
class Whole:
    """The model in one CPU function, which templates are measured by."""

    latency_s: float
    cost: float
    memory_gb: float


class Partitioner:
    """Templates of one chain on one platform, every function with `vcpus`."""

    def __init__(self, chain: Chain, platform: Platform, sheet: PriceSheet, vcpus: float) -> None:
        self._chain = chain
        self._platform = platform
        self._sheet = sheet
        self.vcpus = vcpus
        self._seconds: dict[StageCut, float] = {}

    @cached_property
    def whole(self) -> Whole:
        memory_gb = self._platform.memory_gb(self._chain.layers)
        latency_s = self._platform.run_s(self._chain.flops, self.vcpus)
        return Whole(latency_s, self._price(memory_gb, latency_s), memory_gb)

    def latency_optimal(self, workers: Sequence[int] = WORKERS) -> Template:
        """Gillis-LO: the least end-to-end time of all."""
        return min(self.candidates([max(workers)]), key=lambda template: template.latency_s)

    def best(self) -> Template:
        """The candidate with the highest score (4.16) over one CPU function."""
        whole = self.whole
        useful = [c for c in self.candidates() if whole.latency_s - c.latency_s >= LEAST_GAIN * whole.latency_s]
        if not useful:
            raise ConfigError(f"{self._chain.name}: no partition gains {LEAST_GAIN:.0%} over one function")
        return max(useful, key=lambda c: (whole.latency_s - c.latency_s) / max(c.cost - whole.cost, EPSILON))

    def candidates(self, most_workers: Iterable[int] = WORKERS) -> Iterator[Template]:
        """For every number of stages and limit on workers, the fastest that fits the platform."""
        for most in most_workers:
            for stages in self._fastest([w for w in WORKERS if w <= most]):
                yield self.template(stages)

    def template(self, stages: Sequence[StageCut]) -> Template:
        layers, latency_s, cost, memory_gb = self._chain.layers, 0.0, 0.0, 0.0
        for stage in stages:
            part = layers[stage.first : stage.end]
            own_gb = self._platform.memory_gb(part)
            run_s = self._platform.run_s(slowest_flops(part, stage.workers), self.vcpus)
            cost += stage.workers * self._price(own_gb, run_s)
            memory_gb = max(memory_gb, own_gb)
            latency_s += self._stage_s(stage)
        master = self._sheet.smallest_per_second(self._platform.master_gb)
        cost += self._sheet.invocation(float("inf") if master is None else master, latency_s)
        return Template(tuple(stages), latency_s, cost, memory_gb)

    def _price(self, need_gb: float, seconds: float) -> float:
        memory_gb = self._sheet.cpu.memory_gb(self.vcpus, need_gb)
        if memory_gb is None:
            return float("inf")
        return self._sheet.invocation(self._sheet.per_second(self.vcpus, memory_gb), seconds)

    def _fastest(self, workers: Sequence[int]) -> Iterator[tuple[StageCut, ...]]:
        """best[s][j]: the least time of layers 0 … j in s stages; one template for each s from 2."""
        count = len(self._chain.layers)
        best: list[list[tuple[float, tuple[StageCut, ...]] | None]] = [[(0.0, ())] + [None] * count]
        for _ in range(self._sheet.max_stages):
            row: list[tuple[float, tuple[StageCut, ...]] | None] = [None] * (count + 1)
            for end in range(1, count + 1):
                row[end] = self._extend(best[-1], end, workers)
            best.append(row)
        for row in best[2:]:
            if (found := row[count]) is not None:
                yield found[1]

    def _extend(
        self, before: Sequence[tuple[float, tuple[StageCut, ...]] | None], end: int, workers: Sequence[int]
    ) -> tuple[float, tuple[StageCut, ...]] | None:
        found: tuple[float, tuple[StageCut, ...]] | None = None
        for first in range(end):
            begun = before[first]
            if begun is None or not self._fits(first, end):
                continue
            for count in workers:
                if not can_share(self._chain.layers[first:end], count):
                    continue
                stage = StageCut(first, end, count)
                total = begun[0] + self._stage_s(stage)
                if found is None or total < found[0]:
                    found = (total, (*begun[1], stage))
        return found

    def _fits(self, first: int, end: int) -> bool:
        need_gb = self._platform.memory_gb(self._chain.layers[first:end])
        return self._sheet.cpu.memory_gb(self.vcpus, need_gb) is not None

    def _stage_s(self, stage: StageCut) -> float:
        if stage not in self._seconds:
            part = self._chain.layers[stage.first : stage.end]
            run_s = self._platform.run_s(slowest_flops(part, stage.workers), self.vcpus)
            self._seconds[stage] = run_s + self._platform.pass_s(passed_bytes(part, stage.workers))
        return self._seconds[stage]
