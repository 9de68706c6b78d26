"""Drives one executor through the real scheduler, the way a worker does, without process or socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.sched.blocks import BlockPool
from dovetail.sched.fcfs import FcfsScheduler
from dovetail.sched.scheduler import SchedulerConfig
from dovetail.sched.turn import Turn, TurnRow
from dovetail.store import open_checkpoint
from dovetail.types import Request, SamplingParams, TokenEvent

GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


def make_executor(folder: Path, **options: Any) -> CpuExecutor:
    options = {"kv_bytes": 1 << 24, "block_size": 4, "dtype": "f32"} | options
    executor = CpuExecutor(open_checkpoint(folder), ExecutorConfig(**options))
    executor.resize(executor.max_blocks)
    return executor


def make_request(prompt: list[int], id: str = "r", **sampling: Any) -> Request:
    num_choices = sampling.pop("num_choices", 1)
    options = {"max_tokens": 16, "seed": 0, "temperature": 0.0} | sampling
    return Request(id=id, model="m", prompt=tuple(prompt), sampling=SamplingParams(**options), num_choices=num_choices)


def make_row(sequence: int, tokens: list[int], start: int, count: int, blocks: list[int], **options: Any) -> TurnRow:
    options = {"num_prompt": len(tokens), "sampling": GREEDY} | options
    return TurnRow(sequence, tokens, start, count, blocks, samples=start + count == len(tokens), **options)


class Engine:
    """FcfsScheduler and executor of one model."""

    def __init__(self, executor: CpuExecutor, num_blocks: int | None = None, **limits: Any) -> None:
        self.executor = executor
        self.pool = BlockPool(num_blocks or executor.max_blocks, executor._cache.block_size)
        limits = {"context_length": executor.spec.context_length, "max_batch": 16, "max_turn_tokens": 64} | limits
        self.scheduler = FcfsScheduler(SchedulerConfig(**limits), self.pool)

    def step(self) -> list[TokenEvent]:
        turn = self.scheduler.next_turn()
        completed = self.scheduler.take_failed() if turn is None else self.scheduler.complete(self.executor.run(turn))
        for sequence in completed.ended:
            self.executor.forget(sequence)
        self.pool.check()
        return list(completed.events)

    def run(self, *requests: Request) -> dict[tuple[str, int], list[int]]:
        """Tokens by (request, choice), all requests submitted at once."""
        for request in requests:
            self.scheduler.add(request)
        tokens: dict[tuple[str, int], list[int]] = {}
        for event in self.drain():
            assert event.error is None, event.error
            tokens.setdefault((event.request_id, event.choice), []).append(event.token)
        return tokens

    def drain(self) -> list[TokenEvent]:
        events = []
        for _ in range(100_000):
            if not self.scheduler.has_work:
                return events
            events.extend(self.step())
        raise AssertionError("the scheduler never finished")


def logits_of(executor: CpuExecutor, tokens: list[int], chunks: list[int], block_base: int = 0) -> list[torch.Tensor]:
    """Last logits of each chunk of one sequence, computed chunk after chunk."""
    size = executor._cache.block_size
    blocks = [block_base + i for i in range(-(-len(tokens) // size))]
    results, start = [], 0
    for count in chunks:
        row = make_row(0, tokens[: start + count], start, count, blocks)
        results.append(executor.logits(Turn((row,)))[0])
        start += count
    return results
