"""A plan carried out on this machine: batches by the dispatcher, processes under CPU limits, bills by the price sheet.

Decides nothing: what runs together and where is `dispatch`, whether rates have changed is `drift`, what then is right
is `grouping`. A change of plan sends new requests to new groups; old groups finish what they have, and end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dovetail.errors import ConfigError, EngineFailed, Overloaded
from dovetail.machine import usable_cores
from dovetail.plan.assumed import chain_named
from dovetail.plan.batching import App
from dovetail.plan.billing import Account, GroupRates
from dovetail.plan.chains import IMAGE, Chain
from dovetail.plan.dispatch import Batcher, Placement, Pool
from dovetail.plan.drift import RateWatch
from dovetail.plan.frames import FunctionDied
from dovetail.plan.grouping import Infeasible, plan_groups
from dovetail.plan.instances import Array, Instance, StageSize
from dovetail.plan.options import Mode
from dovetail.plan.plan_file import FunctionPlan, PlannedGroup, make_plan
from dovetail.plan.provision import Provisioner

log = logging.getLogger("dovetail.plan")
MOST_TRIES = 5  # of one batch, each on another function


@dataclass(frozen=True)
class Answered:
    output: Array
    latency_s: float
    batch: int


@dataclass
class _Open:
    app: str
    arrival_s: float
    payload: Array
    future: asyncio.Future[Answered]


class GroupRuntime:
    """One group: its batcher, its pool, and the processes that the pool numbers."""

    def __init__(self, group: PlannedGroup, plan: FunctionPlan, chain: Chain, limit: int) -> None:
        self.group = group
        self._plan = plan
        self._chain = chain
        self._sizes = sizes_of(group, plan, chain)
        self._batcher = Batcher(group.batch, {name: app.wait_s for name, app in group.apps.items()})
        keep_alive_s = plan.prices.keep_alive if plan.cold_starts else float("inf")
        self._pool = Pool(limit, keep_alive_s, max(group.warm, 1))
        self._instances: dict[int, Instance] = {}
        self._open: dict[int, _Open] = {}
        self._tries: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._serial = 0
        self._rates = GroupRates(group, plan.profiles[group.model], plan.prices)
        self.account = Account(group.name, group.forecast.cost_per_request)

    async def start(self) -> None:
        """One function is ready before the first request."""
        instance = await Instance.start(self._chain, self._sizes)
        self._instances[self._pool.warm(_now())] = instance
        await instance.run(np.zeros((1, 3, IMAGE, IMAGE), np.float32))  # a first run takes memory and chooses kernels

    @property
    def pids(self) -> list[int]:
        return [function.pid for instance in self._instances.values() for function in instance.functions]

    async def submit(self, app: str, payload: Array) -> Answered:
        now = _now()
        self._serial += 1
        opened = _Open(app, now, payload, asyncio.get_running_loop().create_future())
        self._open[self._serial] = opened
        batch = self._batcher.add(self._serial, app, now, now)
        self._place(self._pool.add(batch, now) if batch is not None else None)
        self._set_timer()
        return await opened.future

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._batcher.due_s()
        if due_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(due_s - _now(), 0.0), self._due)

    def _due(self) -> None:
        now = _now()
        batch = self._batcher.flush(now)
        self._place(self._pool.add(batch, now) if batch is not None else None)
        self._set_timer()

    def _place(self, placed: Placement | None) -> None:
        if placed is not None:
            task = asyncio.get_running_loop().create_task(self._serve(placed))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, placed: Placement) -> None:
        """One batch on one function, to its end or to the function's."""
        try:
            instance = await self._instance(placed)
            run = await instance.run(self._input(placed))
        except (FunctionDied, OSError) as error:
            await self._lost(placed, error)
            return
        except EngineFailed as error:
            self._fail(placed, error)
            self._pool.release(placed.function, _now())
            self._place(self._pool.place(_now()))
            return
        now = _now()
        self.account.runs += 1
        self.account.cost += self._rates.run([stage.workers_s for stage in run.stages], run.seconds)
        self._answer(placed, run.output, now)
        self._pool.release(placed.function, now)
        for function in self._pool.expire(now):
            self._end(function)
        self._place(self._pool.place(now))

    async def _instance(self, placed: Placement) -> Instance:
        found = self._instances.get(placed.function)
        if found is None:
            found = self._instances[placed.function] = await Instance.start(self._chain, self._sizes)
            self.account.starts += 1
            self.account.start_cost += self._rates.start(found.start_s)
        return found

    def _input(self, placed: Placement) -> Array:
        return np.concatenate([self._open[waiting.request].payload for waiting in placed.batch.requests])

    def _answer(self, placed: Placement, output: Array, now: float) -> None:
        for place, waiting in enumerate(placed.batch.requests):
            opened = self._open.pop(waiting.request)
            self._tries.pop(waiting.request, None)
            latency_s = now - opened.arrival_s
            self.account.answer(latency_s, self.group.apps[opened.app].slo_s)
            if not opened.future.done():
                opened.future.set_result(Answered(output[place : place + 1], latency_s, len(placed.batch)))

    async def _lost(self, placed: Placement, error: Exception) -> None:
        """The batch goes to another function."""
        log.warning("%s: %s; its %d requests go to another", self.group.name, error, len(placed.batch))
        self.account.deaths += 1
        gone = self._instances.pop(placed.function, None)
        tried = max(self._tries.get(waiting.request, 0) for waiting in placed.batch.requests) + 1
        for waiting in placed.batch.requests:
            self._tries[waiting.request] = tried
        if tried >= MOST_TRIES:
            self._fail(placed, EngineFailed(f"{self.group.name}: {tried} functions died on it"))
            self._pool.release(placed.function, _now())
        self._pool.lose(placed.function)
        if gone is not None:
            await gone.close()
        self._place(self._pool.place(_now()))

    def _fail(self, placed: Placement, error: EngineFailed) -> None:
        for waiting in placed.batch.requests:
            opened = self._open.pop(waiting.request)
            if not opened.future.done():
                opened.future.set_exception(error)

    def _end(self, function: int) -> None:
        instance = self._instances.pop(function, None)
        if instance is not None:
            task = asyncio.get_running_loop().create_task(instance.close())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Everything that waits is run, then the functions end."""
        now = _now()
        batch = self._batcher.drain(now)
        self._place(self._pool.add(batch, now) if batch is not None else None)
        self._set_timer()
        while self._open or self._tasks:
            await asyncio.sleep(0.02)
        assert self._pool.is_quiet
        await asyncio.gather(*(instance.close() for instance in self._instances.values()))
        self._instances.clear()


@dataclass(frozen=True)
class Change:
    """One replanning."""

    at_s: float
    rates: Mapping[str, float]
    groups: int
    seconds: float  # until requests went to the new groups
    error: str = ""


class PlanRuntime:
    """All groups of a plan, and the plans that follow it."""

    def __init__(self, plan: FunctionPlan, window_s: float = 30.0, threshold: float = 0.5) -> None:
        check_runnable(plan)
        self.plan = plan
        self._window_s = window_s
        self._threshold = threshold
        self._groups: dict[str, GroupRuntime] = {}  # by application
        self._finished: list[Account] = []
        self._watch: RateWatch | None = None
        self._replanning: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._finishing: set[asyncio.Task[None]] = set()
        self.changes: list[Change] = []
        self._started_s = 0.0
        self._is_draining = False

    async def start(self) -> None:
        self._started_s = _now()
        self._groups = await self._start_groups(self.plan)
        self._watch = self._new_watch()
        self._watching = asyncio.get_running_loop().create_task(self._watch_rates())

    async def _watch_rates(self) -> None:
        """By the clock, since an application that falls silent sends nothing to notice it by."""
        while True:
            await asyncio.sleep(self._window_s / 8)
            now = _now()
            if self._watch is not None and self._replanning is None and (rates := self._watch.drifted(now)) is not None:
                self._replanning = asyncio.get_running_loop().create_task(self._replan(rates))

    async def submit(self, app: str, payload: Array) -> Answered:
        if self._is_draining:
            raise Overloaded("the plan is ending", retry_after_s=60)
        assert self._watch is not None
        self._watch.observe(app, _now())
        return await self._groups[app].submit(app, payload)

    @property
    def apps(self) -> dict[str, App]:
        return {app.name: app for group in self.plan.groups for app in group.applications()}

    def groups(self) -> list[GroupRuntime]:
        return list({id(group): group for group in self._groups.values()}.values())

    def accounts(self) -> list[Account]:
        return [*self._finished, *(group.account for group in self.groups())]

    async def close(self) -> None:
        """Every request that was taken is answered first."""
        self._is_draining = True
        if self._watching is not None:
            self._watching.cancel()
        if self._replanning is not None:
            await self._replanning
        await asyncio.gather(*(group.finish() for group in self.groups()), *self._finishing)

    async def _start_groups(self, plan: FunctionPlan) -> dict[str, GroupRuntime]:
        limit = max(usable_cores(), 1)
        started, is_ready = [GroupRuntime(group, plan, chain_named(group.model), limit) for group in plan.groups], False
        try:
            for runtime in started:
                await runtime.start()
            is_ready = True
        finally:
            if not is_ready:
                await asyncio.gather(*(runtime.finish() for runtime in started))
        return {app: runtime for runtime in started for app in runtime.group.apps}

    def _new_watch(self) -> RateWatch:
        rates = {name: app.rate for name, app in self.apps.items()}
        return RateWatch(rates, self._window_s, self._threshold, _now())

    async def _replan(self, rates: Mapping[str, float]) -> None:
        """New groups are ready before the old ones get no more; what those have, they finish."""
        started = _now()
        try:
            plan = replanned(self.plan, rates)
            fresh = await self._start_groups(plan)
        except (Infeasible, EngineFailed, FunctionDied) as error:
            log.warning("no new plan: %s", error)
            self.changes.append(Change(started - self._started_s, rates, 0, _now() - started, str(error)))
            self._watch, self._replanning = self._new_watch(), None
            return
        old, self.plan, self._groups = self.groups(), plan, fresh
        self._watch, self._replanning = self._new_watch(), None
        self.changes.append(Change(started - self._started_s, rates, len(plan.groups), _now() - started))
        for group in old:
            task = asyncio.get_running_loop().create_task(self._retire(group))
            self._finishing.add(task)
            task.add_done_callback(self._finishing.discard)

    async def _retire(self, group: GroupRuntime) -> None:
        self._finished.append(group.account)
        await group.finish()


def replanned(plan: FunctionPlan, rates: Mapping[str, float]) -> FunctionPlan:
    """The same applications at other rates."""
    apps = [replace(app, rate=rates[app.name]) for group in plan.groups for app in group.applications()]
    provisioners = {
        model: Provisioner(profile, plan.prices, cold_starts=plan.cold_starts)
        for model, profile in plan.profiles.items()
        if any(app.model == model for app in apps)
    }
    return make_plan(plan_groups(apps, provisioners), provisioners)


def check_runnable(plan: FunctionPlan) -> None:
    for group in plan.groups:
        if group.mode is Mode.GPU:
            raise ConfigError(f"groups.{group.name}: GPU functions are not run here; plan with a sheet without GPUs")
        chain_named(group.model)
    busy = sum(_busy_vcpus(group) for group in plan.groups)
    if busy > usable_cores():
        raise ConfigError(f"the plan keeps {busy:.1f} vCPUs busy in the mean, and this machine has {usable_cores()}")


def _busy_vcpus(group: PlannedGroup) -> float:
    return group.rate / group.forecast.expected_batch * group.forecast.mean_s * max(group.vcpus)


def sizes_of(group: PlannedGroup, plan: FunctionPlan, chain: Chain) -> list[StageSize]:
    if group.template is None:
        return [StageSize(0, len(chain.layers), 1, group.vcpus[0])]
    stages = plan.profiles[group.model].partitions[group.template].stages
    return [StageSize(*stage.layers, stage.workers, vcpus) for stage, vcpus in zip(stages, group.vcpus, strict=True)]


def _now() -> float:
    return time.monotonic()
