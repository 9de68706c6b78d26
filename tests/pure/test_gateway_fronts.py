"""A second gateway over the first one's workers, both in this process, on fake workers: what it passes on, who dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fake_worker import CRASH
from gateway_builders import eventually, make_card, running_service
from test_gateway_service import collect, make_job, text_of

from dovetail.cli.front import Leader
from dovetail.cli.serve import LocalWeights
from dovetail.config import ModelConfig
from dovetail.errors import EngineFailed, ModelNotFound
from dovetail.gateway.metrics import Metrics
from dovetail.gateway.models import FixedCatalogue, Models
from dovetail.gateway.service import Limits, Service
from dovetail.gateway.workers.client import WorkerClient
from dovetail.gateway.workers.fronts import LEADER, Fronts
from dovetail.store.paths import StorePaths


@asynccontextmanager
async def leading(folder: Path) -> AsyncIterator[Service]:
    async with running_service(folder) as service:
        fronts = Fronts(folder / "fronts", service)
        fronts.start()
        try:
            yield service
        finally:
            await fronts.close()


@asynccontextmanager
async def front_of(folder: Path) -> AsyncIterator[Service]:
    leader, link = Leader(folder), WorkerClient(())
    leader.attach(link, (), None, LocalWeights(StorePaths(folder), None))
    cards = [make_card(folder), make_card(folder, "broken"), make_card(folder, "ours")]
    models = Models(FixedCatalogue(cards), {card.name: ModelConfig(source="") for card in cards})
    service = Service(link, models, Metrics(), Limits(resume_timeout_s=30.0))
    link.start()
    leader.start(service.cluster.is_drained)
    try:
        yield service
    finally:
        await link.close()
        await leader.close()


def on_both(folder: Path, test: Callable[[Service, Service], Awaitable[None]]) -> None:
    async def run() -> None:
        async with leading(folder) as leader, front_of(folder) as front:
            await eventually(front.link.is_up)
            await asyncio.wait_for(test(leader, front), 60)
            await eventually(lambda: not len(leader.cluster.remote.requests))
            for service in (leader, front):
                await eventually(lambda works=service.cluster.controller.works: not works)

    asyncio.run(run())


def test_a_front_says_what_its_leader_would(tmp_path: Path) -> None:
    async def test(leader: Service, front: Service) -> None:
        for options in ({"max_tokens": 14}, {"n": 3, "logprobs": 1}, {"stop": "lo"}):
            ours, theirs = await collect(front, "héllo ", **options), await collect(leader, "héllo ", **options)
            assert {index: text_of(deltas) for index, deltas in ours.items()} == {
                index: text_of(deltas) for index, deltas in theirs.items()
            }
        assert front.cluster.models["fake"].loaded is not None, "it knows that the model is ready"

    on_both(tmp_path, test)


def test_what_the_leader_cannot_load_or_does_not_offer_is_an_error_at_the_front(tmp_path: Path) -> None:
    async def test(leader: Service, front: Service) -> None:
        with pytest.raises(EngineFailed, match="truncated"):
            await collect(front, "hi", model="broken")
        with pytest.raises((EngineFailed, ModelNotFound), match="ours"):
            await collect(front, "hi", model="ours")
        assert text_of((await collect(front, "hi", max_tokens=2))[0])

    on_both(tmp_path, test)


def test_a_client_that_leaves_a_front_leaves_the_worker_too(tmp_path: Path) -> None:
    async def test(leader: Service, front: Service) -> None:
        async with aclosing(front.run(await make_job(front, "abc", max_tokens=500))) as deltas:
            await anext(deltas)
            assert len(leader.cluster.remote.requests)
        await eventually(lambda: not len(leader.cluster.remote.requests))

    on_both(tmp_path, test)


def test_a_worker_that_dies_costs_a_front_no_text_and_one_that_a_request_kills_is_an_error(tmp_path: Path) -> None:
    async def test(leader: Service, front: Service) -> None:
        job = await make_job(front, "abc", max_tokens=300)
        text, killed = "", False
        async with aclosing(front.run(job)) as deltas:
            async for delta in deltas:
                text += delta.text
                if len(text) > 20 and not killed:
                    killed = True
                    pid = leader.link.supervisors["cpu-0"].pid
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
        assert text == "abc" * 100
        leader.limits = replace(leader.limits, max_resumptions=0)
        with pytest.raises(EngineFailed, match="worker"):
            await collect(front, [65, CRASH], max_tokens=4)

    on_both(tmp_path, test)


def test_a_front_that_dies_leaves_nothing_behind(tmp_path: Path) -> None:
    async def run() -> None:
        async with leading(tmp_path) as leader:
            async with front_of(tmp_path) as front:
                await eventually(front.link.is_up)
                stream = front.run(await make_job(front, "abc", max_tokens=500))
                await anext(stream)
                assert len(leader.cluster.remote.requests)
            await eventually(lambda: not len(leader.cluster.remote.requests))
            assert not list((tmp_path / "fronts").iterdir())
            await stream.aclose()

    asyncio.run(run())


def test_streams_of_a_front_go_on_with_the_next_leader(tmp_path: Path) -> None:
    async def run() -> None:
        async with front_of(tmp_path) as front:
            async with leading(tmp_path):
                await eventually(front.link.is_up)
                stream = front.run(await make_job(front, "abc", max_tokens=400))
                text = (await anext(stream)).text
            held = asyncio.create_task(collect(front, "xyz", max_tokens=6))  # while nobody leads
            await asyncio.sleep(0.1)
            async with leading(tmp_path):
                async for delta in stream:
                    text += delta.text
                assert text_of((await held)[0]) == "xyzxyz"
            assert text == ("abc" * 134)[:400]
            assert front.link.nodes[LEADER].hello is None or front.link.supervisors[LEADER].starts == 2

    asyncio.run(asyncio.wait_for(run(), 60))
