"""Plans carried out with real processes: pipelines, limits, a death, a rate that triples, and the HTTP endpoint."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from dovetail.errors import ConfigError
from dovetail.plan.batching import App
from dovetail.plan.chains import wide_resnet50
from dovetail.plan.drive import Driven, report
from dovetail.plan.endpoint import make_app
from dovetail.plan.frames import FunctionDied
from dovetail.plan.function_profile import ColdStarts, CurveSection, FunctionProfile, PartitionSection, StageSection
from dovetail.plan.grouping import plan_groups
from dovetail.plan.instances import Instance, StageSize
from dovetail.plan.limits import CpuLimit, threads_of
from dovetail.plan.options import Mode
from dovetail.plan.plan_file import FunctionPlan, make_plan
from dovetail.plan.prices import read_sheet
from dovetail.plan.provision import Provisioner
from dovetail.plan.runtime import PlanRuntime, check_runnable

IMAGE = np.random.default_rng(0).standard_normal((1, 3, 224, 224), dtype=np.float32)


def make_plan_of(*apps: App, partitioned: bool = False, cold_s: float = 1.0) -> FunctionPlan:
    """Of the narrowest network, with a made-up profile."""
    curve = CurveSection(mean=(0.2, 1.0, 0.2), p99=(0.4, 1.0, 0.4))
    stages = (
        StageSection(layers=(0, 9), memory_gb=0.3, cpu={1: curve}),
        StageSection(layers=(9, 18), memory_gb=0.3, cpu={1: curve}),
    )
    profile = FunctionProfile(
        model="wrn50-1",
        source="a test",
        memory_gb=0.5,
        vcpus=(1, 2),  # less would start slowly
        cpu={1: curve, 2: CurveSection(mean=(0.3, 1.0, 0.3), p99=(0.6, 1.0, 0.6))},
        partitions=(PartitionSection(transfer=(0.01, 0.0), stages=stages),),
        cold_start_s=ColdStarts(cpu=cold_s, stage=cold_s),
    )
    modes = (Mode.PARTITIONED,) if partitioned else (Mode.CPU,)
    provisioners = {"wrn50-1": Provisioner(profile, read_sheet("own-machines"), modes, cold_starts=False)}
    return make_plan(plan_groups(apps, provisioners), provisioners)


def test_a_pipeline_of_processes_computes_what_one_does_and_says_when_one_of_them_is_gone() -> None:
    async def both() -> tuple[Any, Any]:
        chain = wide_resnet50(1)
        one = await Instance.start(chain, [StageSize(0, 18, 1, 1.0)])
        pipeline = await Instance.start(chain, [StageSize(0, 9, 2, 1.0), StageSize(9, 18, 1, 1.0)])
        try:
            found = await one.run(IMAGE), await pipeline.run(IMAGE)
            os.kill(pipeline.functions[-1].pid, signal.SIGKILL)
            with pytest.raises(FunctionDied, match="is gone"):
                await pipeline.run(IMAGE)
            return found
        finally:
            await asyncio.gather(one.close(), pipeline.close())

    one, pipeline = asyncio.run(both())
    assert np.abs(one.output - pipeline.output).max() <= 1e-4 * np.abs(one.output).max()
    assert [len(stage.workers_s) for stage in pipeline.stages] == [2, 1]
    assert pipeline.seconds >= sum(max(stage.workers_s) for stage in pipeline.stages)


def test_a_limit_is_a_quota_where_allowed_and_cores_elsewhere(tmp_path: Path) -> None:
    limit = CpuLimit(0.5)
    try:
        assert limit.kind in ("cgroup", "affinity")
        limit.add(os.getpid() if limit.kind == "affinity" else _child_pid())
    finally:
        limit.close()
    assert CpuLimit(0.5, root=tmp_path).kind == "affinity"
    assert threads_of(1.5) == min(2, len(os.sched_getaffinity(0)))


def _child_pid() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, os.WNOHANG)
    return pid


@pytest.mark.parametrize(("partitioned", "requests"), [(False, 2), (True, 1)])
def test_a_killed_function_loses_no_request(partitioned: bool, requests: int) -> None:
    async def run() -> PlanRuntime:
        plan = make_plan_of(App("a", "wrn50-1", 0.5, 2.0), partitioned=partitioned)
        runtime = PlanRuntime.on_this_machine(plan, window_s=1e6)
        await runtime.start()
        try:
            if not partitioned:
                await check_endpoint(runtime)
            instances = runtime.groups()[0].instances  # any of them may get the requests
            for instance in instances:  # a fast machine would have answered before it is killed
                os.kill(instance.functions[0].pid, signal.SIGSTOP)
            asked = [asyncio.create_task(runtime.submit("a", IMAGE)) for _ in range(requests)]
            await asyncio.sleep(0.1)
            for instance in instances:
                instance.kill()
            answers = await asyncio.gather(*asked)
        finally:
            await runtime.close()
        assert len({answer.output.tobytes() for answer in answers}) == 1
        return runtime

    account = asyncio.run(run()).accounts()[0]
    assert account.requests == requests + (not partitioned)
    assert account.deaths >= 1
    assert account.cost > 0


async def check_endpoint(runtime: PlanRuntime) -> None:
    """Images are answered, anything else is refused."""
    transport = httpx.ASGITransport(make_app(runtime))
    async with httpx.AsyncClient(transport=transport, base_url="http://plan") as client:
        answered = await client.post("/apps/a", content=IMAGE.tobytes())
        assert np.frombuffer(answered.content, np.float32).shape == (1000,)
        assert answered.headers["x-batch"] == "1"
        short = await client.post("/apps/a", content=b"123")
        assert (short.status_code, short.json()["error"]["type"]) == (400, "invalid_request_error")
        unknown = await client.post("/apps/z", content=IMAGE.tobytes())
        assert unknown.status_code == 404
        assert "there are a" in unknown.json()["error"]["message"]
        assert (await client.get("/status")).json()["answered"] == 1


def test_a_rate_that_leaves_the_plan_is_planned_again_and_nothing_is_lost() -> None:
    async def run() -> tuple[PlanRuntime, dict[str, Any]]:
        plan = make_plan_of(App("a", "wrn50-1", 0.2, 3.0), App("b", "wrn50-1", 0.01, 4.0))
        runtime = PlanRuntime.on_this_machine(plan, window_s=1.0, threshold=0.5)
        await runtime.start()
        driven = Driven()
        try:
            asked = []
            for _ in range(9):
                driven.sent += 1
                asked.append(asyncio.create_task(runtime.submit("a", IMAGE)))
                await asyncio.sleep(0.12)
            async with asyncio.timeout(60):
                while not runtime.changes:
                    await asyncio.sleep(0.1)
            asked.append(asyncio.create_task(runtime.submit("b", IMAGE)))
            driven.sent += 1
            driven.answered = len(await asyncio.gather(*asked))
        finally:
            await runtime.close()
        return runtime, report(runtime, driven)

    runtime, found = asyncio.run(run())
    assert found["lost"] == 0
    assert sum(account.requests for account in runtime.accounts()) == 10
    assert len(runtime.accounts()) >= 2, "the new plan has groups of its own"
    assert runtime.changes[0].error == ""
    assert runtime.changes[0].rates["a"] > 1.0
    assert runtime.changes[0].rates["b"] == pytest.approx(0.01)


def test_a_plan_that_this_machine_cannot_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"keeps .* vCPUs busy in the mean, and this machine has"):
        check_runnable(make_plan_of(App("a", "wrn50-1", 1000.0, 20.0)))
