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
import torch

from dovetail.bench.roofline import measure_roofline, timed
from dovetail.bench.roofline_figures import Roofline, least_seconds
from dovetail.bench.shapes import SHAPES
from dovetail.engine.dtypes import TORCH_DTYPES
from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.modelspec import ModelSpec
from dovetail.node.ports import HostTensor
from dovetail.sched.turn import Turn, TurnRow
from dovetail.types import SamplingParams

PROMPTS = (128, 1024)
BATCHES = (1, 8, 32)
CONTEXT = 128  # tokens before a decoded one
_GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


class Cell(msgspec.Struct, frozen=True):
    model: str
    level: str
    stored: str  # type of the weights
    metric: str  # ttft or tpot
    size: int  # tokens of the prompt, or sequences in the batch
    median_ms: float
    spread_ms: float  # slowest minus fastest round
    roofline: float  # the time that reading or multiplying takes at best (`bench.roofline`), as a share of this one


class RandomCheckpoint:
    """A model in memory with random weights."""

    in_place = True

    def __init__(self, spec: ModelSpec, dtype: str) -> None:
        self.spec = spec
        self._dtype = dtype
        self._tensors = {name: self._draw(shape) for name, shape in spec.tensors()}

    def _draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A million numbers, again and again: drawing each would take longer than all the rest."""
        count = math.prod(shape)
        some = (torch.randn(min(count, 1 << 20)) * shape[-1] ** -0.5).to(TORCH_DTYPES[self._dtype])
        return some.repeat(-(-count // len(some)))[:count].reshape(shape).clone()

    def pieces(self, name: str) -> Sequence[HostTensor]:
        tensor = self._tensors[name]
        data = memoryview(tensor.view(torch.uint8).numpy().reshape(-1))
        return [HostTensor(self._dtype, tuple(tensor.shape), data)]

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
    checkpoint = RandomCheckpoint(spec, stored)
    kv_bytes = max(BATCHES) * (CONTEXT + 64) * spec.kv_bytes_per_token(dtype) + (64 << 20)
    executors = {level: _executor(checkpoint, dtype, level, kv_bytes) for level in levels}
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
            share = _share(spec, stored, metric, size, statistics.median(taken[1:]), best)
            cells.append(_cell(model, level, stored, metric, size, taken[1:], share))
    for executor in executors.values():
        executor.close()
    return cells


def _executor(checkpoint: RandomCheckpoint, dtype: str, level: str, kv_bytes: int) -> CpuExecutor:
    executor = CpuExecutor(checkpoint, ExecutorConfig(kv_bytes=kv_bytes, dtype=dtype, level=level))
    executor.resize(executor.max_blocks)
    return executor


def _share(spec: ModelSpec, stored: str, metric: str, size: int, seconds: float, best: Roofline) -> float:
    least_s = least_seconds(spec, spec.weight_bytes(stored), size, 1 if metric == "ttft" else size, best)
    assert least_s is not None, "16 bits and more always have a bound"
    return least_s / seconds


def _cell(model: str, level: str, stored: str, metric: str, size: int, taken: list[float], share: float) -> Cell:
    median, spread = statistics.median(taken), max(taken) - min(taken)
    return Cell(model, level, stored, metric, size, median * 1e3, spread * 1e3, share)
