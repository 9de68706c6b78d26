"""A model that the nodes were told of: a request waits for those that answer, not for one that is busy."""

from __future__ import annotations

import asyncio

from dovetail.gateway.hosted import OTHERS_S, HostedModel
from dovetail.messages import Load
from dovetail.modelspec import ModelSpec
from dovetail.types import ModelCard

CARD = ModelCard("m", "", ModelSpec("llama", 100, 8, 1, 1, 1, 8, 8, 256), "")


def told(*nodes: str) -> HostedModel:
    hosted = HostedModel(Load(CARD))
    for node in nodes:
        hosted.told(node)
    return hosted


def test_a_node_in_a_long_iteration_does_not_delay_the_first_request_of_a_model() -> None:
    async def run() -> None:
        hosted = told("quick", "busy")
        hosted.offered("quick")
        await asyncio.wait_for(hosted.wait_until_known(), OTHERS_S + 5.0)

    asyncio.run(run())


def test_a_model_that_no_node_has_answered_for_is_waited_for() -> None:
    async def run() -> None:
        hosted = told("busy", "gone")
        hosted.not_there("gone")
        waiting = asyncio.ensure_future(hosted.wait_until_known())
        await asyncio.sleep(OTHERS_S + 0.1)
        assert not waiting.done()
        hosted.offered("busy")
        await asyncio.wait_for(waiting, 5.0)

    asyncio.run(run())


def test_all_nodes_have_answered_and_nobody_waits_any_longer() -> None:
    async def run() -> None:
        hosted = told("a", "b")
        hosted.offered("a")
        hosted.offered("b")
        assert hosted.known.is_set()

    asyncio.run(run())
