"""What a model's first requests would wait for, done before they come: its kernels are compiled, or found on disk where
an earlier process has compiled them.
"""

from __future__ import annotations

from dovetail.engine.devices.cuda.executor import CudaExecutor
from dovetail.engine.devices.cuda.graphs import batch_sizes
from dovetail.sched.turn import Turn, TurnRow
from dovetail.types import SamplingParams


def run_each_kind(executor: CudaExecutor, longest: int, block_size: int, max_batch: int) -> None:
    """One iteration of every kind that has kernels of its own; the executor has memory for as many rows as it takes."""
    blocks = list(range(-(-longest // block_size)))
    tokens = [0] * longest
    greedy, drawn = (SamplingParams(max_tokens=1, seed=0, temperature=value) for value in (0.0, 1.0))

    def row(index: int, start: int, count: int, sampling: SamplingParams = greedy) -> TurnRow:
        return TurnRow(index, tokens[: start + count], start, count, blocks, longest, sampling, samples=True)

    executor.run(Turn((row(0, 0, longest),)))
    executor.run(Turn((row(0, longest - 1, 1), row(1, 0, longest))))
    for batch in batch_sizes(max_batch):
        executor.run(Turn(tuple(row(index, longest - 1, 1) for index in range(batch))))
    executor.run(Turn((row(batch, longest - 1, 1, drawn),)))
