"""A plan in virtual time: `runtime` and `drive` as they are, and functions that take as long as the profile says.

Says how many requests come late and what the price sheet bills, beside what the plan forecast.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from dovetail.plan.billing import Totals
from dovetail.plan.drive import Load, drive, report
from dovetail.plan.frames import FunctionDied
from dovetail.plan.function_profile import Beside, FunctionProfile, PartitionSection
from dovetail.plan.group_runtime import vcpus_at_once
from dovetail.plan.instances import Array, InstanceRun, StageRun
from dovetail.plan.latency import CpuLatency, spread_of
from dovetail.plan.options import Mode
from dovetail.plan.plan_file import FunctionPlan, PlannedGroup
from dovetail.plan.prices import PriceSheet
from dovetail.plan.runtime import PlanRuntime
from dovetail.plan.virtual import run_virtually

_NOTHING = np.zeros((1, 0), np.float32)  # an image, as far as virtual time cares


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
        self._slowed = Beside()
        self.cold_s = {Mode.CPU: profile.cold_start_s.cpu, Mode.GPU: profile.cold_start_s.gpu}.get(
            group.mode, profile.cold_start_s.stage
        )

    def draw(self, batch: int, is_full: bool = False) -> BatchRun:
        """`is_full`: functions have all vCPUs of the machine."""
        self._slowed = self._profile.beside if is_full else Beside()
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
        slowed = self._slowed
        return self._log_normal(latency.mean_s(batch, vcpus) * slowed.mean, latency.p99_s(batch, vcpus) * slowed.p99)

    def _log_normal(self, mean_s: float, p99_s: float) -> float:
        sigma = spread_of(mean_s, p99_s)
        return mean_s * self._random.lognormvariate(-sigma * sigma / 2, sigma)


@dataclass
class SharedCores:
    """Which running functions share; None = a platform's, which do not."""

    cores: float | None
    busy: float = 0.0  # vCPUs

    @property
    def is_full(self) -> bool:
        return self.cores is not None and self.busy >= self.cores - 1e-9


class VirtualFunction:
    """Takes the time that a function would, and computes nothing."""

    def __init__(self, times: RunTimes, vcpus: float, shared: SharedCores, start_s: float) -> None:
        self._times = times
        self._vcpus = vcpus
        self._shared = shared
        self.start_s = start_s
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._running: asyncio.Future[None] | None = None

    async def run(self, x: Array) -> InstanceRun:
        if self._ended.done():
            raise FunctionDied("it was killed")
        self._shared.busy += self._vcpus
        drawn = self._times.draw(len(x), self._shared.is_full)
        self._running = self._loop.create_future()
        timer = self._loop.call_later(drawn.seconds, self._running.set_result, None)
        try:
            await self._running
        finally:
            timer.cancel()
            self._running = None
            self._shared.busy -= self._vcpus
        return InstanceRun(x, drawn.seconds, tuple(StageRun(workers_s, max(workers_s)) for workers_s in drawn.stages))

    async def ended(self) -> None:
        await asyncio.shield(self._ended)

    def kill(self) -> None:
        self._ended.set_result(None)
        if self._running is not None:
            self._running.set_exception(FunctionDied("it was killed"))

    async def close(self) -> None:
        self._ended.cancel()


class VirtualFunctions:
    """Durations follow from the seed, function by function."""

    def __init__(self, seed: int, cores: float | None) -> None:
        self._random = Random(seed)
        self._shared = SharedCores(cores)

    async def start(self, plan: FunctionPlan, group: PlannedGroup, is_ahead: bool) -> VirtualFunction:
        times = RunTimes(group, plan.profiles[group.model], plan.prices, Random(self._random.random()))
        start_s = times.cold_s if plan.cold_starts else 0.0
        await asyncio.sleep(start_s)
        return VirtualFunction(times, vcpus_at_once(group, plan), self._shared, start_s)


@dataclass(frozen=True)
class Replayed:
    totals: Totals
    report: dict[str, Any]  # as of a plan that was carried out


def replay(
    plan: FunctionPlan, load: Load, cores: float | None = None, window_s: float | None = None, threshold: float = 0.5
) -> Replayed:
    """`cores`: that functions share, as on a machine; `window_s`: rates are watched, and planned for anew."""
    return run_virtually(_replay(plan, load, cores, window_s, threshold))


async def _replay(
    plan: FunctionPlan, load: Load, cores: float | None, window_s: float | None, threshold: float
) -> Replayed:
    runtime = PlanRuntime(plan, window_s, threshold, VirtualFunctions(load.seed, cores), cores)
    await runtime.start()
    driven = await drive(runtime, load, dict.fromkeys(runtime.apps, _NOTHING))
    await runtime.close()
    return Replayed(Totals(tuple(runtime.accounts())), report(runtime, driven))
