"""A plan in virtual time: arrivals, the dispatcher's own batches and functions, durations drawn from the profile.

Says how many requests come late and what the price sheet bills, beside what the plan forecast.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from dovetail.plan.dispatch import Batch, Batcher, Placement, Pool
from dovetail.plan.function_profile import FunctionProfile, PartitionSection
from dovetail.plan.latency import CpuLatency, spread_of
from dovetail.plan.options import Mode
from dovetail.plan.plan_file import FunctionPlan, PlannedGroup
from dovetail.plan.prices import PriceSheet

_ARRIVAL, _DUE, _DONE = range(3)


@dataclass(frozen=True)
class FunctionRun:
    """One function's part of a run."""

    per_second: float
    seconds: float
    count: int = 1  # alike


@dataclass(frozen=True)
class BatchRun:
    seconds: float
    functions: tuple[FunctionRun, ...]

    def cost(self, sheet: PriceSheet) -> float:
        return sum(
            function.count * sheet.invocation(function.per_second, function.seconds) for function in self.functions
        )


@dataclass
class GroupResult:
    """What became of one group's requests."""

    name: str
    forecast_per_request: float
    requests: int = 0
    late: int = 0
    batches: int = 0
    cold: int = 0
    cost: float = 0.0
    latencies_s: list[float] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class ReplayResult:
    groups: tuple[GroupResult, ...]
    forecast: float  # of the same requests
    cost: float

    @property
    def requests(self) -> int:
        return sum(group.requests for group in self.groups)

    @property
    def late_share(self) -> float:
        return sum(group.late for group in self.groups) / max(self.requests, 1)

    @property
    def forecast_error(self) -> float:
        """Of the forecast, against what was billed."""
        return self.forecast / self.cost - 1 if self.cost else 0.0


class RunTimes:
    """Durations of one group's runs, log-normal with the profile's mean and 99th percentile."""

    def __init__(self, group: PlannedGroup, profile: FunctionProfile, sheet: PriceSheet, random: Random) -> None:
        self._group = group
        self._profile = profile
        self._sheet = sheet
        self._random = random
        self.cold_s = {Mode.CPU: profile.cold_start_s.cpu, Mode.GPU: profile.cold_start_s.gpu}.get(
            group.mode, profile.cold_start_s.stage
        )

    def draw(self, batch: int) -> BatchRun:
        if self._group.mode is Mode.CPU:
            vcpus = self._group.vcpus[0]
            rate = self._sheet.per_second(vcpus, self._group.memory_gb[0])
            seconds = self._cpu_s(self._profile.cpu_latency, batch, vcpus)
            return BatchRun(seconds, (FunctionRun(rate, seconds),))
        if self._group.mode is Mode.GPU:
            return self._gpu(batch)
        assert self._group.template is not None
        return self._partitioned(self._profile.partitions[self._group.template], batch)

    def per_second(self) -> float:
        """Of everything that a cold start starts."""
        if self._group.mode is not Mode.PARTITIONED:
            return self._sheet.per_second(self._group.vcpus[0], self._group.memory_gb[0], self._group.gpu_gb)
        assert self._group.template is not None
        stages = self._profile.partitions[self._group.template].stages
        sizes = zip(stages, self._group.vcpus, self._group.memory_gb, strict=True)
        return sum(stage.workers * self._sheet.per_second(vcpus, memory) for stage, vcpus, memory in sizes)

    def _gpu(self, batch: int) -> BatchRun:
        latency, gpu = self._profile.gpu_latency, self._sheet.gpu
        assert latency is not None
        assert gpu is not None
        part_gb = self._group.gpu_gb
        longest_s = latency.longest_s(batch, part_gb, gpu.card_gb, gpu.slice)
        mean_s = (latency.mean_s(batch) + longest_s) / 2
        seconds = self._log_normal(mean_s, latency.p99_s(batch, part_gb, gpu.card_gb, gpu.slice))
        return BatchRun(
            seconds, (FunctionRun(self._sheet.per_second(gpu.vcpus, gpu.host_memory_gb, part_gb), seconds),)
        )

    def _partitioned(self, partition: PartitionSection, batch: int) -> BatchRun:
        functions = []
        total_s = (len(partition.stages) - 1) * partition.passing(batch)
        sizes = zip(partition.stages, self._group.vcpus, self._group.memory_gb, strict=True)
        for stage, vcpus, memory_gb in sizes:
            seconds = self._cpu_s(stage.latency, batch, vcpus)
            functions.append(FunctionRun(self._sheet.per_second(vcpus, memory_gb), seconds, stage.workers))
            total_s += seconds
        functions.append(FunctionRun(master_per_second(partition, self._sheet), total_s))
        return BatchRun(total_s, tuple(functions))

    def _cpu_s(self, latency: CpuLatency, batch: int, vcpus: float) -> float:
        return self._log_normal(latency.mean_s(batch, vcpus), latency.p99_s(batch, vcpus))

    def _log_normal(self, mean_s: float, p99_s: float) -> float:
        sigma = spread_of(mean_s, p99_s)
        return mean_s * self._random.lognormvariate(-sigma * sigma / 2, sigma)


def master_per_second(partition: PartitionSection, sheet: PriceSheet) -> float:
    sizes = ((vcpus, sheet.cpu.memory_gb(vcpus, partition.master_memory_gb)) for vcpus in sheet.cpu.vcpus)
    return next(sheet.per_second(vcpus, memory) for vcpus, memory in sizes if memory is not None)


def arrivals(rates: Mapping[str, float], duration_s: float, random: Random, cv: float = 1.0) -> Iterator[
    tuple[float, str]
]:  # fmt: skip
    """By time. Gaps are Gamma with this coefficient of variation; 1 = Poisson."""
    shape = 1.0 / (cv * cv)
    streams = [_stream(app, rate, duration_s, random, shape) for app, rate in rates.items()]
    return heapq.merge(*streams)


def _stream(app: str, rate: float, duration_s: float, random: Random, shape: float) -> Iterator[tuple[float, str]]:
    now = random.random() * random.gammavariate(shape, 1 / (shape * rate))
    while now < duration_s:
        yield now, app
        now += random.gammavariate(shape, 1 / (shape * rate))


def replay(plan: FunctionPlan, duration_s: float, seed: int = 0, cv: float = 1.0) -> ReplayResult:
    results = []
    for index, group in enumerate(plan.groups):
        random = Random(f"{seed}/{index}")
        times = RunTimes(group, plan.profiles[group.model], plan.prices, random)
        rates = {name: app.rate for name, app in group.apps.items()}
        results.append(_GroupReplay(plan, group, times).run(arrivals(rates, duration_s, random, cv)))
    forecast = sum(result.requests * result.forecast_per_request for result in results)
    return ReplayResult(tuple(results), forecast, sum(result.cost for result in results))


def _running(group: PlannedGroup) -> int:
    """Functions at once, in all but rare moments."""
    mean = group.rate / group.forecast.expected_batch * group.forecast.mean_s
    return math.ceil(mean + 3 * math.sqrt(mean))


class _GroupReplay:
    """Events in a heap of (time, kind, serial): a total order, so that a seed decides everything."""

    def __init__(self, plan: FunctionPlan, group: PlannedGroup, times: RunTimes) -> None:
        self._sheet = plan.prices
        self._cold_starts = plan.cold_starts
        self._group = group
        self._times = times
        self._batcher = Batcher(group.batch, {name: app.wait_s for name, app in group.apps.items()})
        self._pool = Pool(None, plan.prices.keep_alive if plan.cold_starts else float("inf"), group.warm)
        for _ in range(max(group.warm, _running(group))):  # begins as if it had run for long
            self._pool.warm(0.0)
        self._result = GroupResult(group.name, group.forecast.cost_per_request)
        self._events: list[tuple[float, int, int, object]] = []
        self._serials = itertools.count()

    def run(self, stream: Iterator[tuple[float, str]]) -> GroupResult:
        now = 0.0
        self._next_arrival(stream)
        while self._events:
            now, kind, serial, what = heapq.heappop(self._events)
            if kind == _ARRIVAL:
                batch = self._batcher.add(serial, str(what), now, now)
                due_s = self._batcher.due_s()
                if batch is None and due_s is not None:
                    self._push(due_s, _DUE, None)
                self._next_arrival(stream)
                self._start(batch, now)
            elif kind == _DUE:
                self._start(self._batcher.flush(now), now)
            else:
                assert isinstance(what, Placement)
                self._finish(what, now)
        self._result.cost += self._idle_cost(now)
        assert not len(self._batcher)
        assert self._pool.is_quiet
        return self._result

    def _idle_cost(self, end_s: float) -> float:
        """A function kept warm is billed for all of the time."""
        return self._group.warm * self._times.per_second() * (self._sheet.rates.idle_share or 0.0) * end_s

    def _push(self, time_s: float, kind: int, what: object) -> None:
        heapq.heappush(self._events, (time_s, kind, next(self._serials), what))

    def _next_arrival(self, stream: Iterator[tuple[float, str]]) -> None:
        for time_s, app in itertools.islice(stream, 1):
            self._push(time_s, _ARRIVAL, app)

    def _start(self, batch: Batch | None, now: float) -> None:
        placed = self._pool.add(batch, now) if batch is not None else None
        if placed is None:
            return
        run = self._times.draw(len(placed.batch))
        start_s = self._times.cold_s if placed.is_cold and self._cold_starts else 0.0
        result = self._result
        result.batches += 1
        result.cold += placed.is_cold
        result.cost += run.cost(self._sheet)
        if start_s and self._sheet.cold_start_billed:
            result.cost += self._times.per_second() * self._sheet.billed_s(start_s)
        self._push(now + start_s + run.seconds, _DONE, placed)

    def _finish(self, placed: Placement, now: float) -> None:
        self._pool.release(placed.function, now)
        for waiting in placed.batch.requests:
            latency_s = now - waiting.arrival_s
            self._result.requests += 1
            self._result.late += latency_s > self._group.apps[waiting.app].slo_s
            self._result.latencies_s.append(latency_s)
