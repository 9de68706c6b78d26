"""A plan in virtual time: arrivals, the dispatcher's own batches and functions, durations drawn from the profile.

Says how many requests come late and what the price sheet bills, beside what the plan forecast.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

from dovetail.plan.billing import Account, GroupRates, Totals
from dovetail.plan.dispatch import Batch, Batcher, Placement, Pool
from dovetail.plan.function_profile import FunctionProfile, PartitionSection
from dovetail.plan.latency import CpuLatency, spread_of
from dovetail.plan.options import Mode
from dovetail.plan.plan_file import FunctionPlan, PlannedGroup
from dovetail.plan.prices import PriceSheet

_ARRIVAL, _DUE, _DONE = range(3)


@dataclass(frozen=True)
class BatchRun:
    seconds: float
    stages: tuple[tuple[float, ...], ...]  # seconds of each worker


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
        if self._group.template is not None:
            return self._partitioned(self._profile.partitions[self._group.template], batch)
        if self._group.mode is Mode.GPU:
            seconds = self._gpu_s(batch)
        else:
            seconds = self._cpu_s(self._profile.cpu_latency, batch, self._group.vcpus[0])
        return BatchRun(seconds, ((seconds,),))

    def _gpu_s(self, batch: int) -> float:
        latency, gpu = self._profile.gpu_latency, self._sheet.gpu
        assert latency is not None
        assert gpu is not None
        part_gb = self._group.gpu_gb
        longest_s = latency.longest_s(batch, part_gb, gpu.card_gb, gpu.slice)
        mean_s = (latency.mean_s(batch) + longest_s) / 2
        return self._log_normal(mean_s, latency.p99_s(batch, part_gb, gpu.card_gb, gpu.slice))

    def _partitioned(self, partition: PartitionSection, batch: int) -> BatchRun:
        """A stage is as slow as its slowest worker, and that is what its curve says: all count as slow as it."""
        taken = [
            self._cpu_s(stage.latency, batch, vcpus)
            for stage, vcpus in zip(partition.stages, self._group.vcpus, strict=True)
        ]
        total_s = sum(taken) + (len(taken) - 1) * partition.passing(batch)
        workers = zip(partition.stages, taken, strict=True)
        return BatchRun(total_s, tuple((seconds,) * stage.workers for stage, seconds in workers))

    def _cpu_s(self, latency: CpuLatency, batch: int, vcpus: float) -> float:
        return self._log_normal(latency.mean_s(batch, vcpus), latency.p99_s(batch, vcpus))

    def _log_normal(self, mean_s: float, p99_s: float) -> float:
        sigma = spread_of(mean_s, p99_s)
        return mean_s * self._random.lognormvariate(-sigma * sigma / 2, sigma)


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


def replay(plan: FunctionPlan, duration_s: float, seed: int = 0, cv: float = 1.0) -> Totals:
    accounts = []
    for index, group in enumerate(plan.groups):
        random = Random(f"{seed}/{index}")
        times = RunTimes(group, plan.profiles[group.model], plan.prices, random)
        rates = {name: app.rate for name, app in group.apps.items()}
        accounts.append(_GroupReplay(plan, group, times).run(arrivals(rates, duration_s, random, cv)))
    return Totals(tuple(accounts))


def _running(group: PlannedGroup) -> int:
    """Functions at once, in all but rare moments."""
    mean = group.rate / group.forecast.expected_batch * group.forecast.mean_s
    return math.ceil(mean + 3 * math.sqrt(mean))


class _GroupReplay:
    """Events in a heap of (time, kind, serial): a total order, so that a seed decides everything."""

    def __init__(self, plan: FunctionPlan, group: PlannedGroup, times: RunTimes) -> None:
        self._rates = GroupRates(group, plan.profiles[group.model], plan.prices)
        self._cold_starts = plan.cold_starts
        self._group = group
        self._times = times
        self._batcher = Batcher(group.batch, {name: app.wait_s for name, app in group.apps.items()})
        self._pool = Pool(None, plan.prices.keep_alive if plan.cold_starts else float("inf"), group.warm)
        for _ in range(max(group.warm, _running(group))):  # begins as if it had run for long
            self._pool.warm(0.0)
        self._account = Account(group.name, group.forecast.cost_per_request)
        self._events: list[tuple[float, int, int, object]] = []
        self._serials = itertools.count()

    def run(self, stream: Iterator[tuple[float, str]]) -> Account:
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
        self._account.cost += self._rates.kept_warm(now)
        assert not len(self._batcher)
        assert self._pool.is_quiet
        return self._account

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
        account = self._account
        account.runs += 1
        account.starts += placed.is_cold
        account.cost += self._rates.run(run.stages, run.seconds)
        account.start_cost += self._rates.start(start_s)
        self._push(now + start_s + run.seconds, _DONE, placed)

    def _finish(self, placed: Placement, now: float) -> None:
        self._pool.release(placed.function, now)
        for waiting in placed.batch.requests:
            self._account.answer(now - waiting.arrival_s, self._group.apps[waiting.app].slo_s)
