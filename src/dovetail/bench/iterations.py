"""Milliseconds of one iteration by level of kernels, and how near that is to what the machine can do at best.

Contenders take turns within seconds and are judged by medians: a host that steals time steals from all of them. Models
are random, of the shapes that people serve; speed does not depend on the values.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch

from dovetail.engine.dtypes import TORCH_DTYPES
from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.modelspec import ModelSpec
from dovetail.native.dispatch import load_kernels
from dovetail.node.ports import HostTensor
from dovetail.sched.turn import Turn, TurnRow
from dovetail.types import SamplingParams

SHAPES = {
    "135M": ModelSpec("llama", 49152, 576, 30, 9, 3, 64, 1536, 2048, tied_embeddings=True),
    "0.5B": ModelSpec("qwen2", 151936, 896, 24, 14, 2, 64, 4864, 2048, tied_embeddings=True, qkv_bias=True),
    "1B": ModelSpec("llama", 128256, 2048, 16, 32, 8, 64, 8192, 2048, tied_embeddings=True),
}
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
    roofline: float  # share of the measured read bandwidth (tpot) or of the fastest product (ttft)


class Roofline(msgspec.Struct, frozen=True):
    read_bytes_per_s: float
    flops_per_s: float  # of a large product in the compute type, by torch or by us, whichever is faster


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


def measure_roofline(dtype: str, level: str) -> Roofline:
    kernels, threads = load_kernels(), torch.get_num_threads()
    data = torch.ones(1 << 26)  # 256 MiB
    read_s = _best(lambda: kernels.read_all(threads, data) if kernels is not None else data.sum())
    x, weight = torch.randn(1024, 2048), torch.randn(4096, 2048).to(TORCH_DTYPES[dtype])
    out, narrow = torch.empty(1024, 4096), x.to(TORCH_DTYPES[dtype])
    product_s = _best(lambda: torch.nn.functional.linear(narrow, weight))
    if kernels is not None and level != "torch":
        product_s = min(product_s, _best(lambda: kernels.linear(level, threads, dtype == "bf16", x, weight, out)))
    return Roofline(data.nbytes / read_s, 2 * out.numel() * x.shape[1] / product_s)


def _best(call: Callable[[], object], rounds: int = 5) -> float:
    return min(_timed(call) for _ in range(rounds))


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


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
                seconds[level].append(_timed(partial(executor.run, turn)))
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
    if metric == "tpot":
        return spec.weight_bytes(stored) / seconds / best.read_bytes_per_s
    body = spec.num_parameters() - spec.vocab_size * spec.hidden_size
    return 2 * body * size / seconds / best.flops_per_s


def _cell(model: str, level: str, stored: str, metric: str, size: int, taken: list[float], share: float) -> Cell:
    median, spread = statistics.median(taken), max(taken) - min(taken)
    return Cell(model, level, stored, metric, size, median * 1e3, spread * 1e3, share)
