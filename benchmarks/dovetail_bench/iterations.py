"""Milliseconds of one iteration by level of kernels, and how near that is to what the machine can do at best.

Contenders take turns within seconds and are judged by medians: a host that steals time steals from all of them. Models
are random, of the shapes that people serve; speed does not depend on the values.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import torch

from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.layouts import packer
from dovetail.modelspec import ModelSpec
from dovetail.node.ports import HostTensor
from dovetail.sched.turn import Turn, TurnRow
from dovetail.store.format.arrange import arrange
from dovetail.types import SamplingParams
from dovetail_bench.roofline import measure_roofline, timed
from dovetail_bench.roofline_figures import least_seconds
from dovetail_bench.shapes import SHAPES
from dovetail_bench.steps import Steps

PROMPTS = (128, 1024)
BATCHES = (1, 8, 32)
CONTEXT = 128  # tokens before a decoded one
PROMPT = 16  # the same where the share of native code is measured, step by step
_GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


class Cell(msgspec.Struct, frozen=True):
    model: str
    level: str
    stored: str  # type or layout of the weights
    metric: str  # ttft or tpot
    size: int  # tokens of the prompt, or sequences in the batch
    median_ms: float
    spread_ms: float  # slowest minus fastest round
    roofline: float | None  # the shortest possible time (`bench.roofline`) as a share of this one
    native: float | None = None  # share of a step (scheduler and executor) inside the native call; None = torch's level


class RandomCheckpoint:
    """A model in memory with random weights, each tensor in the form in which a store keeps it."""

    in_place = True

    def __init__(self, spec: ModelSpec, dtype: str, layout: str = "plain") -> None:
        self.spec = spec
        kept = [tensor.shares[0] for tensor in arrange(spec, dtype, layout).tensors]
        self._tensors = {entry.name: self._draw(entry.dtype, entry.shape, entry.layout) for entry in kept}

    def _draw(self, dtype: str, shape: tuple[int, ...], layout: str) -> HostTensor:
        """A million numbers, again and again: drawing each would take longer than all the rest."""
        count = math.prod(shape)
        some = torch.randn(min(count, 1 << 20)) * shape[-1] ** -0.5
        values = some.repeat(-(-count // len(some)))[:count].reshape(shape)
        return HostTensor(dtype, shape, _packed(layout, dtype, values).data, layout)

    def pieces(self, name: str) -> Sequence[HostTensor]:
        return [self._tensors[name]]

    def close(self) -> None:
        self._tensors.clear()


def prefill(tokens: int) -> Turn:
    return Turn((_row(0, 0, tokens, tokens, max_tokens=max(PROMPTS)),))


def decode(batch: int) -> Turn:
    return Turn(tuple(_row(i, CONTEXT, 1, CONTEXT + 1, max_tokens=CONTEXT + 16) for i in range(batch)))


def _row(index: int, start: int, count: int, length: int, max_tokens: int, block_size: int = 16) -> TurnRow:
    each = -(-max_tokens // block_size)
    blocks = list(range(index * each, (index + 1) * each))
    tokens = [(7 * i + index) % 1000 for i in range(length)]
    return TurnRow(index, tokens, start, count, blocks, length, _GREEDY, samples=True)


def compare(
    model: str, stored: str, dtype: str, levels: Sequence[str], rounds: int, tick: Callable[[], None] = lambda: None
) -> list[Cell]:
    """Every level on every cell, in turns."""
    spec = SHAPES[model]
    layout = stored if stored in ("int8", "int4") else "plain"
    checkpoint = RandomCheckpoint(spec, stored if layout == "plain" else dtype, layout)
    kv_bytes = max(BATCHES) * (CONTEXT + 64) * spec.kv_bytes_per_token(dtype) + (64 << 20)
    executors = {level: _executor(checkpoint, dtype, level, kv_bytes) for level in levels}
    steps = {level: Steps(executor) for level, executor in executors.items()}
    best = measure_roofline(dtype, levels[-1])
    turns = [("ttft", size, prefill(size)) for size in PROMPTS] + [("tpot", size, decode(size)) for size in BATCHES]
    cells = []
    for metric, size, turn in turns:
        seconds: dict[str, list[float]] = {level: [] for level in levels}
        for _ in range(rounds + 1):  # the first one warms up
            for level, executor in executors.items():
                seconds[level].append(timed(partial(executor.run, turn)))
            tick()
        for level, taken in seconds.items():
            bits = 8 if layout != "plain" and level != "torch" else 16
            least_s = least_seconds(
                spec, executors[level].weight_bytes, size, 1 if metric == "ttft" else size, best, bits
            )
            native = native_share(steps[level], metric, size, rounds) if level != "torch" else None
            cells.append(_cell(model, level, stored, metric, size, taken[1:], least_s, native))
    for executor in executors.values():
        executor.close()
    return cells


def native_share(steps: Steps, metric: str, size: int, rounds: int) -> float | None:
    """Of the time of a step. The median of as many prompts; of decoding, the mean of as many steps."""
    if metric == "tpot":
        return steps.further_tokens([_prompt(PROMPT) for _ in range(size)], rounds).native_share
    shares = [steps.first_token(_prompt(size)).native_share for _ in range(rounds)]
    return statistics.median(share for share in shares if share is not None)


def _prompt(count: int) -> list[int]:
    """Shares no prefix with another."""
    tokens: list[int] = torch.randint(1000, (count,)).tolist()
    return tokens


def _executor(checkpoint: RandomCheckpoint, dtype: str, level: str, kv_bytes: int) -> CpuExecutor:
    executor = CpuExecutor(checkpoint, ExecutorConfig(kv_bytes=kv_bytes, dtype=dtype, level=level))
    executor.resize(executor.max_blocks)
    return executor


def _cell(
    model: str,
    level: str,
    stored: str,
    metric: str,
    size: int,
    taken: list[float],
    least_s: float | None,
    native: float | None,
) -> Cell:
    median, spread = statistics.median(taken), max(taken) - min(taken)
    share = None if least_s is None else least_s / median
    return Cell(model, level, stored, metric, size, median * 1e3, spread * 1e3, share, native)


def _packed(layout: str, dtype: str, values: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    making = packer(layout, dtype, tuple(values.shape))
    return np.concatenate([*making.rows(values.numpy().reshape(-1, values.shape[-1])), *making.finish()])
