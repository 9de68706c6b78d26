"""A plan carried out: its groups, and the plans that follow it when rates drift.

Decides nothing: whether rates have changed is `drift`, what then is right is `grouping`. A change of plan sends new
requests to new groups; old groups finish what they have, and end. Runs on this machine (`ProcessFunctions`) or in
virtual time (`replay`); the loop's clock is the only one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dovetail.errors import ConfigError, EngineFailed, Overloaded
from dovetail.machine import usable_cores
from dovetail.plan.batching import App
from dovetail.plan.billing import Account
from dovetail.plan.chains import Chain
from dovetail.plan.drift import RateWatch
from dovetail.plan.frames import FunctionDied
from dovetail.plan.group_runtime import Answered, Functions, GroupRuntime
from dovetail.plan.grouping import Infeasible, plan_groups
from dovetail.plan.instances import Array, Instance, StageSize
from dovetail.plan.known_chains import chain_of
from dovetail.plan.options import Mode
from dovetail.plan.plan_file import FunctionPlan, PlannedGroup, make_plan
from dovetail.plan.provision import Provisioner

log = logging.getLogger("dovetail.plan")


class ProcessFunctions:
    """Functions as processes of this machine."""

    async def start(self, plan: FunctionPlan, group: PlannedGroup, is_ahead: bool) -> Instance:
        chain = chain_of(plan.profiles[group.model])
        instance = await Instance.start(chain, sizes_of(group, plan, chain))
        if is_ahead:  # a first run takes memory and chooses kernels
            await instance.run(np.zeros((1, *chain.input_shape), np.float32))
        return instance


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

    def __init__(
        self,
        plan: FunctionPlan,
        window_s: float | None = 30.0,  # None: rates are not watched
        threshold: float = 0.5,
        functions: Functions | None = None,
        cores: float | None = None,  # that functions share; None = a platform's, of which there are always more
    ) -> None:
        self.plan = plan
        self._window_s = window_s
        self._threshold = threshold
        self._functions = functions if functions is not None else ProcessFunctions()
        self._cores = cores
        self._groups: dict[str, GroupRuntime] = {}  # by application
        self._finished: list[Account] = []
        self._watch: RateWatch | None = None
        self._provisioners: dict[str, Provisioner] = {}
        self._replanning: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._finishing: set[asyncio.Task[None]] = set()
        self.changes: list[Change] = []
        self.started_s = 0.0
        self._is_draining = False

    @classmethod
    def on_this_machine(cls, plan: FunctionPlan, window_s: float = 30.0, threshold: float = 0.5) -> PlanRuntime:
        check_runnable(plan)
        return cls(plan, window_s, threshold, ProcessFunctions(), usable_cores())

    async def start(self) -> None:
        self._groups = await self._start_groups(self.plan, is_billed=False)
        self.started_s = _now()
        if self._window_s is not None:
            self._provisioners = provisioners_for(self.plan)  # now, because pricing would hold up requests later
            self._watch = self._new_watch(self._window_s)
            self._watching = asyncio.get_running_loop().create_task(self._watch_rates(self._window_s))

    async def _watch_rates(self, window_s: float) -> None:
        """By the clock, since an application that falls silent sends nothing to notice it by."""
        while True:
            await asyncio.sleep(window_s / 8)
            if self._watch is not None and self._replanning is None and (rates := self._watch.drifted(_now())):
                self._replanning = asyncio.get_running_loop().create_task(self._replan(rates, window_s))

    async def submit(self, app: str, payload: Array) -> Answered:
        if self._is_draining:
            raise Overloaded("the plan is ending", code="draining", retry_after_s=60)
        if self._watch is not None:
            self._watch.observe(app, _now())
        return await self._groups[app].submit(app, payload)

    @property
    def apps(self) -> dict[str, App]:
        return {app.name: app for group in self.plan.groups for app in group.applications()}

    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of one request, by application."""
        chains = {model: chain_of(profile) for model, profile in self.plan.profiles.items()}
        return {app: chains[group.model].input_shape for group in self.plan.groups for app in group.apps}

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

    async def _start_groups(self, plan: FunctionPlan, is_billed: bool) -> dict[str, GroupRuntime]:
        started = [GroupRuntime(group, plan, self._functions, self._cores) for group in plan.groups]
        is_ready = False
        try:
            for runtime in started:
                await runtime.start(is_billed)
            is_ready = True
        finally:
            if not is_ready:
                await asyncio.gather(*(runtime.finish() for runtime in started))
        return {app: runtime for runtime in started for app in runtime.group.apps}

    def _new_watch(self, window_s: float) -> RateWatch:
        rates = {name: app.rate for name, app in self.apps.items()}
        return RateWatch(rates, window_s, self._threshold, _now())

    async def _replan(self, rates: Mapping[str, float], window_s: float) -> None:
        """New groups are ready before the old ones get no more; what those have, they finish."""
        started = _now()
        try:
            plan = replanned(self.plan, rates, self._provisioners)
            fresh = await self._start_groups(plan, is_billed=True)
        except (Infeasible, EngineFailed, FunctionDied) as error:
            log.warning("no new plan: %s", error)
            self.changes.append(Change(started - self.started_s, rates, 0, _now() - started, str(error)))
            self._watch, self._replanning = self._new_watch(window_s), None
            return
        old, self.plan, self._groups = self.groups(), plan, fresh
        self._watch, self._replanning = self._new_watch(window_s), None
        self.changes.append(Change(started - self.started_s, rates, len(plan.groups), _now() - started))
        for group in old:
            task = asyncio.get_running_loop().create_task(self._retire(group))
            self._finishing.add(task)
            task.add_done_callback(self._finishing.discard)

    async def _retire(self, group: GroupRuntime) -> None:
        self._finished.append(group.account)
        await group.finish()


def provisioners_for(plan: FunctionPlan) -> dict[str, Provisioner]:
    used = {group.model for group in plan.groups}
    return {
        model: Provisioner(profile, plan.prices, plan.modes, plan.cold_starts, plan.reserve)
        for model, profile in plan.profiles.items()
        if model in used
    }


def replanned(plan: FunctionPlan, rates: Mapping[str, float], provisioners: Mapping[str, Provisioner]) -> FunctionPlan:
    """The same applications at other rates."""
    apps = [replace(app, rate=rates[app.name]) for group in plan.groups for app in group.applications()]
    return make_plan(plan_groups(apps, provisioners), provisioners)


def check_runnable(plan: FunctionPlan) -> None:
    for group in plan.groups:
        if group.mode is Mode.GPU:
            raise ConfigError(
                f"groups.{group.name}: a GPU function, and `dovetail apply` runs functions on CPUs only; plan again "
                f"with `--prices own-machines`, which has no GPU functions"
            )
        chain_of(plan.profiles[group.model])
    busy = sum(_busy_vcpus(group) for group in plan.groups)
    if busy > usable_cores():
        raise ConfigError(
            f"the plan keeps {busy:.1f} vCPUs busy in the mean, and this machine has {usable_cores()}; lower `rate` of "
            "its applications, or apply it on a larger machine"
        )


def _busy_vcpus(group: PlannedGroup) -> float:
    return group.rate / group.forecast.expected_batch * group.forecast.mean_s * max(group.vcpus)


def sizes_of(group: PlannedGroup, plan: FunctionPlan, chain: Chain) -> list[StageSize]:
    if group.template is None:
        return [StageSize(0, len(chain.layers), 1, group.vcpus[0])]
    stages = plan.profiles[group.model].partitions[group.template].stages
    return [StageSize(*stage.layers, stage.workers, vcpus) for stage, vcpus in zip(stages, group.vcpus, strict=True)]


def _now() -> float:
    return asyncio.get_running_loop().time()
