"""One group of a plan carried out: its batcher, its pool, and the functions that the pool numbers.

Decides nothing (`dispatch` does), and does not know whether time is real: the loop's clock and `Functions` are either
this machine's or virtual ones, of which `replay` says how long things take.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dovetail.errors import EngineFailed
from dovetail.plan.billing import Account, GroupRates, LateRequest
from dovetail.plan.dispatch import Batch, Batcher, Placement, Pool
from dovetail.plan.frames import FunctionDied
from dovetail.plan.instances import Array, InstanceRun
from dovetail.plan.plan_file import FunctionPlan, PlannedGroup

log = logging.getLogger("dovetail.plan")
MOST_TRIES = 5  # of one batch, each on another function
_FINISHED_POLL_S = 0.02


class RunningFunction(Protocol):
    """An instance of a group: ready, until it ends or is closed."""

    @property
    def start_s(self) -> float: ...

    async def run(self, x: Array) -> InstanceRun: ...

    async def ended(self) -> None:
        """Returns when it can run no more."""

    def kill(self) -> None: ...

    async def close(self) -> None: ...


class Functions(Protocol):
    """Where functions are started: this machine, or nowhere."""

    async def start(self, plan: FunctionPlan, group: PlannedGroup, is_ahead: bool) -> RunningFunction:
        """`is_ahead`: no request waits for it yet, so its slow first run may be done before it counts as ready."""


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
    tries: int = 0


class GroupRuntime:
    def __init__(self, group: PlannedGroup, plan: FunctionPlan, functions: Functions, cores: float | None) -> None:
        self.group = group
        self._plan = plan
        self._functions = functions
        self._loop = asyncio.get_running_loop()
        self._batcher = Batcher(group.batch, {name: app.wait_s for name, app in group.apps.items()})
        keep_alive_s = plan.prices.keep_alive if plan.cold_starts else math.inf
        limit = functions_at_once(group, plan, cores)
        self._pool = Pool(limit, keep_alive_s, group.warm)
        self._num_ready = functions_ready(group, limit)
        self._instances: dict[int, RunningFunction] = {}
        self._open: dict[int, _Open] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watchers: dict[int, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._serial = 0
        self._started_s = self._loop.time()
        self._rates = GroupRates(group, plan.profiles[group.model], plan.prices)
        self.account = Account(group.name, group.forecast.cost_per_request)

    async def start(self, is_billed: bool = True) -> None:
        """As many functions as run at once are ready before the first request."""
        numbers = [self._pool.start_ahead() for _ in range(self._num_ready)]
        started = await asyncio.gather(*(self._begin(n, True, is_billed) for n in numbers), return_exceptions=True)
        failed = next((error for error in started if isinstance(error, BaseException)), None)
        if failed is not None:
            raise failed

    @property
    def instances(self) -> list[RunningFunction]:
        return list(self._instances.values())

    async def submit(self, app: str, payload: Array) -> Answered:
        now = self._loop.time()
        self._serial += 1
        opened = self._open[self._serial] = _Open(app, now, payload, self._loop.create_future())
        self._go_on(self._batcher.add(self._serial, app, now, now))
        return await opened.future

    def _go_on(self, batch: Batch | None = None) -> None:
        """What can run does; what cannot has a function started."""
        if batch is not None:
            self._pool.add(batch)
        for function in self._pool.expire(self._loop.time()):
            self._end(function)
        while (placed := self._pool.place()) is not None:
            self._spawn(self._serve(placed))
        while (function_wanted := self._pool.start_wanted()) is not None:
            self._spawn(self._launch(function_wanted, False))
        self._set_timer()

    def _set_timer(self) -> None:
        due_s = self._batcher.due_s()
        if self._timer is not None and self._timer.when() != due_s:
            self._timer.cancel()
            self._timer = None
        if due_s is not None and self._timer is None:
            self._timer = self._loop.call_at(due_s, self._due)

    def _due(self) -> None:
        self._timer = None
        self._go_on(self._batcher.flush(self._loop.time()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _begin(self, function: int, is_ahead: bool, is_billed: bool = True) -> None:
        instance = await self._functions.start(self._plan, self.group, is_ahead)
        self._instances[function] = instance
        if is_billed:
            self.account.starts += 1
            self.account.start_cost += self._rates.start(instance.start_s)
        self._pool.ready(function, self._loop.time())
        self._watchers[function] = self._loop.create_task(self._watch(function, instance))

    async def _launch(self, function: int, is_ahead: bool) -> None:
        try:
            await self._begin(function, is_ahead)
        except (FunctionDied, OSError, EngineFailed) as error:
            log.warning("%s: no function: %s", self.group.name, error)
            self._pool.lose(function)
            if not is_ahead:
                self._blame(error)
        self._go_on()

    async def _watch(self, function: int, instance: RunningFunction) -> None:
        await instance.ended()
        self._gone(function)

    async def _serve(self, placed: Placement) -> None:
        """One batch on one function, to its end or to the function's."""
        instance, started_s = self._instances[placed.function], self._loop.time()
        try:
            run = await instance.run(self._input(placed.batch))
        except (FunctionDied, OSError):
            self._gone(placed.function)
            return
        except EngineFailed as error:
            self._fail(placed.batch, error)
        else:
            if self._instances.get(placed.function) is not instance:
                return  # it died as it answered, and its batch has gone to another
            self.account.runs += 1
            self.account.cost += self._rates.run([stage.workers_s for stage in run.stages], run.seconds)
            self._answer(placed.batch, run.output, started_s)
        self._pool.release(placed.function, self._loop.time())
        self._go_on()

    def _input(self, batch: Batch) -> Array:
        return np.concatenate([self._open[waiting.request].payload for waiting in batch.requests])

    def _answer(self, batch: Batch, output: Array, started_s: float) -> None:
        now = self._loop.time()
        for place, waiting in enumerate(batch.requests):
            opened = self._open.pop(waiting.request)
            latency_s, slo_s = now - opened.arrival_s, self.group.apps[opened.app].slo_s
            times = (batch.formed_s - opened.arrival_s, started_s - batch.formed_s, now - started_s)
            late = LateRequest(opened.app, opened.arrival_s, slo_s, *times) if latency_s > slo_s else None
            self.account.answer(latency_s, late)
            if not opened.future.done():
                opened.future.set_result(Answered(output[place : place + 1], latency_s, len(batch)))

    def _gone(self, function: int) -> None:
        """It died: what it ran goes to another, and another takes its place."""
        instance = self._instances.pop(function, None)
        if instance is None:
            return
        self._watchers.pop(function)
        self._spawn(instance.close())
        self.account.deaths += 1
        batch = self._pool.lose(function)
        log.warning("%s: a function is gone; its %d requests go to another", self.group.name, len(batch or ()))
        if batch is not None:
            self._blame(FunctionDied("it was killed"))
        self._go_on()
        if self._pool.num_started < self._num_ready:
            self._spawn(self._launch(self._pool.start_ahead(), True))

    def _blame(self, error: Exception) -> None:
        """A function has failed on the batch that waits first, which is not tried for ever."""
        batch = self._pool.first_queued
        opened = [self._open[waiting.request] for waiting in batch.requests] if batch is not None else []
        for each in opened:
            each.tries += 1
        tries = max((each.tries for each in opened), default=0)
        if batch is not None and (tries >= MOST_TRIES or isinstance(error, EngineFailed)):
            self._pool.give_up(batch)
            self._fail(batch, EngineFailed(f"{self.group.name}: {tries} functions failed on it; the last: {error}"))

    def _fail(self, batch: Batch, error: EngineFailed) -> None:
        for waiting in batch.requests:
            opened = self._open.pop(waiting.request)
            if not opened.future.done():
                opened.future.set_exception(error)

    def _end(self, function: int) -> None:
        self._watchers.pop(function).cancel()
        self._spawn(self._instances.pop(function).close())

    async def finish(self) -> None:
        """Everything that waits is run, then the functions end."""
        self._go_on(self._batcher.drain(self._loop.time()))
        while self._open or self._tasks:
            await asyncio.sleep(_FINISHED_POLL_S)
        assert self._pool.is_quiet
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*(instance.close() for instance in self._instances.values()))
        self._instances.clear()
        self.account.cost += self._rates.kept_warm(self._loop.time() - self._started_s)


def functions_at_once(group: PlannedGroup, plan: FunctionPlan, cores: float | None) -> int | None:
    """As many as have the vCPUs that they are billed for; None = of a platform, which has always more."""
    return None if cores is None else max(int(cores / vcpus_at_once(group, plan) + 1e-9), 1)


def vcpus_at_once(group: PlannedGroup, plan: FunctionPlan) -> float:
    """Of one function; a pipeline's stages run one after another."""
    if group.template is None:
        return group.vcpus[0]
    stages = plan.profiles[group.model].partitions[group.template].stages
    return max(stage.workers * vcpus for stage, vcpus in zip(stages, group.vcpus, strict=True))


def functions_ready(group: PlannedGroup, limit: int | None) -> int:
    """As many as run at once in all but rare moments, as if the plan had run for long."""
    mean = group.rate / group.forecast.expected_batch * group.forecast.mean_s
    running = max(math.ceil(mean + 3 * math.sqrt(mean)), 1)
    return max(group.warm, running if limit is None else min(running, limit))
