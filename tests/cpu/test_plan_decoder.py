"""Decoder-only models in stages of their own processes: the text of one process, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.plan.decoder_pipeline import DecoderPipeline
from dovetail.sched.blocks import BlockPool
from dovetail.sched.fcfs import FcfsScheduler
from dovetail.sched.scheduler import SchedulerConfig
from dovetail.store import Catalogue, open_checkpoint
from dovetail.types import ModelCard, Request, SamplingParams

KV_TOKENS = 256


def requests() -> list[Request]:
    prompts = ([5, 9, 2, 7, 11, 3], [4] * 20, [8, 1])
    return [
        Request(str(n), "m", tuple(prompt), SamplingParams(max_tokens=12, temperature=0.7 * (n == 1), seed=n))
        for n, prompt in enumerate(prompts)
    ]


def text_of_one_process(card: ModelCard) -> dict[str, list[int]]:
    checkpoint = open_checkpoint(card.path)
    kv_bytes = KV_TOKENS * checkpoint.spec.kv_bytes_per_token("f32")
    executor = CpuExecutor(checkpoint, ExecutorConfig(kv_bytes=kv_bytes, dtype="f32", level="torch"))
    executor.resize(executor.max_blocks)
    config = SchedulerConfig(context_length=checkpoint.spec.context_length)
    scheduler = FcfsScheduler(config, BlockPool(executor.max_blocks, 16))
    asked = requests()
    tokens: dict[str, list[int]] = {request.id: [] for request in asked}
    for request in asked:
        scheduler.add(request)
    while (turn := scheduler.next_turn()) is not None:
        for event in scheduler.complete(executor.run(turn)).events:
            assert event.token is not None
            tokens[event.request_id].append(event.token)
    executor.close()
    return tokens


async def text_of_stages(card: ModelCard, stages: int) -> dict[str, list[int]]:
    pipeline = await DecoderPipeline.start(Path(card.path), card.spec, stages, vcpus=1.0, kv_tokens=KV_TOKENS)
    try:
        return await pipeline.generate(requests())
    finally:
        await pipeline.close()


@pytest.mark.parametrize(("family", "stages"), [("gemma3", 3), ("opt", 2)])
def test_stages_in_processes_say_what_one_process_says(
    family: str, stages: int, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    card = Catalogue(tmp_path).pull(str(tiny_folder(family)), dtype="f32")
    assert asyncio.run(text_of_stages(card, stages)) == text_of_one_process(card)
