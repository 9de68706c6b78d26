"""Iterations as CUDA graphs: an iteration of a small model is hundreds of kernels of microseconds, and launching them
one by one takes longer than computing them. Decode has two graphs for each bucket of batch sizes: one in which contexts
are split over the device, as planned in its first kernels, and one in which none is. Those of prompts: `chunks`.

A bucket's first iteration runs kernel by kernel (which compiles what is not compiled yet), its second one is captured.
Graphs read their inputs from buffers of fixed capacity and the cache through addresses that never change, so they
survive every resize. Rows beyond the batch have slot -1 and length 0: they write nothing and attend to nothing.
Iterations in which rows have adapters have graphs of their own, for any adapters whose ranks there is room for.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.engine.devices.cuda.adapters import NO_ADAPTERS, AdaptedShape, AdapterInputs, BoundAdapters
from dovetail.engine.devices.cuda.attention import DecodeScratch, decode
from dovetail.engine.devices.cuda.block_table import BlockTable
from dovetail.engine.devices.cuda.greedy import fill_in, greedy
from dovetail.engine.devices.cuda.model import CudaModel
from dovetail.engine.devices.cuda.sampling import DeviceSampler
from dovetail.engine.devices.cuda.splits import AttentionShape, SplitPlans, is_worth_it
from dovetail.engine.devices.cuda.transfer import copy_words
from dovetail.sched.turn import TurnRow

_BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)

Outputs = tuple[Tensor, Tensor]  # logits [rows, vocab] and greedy tokens [rows], on the device


def batch_sizes(max_batch: int) -> list[int]:
    """Of decodes that have kernels and graphs of their own."""
    return [size for size in _BATCHES if size < max_batch] + [max_batch]


class GraphMemory:
    """What the graphs of a device's models compute in. It is the same memory for all, since only one runs at a time:
    what a graph leaves is overwritten by the next one, of whatever model. A model that goes leaves its part to others.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool: Any = None  # torch's handle
        self.last_user: object = None  # whose graph ran last
        self._device = device
        self._keeps: torch.cuda.CUDAGraph | None = None  # a graph of nothing, for which torch keeps the pool

    def open(self) -> Any:
        if self._keeps is None:
            graph, one = torch.cuda.CUDAGraph(), torch.zeros(1, device=self._device).add_(1)
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                one.add_(1)
            finally:
                graph.capture_end()
            self._keeps, self.pool = graph, graph.pool()
        return self.pool


class CapturedSteps:
    """Graphs of one executor, by name."""

    def __init__(self, capturable: Callable[[], bool], memory: GraphMemory) -> None:
        self._memory = memory
        self._capturable = capturable
        self._graphs: dict[str, tuple[torch.cuda.CUDAGraph, Outputs]] = {}
        self._seen: set[str] = set()
        self._is_known = True  # no step since `take_known` was the first of its name, or was captured

    def __len__(self) -> int:
        return len(self._graphs)

    def is_last_user(self) -> bool:
        """What its last graph left is there still."""
        return self._memory.last_user is self

    def run(self, name: str, step: Callable[[], Outputs]) -> Outputs:
        self._memory.last_user = self
        is_capturable = self._capturable()
        if name not in self._graphs or not is_capturable:
            if self.note(name) or not is_capturable:
                return step()
            self._graphs[name] = self._capture(step)
            self._is_known = False
        graph, outputs = self._graphs[name]
        graph.replay()
        return outputs

    def capture(self, name: str, run: Callable[[], Outputs]) -> bool:
        """A graph that is not there yet, by running its step without rows; False if it is, or cannot be."""
        if name in self._graphs or not self._capturable():
            return False
        while name not in self._graphs:  # the first time runs kernel by kernel
            run()
        self._is_known = True
        return True

    def has(self, name: str) -> bool:
        """It is a graph, whose outputs are where they were the last time."""
        return name in self._graphs

    def note(self, name: str) -> bool:
        """A step of that name runs kernel by kernel. Returns whether it is the first, which may compile them."""
        is_first = name not in self._seen
        if is_first:
            self._seen.add(name)
            self._is_known = False
        return is_first

    def take_known(self) -> bool:
        """Whether every step since the last call had run before, and none was captured."""
        known, self._is_known = self._is_known, True
        return known

    def close(self) -> None:
        self._graphs.clear()

    def _capture(self, step: Callable[[], Outputs]) -> tuple[torch.cuda.CUDAGraph, Outputs]:
        graph = torch.cuda.CUDAGraph()
        gc.disable()  # freeing another model's memory in the midst of it would spoil the capture
        try:
            pool = self._memory.open()
            # Other threads load models meanwhile: only this one's calls belong to the graph.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                outputs = step()
            finally:
                graph.capture_end()
        finally:
            gc.enable()
        return graph, outputs


class DecodeSteps:
    """Iterations in which every row decodes one token."""

    def __init__(
        self,
        model: CudaModel,
        cache: Tensor,
        scratch: DecodeScratch,
        steps: CapturedSteps,
        adapters: BoundAdapters,
        max_batch: int,
        table: BlockTable,
        num_processors: int,
    ) -> None:
        """cache: [blocks, layers, 2, page, kv_heads, d], the whole range of addresses."""
        device = cache.device
        self._model, self._cache, self._scratch, self._steps = model, cache, scratch, steps
        self._table, self._num_processors = table, num_processors
        self._widest = max(model.attention_shapes(), key=lambda shape: shape.window or 1 << 62)
        self.buckets = batch_sizes(max_batch)
        self._host = torch.zeros(4, max_batch, dtype=torch.int32, pin_memory=True)
        self._inputs = torch.zeros(4, max_batch, dtype=torch.int32, device=device)
        self._adapters = AdapterInputs(adapters, max_batch, max_batch, device)
        self._taken = torch.cuda.Event()  # the device has its inputs: what they were copied from may be written
        self._chosen = torch.zeros(max_batch, dtype=torch.int32, device=device)  # greedy tokens of the last run
        self._best = torch.zeros(2, max_batch, dtype=torch.int32, pin_memory=True)  # of the last two, for the host
        self._turn = 0  # which of them
        self._ran = ""  # the name of the last run's step

    @property
    def device(self) -> torch.device:
        return self._inputs.device

    @property
    def max_batch(self) -> int:
        return self.buckets[-1]

    def run(self, rows: Sequence[TurnRow], previous: Sequence[int] = ()) -> Outputs:
        """Logits, valid until the next run, and greedy tokens, on the host when the stream is there and valid until the
        next but one. `previous`: the place of each row's sequence in the last run, whose token it goes on with, where
        the host does not know that token yet."""
        logits, chosen = self._run(rows, previous, greedily=True)
        return logits[: len(rows)], self._to_host(chosen[: len(rows)])

    def logits(self, rows: Sequence[TurnRow], previous: Sequence[int] = ()) -> Tensor:
        """[bucket, vocab], valid until the next run; `sample` or nothing comes next."""
        return self._run(rows, previous, greedily=False)[0]

    def sample(self, rows: Sequence[TurnRow], logits: Tensor, sampler: DeviceSampler) -> tuple[Tensor, dict[int, str]]:
        """Tokens for the rows of the last run, as `run` returns them, and what is wrong with a row's own request."""
        bucket, name = len(logits), self._ran

        def step(choose: Callable[[], None]) -> Outputs:
            choose()
            return logits, self._chosen

        def by_graph(choose: Callable[[], None]) -> None:
            if self._steps.has(name):  # else the logits will be elsewhere the next time
                self._steps.run(f"choose after {name}", lambda: step(choose))
            else:
                choose()

        failures = sampler.choose(rows, logits, self._chosen[:bucket], self._inputs[0], by_graph)
        return self._to_host(self._chosen[: len(rows)]), failures

    @property
    def chosen(self) -> Tensor:
        """Of the last run, on the device."""
        return self._chosen

    def _to_host(self, chosen: Tensor) -> Tensor:
        self._turn ^= 1
        return copy_words(chosen, self._best[self._turn, : len(chosen)])

    def _run(self, rows: Sequence[TurnRow], previous: Sequence[int], *, greedily: bool) -> Outputs:
        bucket = next(size for size in self.buckets if size >= len(rows))
        self._taken.synchronize()
        self._fill(rows, bucket, previous)
        copy_words(self._host, self._inputs)
        self._table.fill(rows)
        shape = self._adapters.fill(rows, bucket, bucket)
        self._taken.record()
        splits = is_worth_it(self._host.numpy()[3, : len(rows)], self._widest, self._num_processors)
        self._ran = _decode_name(bucket, shape, splits=splits, greedily=greedily)
        return self._steps.run(self._ran, lambda: self._step(bucket, shape, splits, greedily, self._model))

    def run_empty(self, bucket: int, model: CudaModel) -> None:
        """Kernel by kernel, with rows that write nothing and attend to nothing."""
        for splits in (False, True):
            self._fill_empty(bucket)
            self._step(bucket, NO_ADAPTERS, splits, True, model)

    def capture(self, bucket: int, *, splits: bool, greedily: bool) -> bool:
        """The graph of a bucket, ahead of its first use, between two iterations; False if it is there."""
        name = _decode_name(bucket, NO_ADAPTERS, splits=splits, greedily=greedily)

        def run() -> Outputs:
            self._fill_empty(bucket)
            return self._steps.run(name, lambda: self._step(bucket, NO_ADAPTERS, splits, greedily, self._model))

        return self._steps.capture(name, run)

    def _fill_empty(self, bucket: int) -> None:
        self._taken.synchronize()
        self._fill((), bucket, ())
        copy_words(self._host, self._inputs)
        self._taken.record()

    def _step(self, bucket: int, adapters: AdaptedShape, splits: bool, greedily: bool, model: CudaModel) -> Outputs:
        tokens, positions, slots, lengths = self._inputs[:, :bucket]
        plans = SplitPlans(lengths, model.attention_shapes() if splits else (), self._num_processors)
        table = self._table.on_device
        fill_in(tokens, self._chosen)

        def attend(qkv: Tensor, cache: Tensor, shape: AttentionShape) -> Tensor:
            size = shape.num_heads * shape.head_dim
            out = torch.empty(bucket, size, dtype=qkv.dtype, device=qkv.device)
            plan = plans.of(shape) if splits else None
            decode(qkv[:, :size], cache, table, lengths, shape, plan, self._scratch, out)
            return out

        adapted = self._adapters.rows(bucket, adapters)
        logits = model.forward(tokens, positions, slots, self._cache, None, attend, adapted)
        return logits, greedy(logits, out=self._chosen[:bucket]) if greedily else self._chosen[:bucket]

    def _fill(self, rows: Sequence[TurnRow], bucket: int, previous: Sequence[int]) -> None:
        page = self._cache.shape[3]
        host = self._host.numpy()
        count = len(rows)
        positions = np.array([row.start for row in rows], np.int32)
        if previous:
            host[0, :count] = -1 - np.array(previous, np.int32)
        else:
            host[0, :count] = [row.tokens[row.start] for row in rows]
        host[1, :count] = positions
        host[2, :count] = np.array([row.blocks[row.start // page] for row in rows], np.int32) * page + positions % page
        host[3, :count] = positions + 1
        host[0:2, count:bucket] = 0
        host[2, count:bucket] = -1
        host[3, count:bucket] = 0


def _decode_name(bucket: int, adapters: AdaptedShape, *, splits: bool, greedily: bool) -> str:
    return step_name(f"decode {bucket}{' split' * splits}{'' if greedily else ' to logits'}", adapters)


def step_name(step: str, adapters: AdaptedShape) -> str:
    return f"{step}, ranks {adapters.ranks} in {adapters.tiles} tiles" if adapters.ranks else step
