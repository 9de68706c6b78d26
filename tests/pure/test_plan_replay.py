"""Plans in virtual time: the runtime that `apply` runs, on a clock that jumps, with deaths, drift and too few cores."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from plan_builders import curve, make_app, make_profile, make_sheet, random_apps, shipped

from dovetail.errors import EngineFailed
from dovetail.plan.drive import Load, RateChange
from dovetail.plan.frames import FunctionDied
from dovetail.plan.function_profile import ColdStarts
from dovetail.plan.group_runtime import functions_at_once, functions_ready
from dovetail.plan.grouping import plan_groups
from dovetail.plan.options import Mode
from dovetail.plan.plan_file import FunctionPlan, PlannedGroup, make_plan
from dovetail.plan.provision import Provisioner
from dovetail.plan.replay import VirtualFunction, VirtualFunctions, replay
from dovetail.plan.runtime import PlanRuntime
from dovetail.plan.virtual import run_virtually

IMAGE = np.zeros((1, 0), np.float32)
SMALL = {"cpu": {1: curve(1.0, 0.4), 2: curve(1.9, 0.8)}, "vcpus": (0.5, 0.5), "partitions": (), "gpu": None}


def toy_plan(*, reserve: float | None = None, rate: float = 1.0, slo_s: float = 3.5, **changes: Any) -> FunctionPlan:
    """Half a vCPU, batches of two, a full batch runs for 2.5 s."""
    fields = SMALL | {"cold_start_s": ColdStarts(cpu=2.0)} | changes
    provisioners = {"toy": Provisioner(make_profile(**fields), make_sheet(gpu=None), (Mode.CPU,), reserve=reserve)}
    apps = [make_app("strict", rate=rate, slo_s=slo_s), make_app("loose", rate=0.1, slo_s=20.0)]
    return make_plan(plan_groups(apps, provisioners), provisioners)


def shipped_plan(apps_seed: int, count: int) -> FunctionPlan:
    return make_plan(plan_groups(random_apps(apps_seed, count), shipped()), shipped())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_replayed_plan_keeps_its_slos_and_its_forecast(seed: int) -> None:
    result = replay(shipped_plan(seed, 8), Load(900, seed)).totals
    assert result.requests > 1000
    assert result.late_share <= 0.011
    assert abs(result.forecast_error(result.billed)) < 0.05


def test_the_same_seed_gives_the_same_replay() -> None:
    plan = shipped_plan(4, 3)
    assert replay(plan, Load(600, 7)) == replay(plan, Load(600, 7))
    assert replay(plan, Load(600, 7)) != replay(plan, Load(600, 8))


def test_as_many_functions_run_at_once_as_have_the_vcpus_they_are_billed_for() -> None:
    plan = toy_plan()
    group = plan.groups[0]
    assert (functions_at_once(group, plan, 2), functions_at_once(group, plan, None)) == (4, None)
    pipeline = group.model_copy(update={"template": 0, "vcpus": (1.5, 1.0)})  # the second stage has two workers
    profile = make_profile()
    staged = plan.model_copy(update={"profiles": {"toy": profile}})
    assert functions_at_once(pipeline, staged, 8) == 4
    assert functions_at_once(pipeline, staged, 1) == 1
    assert functions_ready(group, 1) == 1
    assert functions_ready(group.model_copy(update={"warm": 3}), None) >= 3


def test_too_few_cores_show_as_late_requests_that_queued() -> None:
    """The machine's limit is in the replay: without it, a plan that queues here would look as good as on a platform."""
    plan = toy_plan()
    few, enough = (replay(plan, Load(900), cores=cores).totals for cores in (1.0, 4.0))
    assert few.late_share > 0.05
    assert enough.late_share < 0.011
    assert all(late.queued_s > 0 for late in few.late_requests if late.ran_s < 2.0)


def test_a_killed_function_loses_no_request_and_is_replaced() -> None:
    told = replay(toy_plan(), Load(120, kills_s=(30.0, 60.0, 90.0)), cores=2.0).report
    assert (told["killed"], told["lost"], told["failed"]) == (3, 0, 0)
    assert told["sent"] == told["answered"]
    (group,) = told["groups"]
    assert (group["deaths"], group["starts"] >= 3) == (3, True)


def test_an_idle_function_that_was_killed_is_replaced_before_anybody_asks() -> None:
    async def run() -> tuple[int, int, float]:
        runtime = PlanRuntime(toy_plan(), None, functions=VirtualFunctions(0, None))
        await runtime.start()
        (group,) = runtime.groups()
        before = len(group.instances)
        for instance in group.instances:
            instance.kill()
        await asyncio.sleep(3.0)
        after = len(group.instances)
        answered = await runtime.submit("strict", IMAGE)
        await runtime.close()
        return before, after, answered.latency_s

    before, after, latency_s = run_virtually(run())
    assert before == after > 0
    assert latency_s < 2.5, "it did not wait for a start"


def test_a_rate_that_triples_is_planned_for_and_late_requests_are_told_apart() -> None:
    load = Load(600, 1, changes=(RateChange("strict", 3.0, 200.0),))
    told = replay(toy_plan(rate=0.5), load, cores=4.0, window_s=60.0).report
    assert told["lost"] == 0
    assert [change["error"] for change in told["changes"]] == [""]
    (change,) = told["changes"]
    assert 200 < change["at_s"] < 260
    assert change["rates"]["strict"] == pytest.approx(1.5, rel=0.35)
    assert 0 < told["undisturbed"] < told["sent"]
    for late in told["late_requests"]:
        assert late["waited_s"] + late["queued_s"] + late["ran_s"] > late["slo_s"]


def test_a_plan_leaves_time_for_runs_that_others_on_the_machine_make_longer() -> None:
    beside = {"mean": 1.2, "p99": 1.25}
    plans = [toy_plan(slo_s=4.0, reserve=reserve, beside=beside) for reserve in (0.0, 0.25, None)]
    waits_s = [plan.groups[0].apps["strict"].wait_s for plan in plans]
    assert waits_s[0] > waits_s[1] == waits_s[2] > 0
    assert waits_s[0] - waits_s[1] == pytest.approx(0.25 * plans[0].groups[0].forecast.p99_s)


def test_runs_are_slower_while_functions_have_all_cores() -> None:
    plan = toy_plan(slo_s=4.0, rate=1.5, beside={"mean": 1.5, "p99": 1.5})
    shared, apart = (replay(plan, Load(600), cores=cores).totals for cores in (2.0, 20.0))
    assert shared.requests == apart.requests
    assert shared.cost > 1.05 * apart.cost, "a longer run is billed"


def test_functions_kept_warm_are_billed_while_nobody_calls() -> None:
    plan = toy_plan()
    kept = plan.model_copy(update={"groups": (plan.groups[0].model_copy(update={"warm": 1}),)})
    idle, warm = (replay(each, Load(60, 0, kills_s=())).totals.cost for each in (plan, kept))
    per_s = plan.prices.per_second(0.5, plan.groups[0].memory_gb[0]) * 0.2
    assert warm - idle == pytest.approx(60 * per_s, rel=0.1)


class _Failing(VirtualFunctions):
    """Starts so many, and none after."""

    def __init__(self, count: int, error: Exception) -> None:
        super().__init__(0, None)
        self._left = count
        self.refused = 0
        self._error = error

    async def start(self, plan: FunctionPlan, group: PlannedGroup, is_ahead: bool) -> VirtualFunction:
        if self._left == 0:
            self.refused += 1
            raise self._error
        self._left -= 1
        return await super().start(plan, group, is_ahead)


@pytest.mark.parametrize(("error", "tries"), [(FunctionDied("gone"), 5), (EngineFailed("no memory"), 1)])
def test_a_request_whose_functions_do_not_start_is_refused_after_some_tries(error: Exception, tries: int) -> None:
    async def run() -> int:
        plan = toy_plan()
        functions = _Failing(sum(functions_ready(group, None) for group in plan.groups), error)
        runtime = PlanRuntime(plan, None, functions=functions)
        await runtime.start()
        for instance in runtime.groups()[0].instances:
            instance.kill()
        with pytest.raises(EngineFailed, match="functions failed on it"):
            await runtime.submit("strict", IMAGE)
        await runtime.close()
        return functions.refused - functions_ready(plan.groups[0], None)  # each of which was to be replaced

    assert run_virtually(run()) == tries


def test_virtual_time_jumps_and_says_when_nothing_can_happen_any_more() -> None:
    async def sleep() -> float:
        await asyncio.sleep(86_400 * 30)
        return asyncio.get_running_loop().time()

    async def stuck() -> None:
        await asyncio.get_running_loop().create_future()

    assert run_virtually(sleep()) == pytest.approx(86_400 * 30)
    with pytest.raises(RuntimeError, match="all wait for each other"):
        run_virtually(stuck())
