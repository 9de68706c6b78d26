"""Iterations as CUDA graphs: an iteration of a small model is hundreds of kernels of microseconds, and launching them
one by one takes longer than computing them. Decode has a graph for each bucket of batch sizes, chunks of prompts have
one for each bucket of lengths.

A bucket's first iteration runs kernel by kernel (which compiles what is not compiled yet), its second one is captured.
Graphs read their inputs from buffers of fixed capacity and the cache through addresses that never change, so they
survive every resize. Rows beyond the batch have slot -1 and length 0: they write nothing and attend to nothing.
Iterations in which rows have adapters have graphs of their own, for any adapters whose ranks there is room for.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.engine.devices.cuda.adapter_image import most_tiles
from dovetail.engine.devices.cuda.adapters import NO_ADAPTERS, AdaptedShape, AdapterInputs, BoundAdapters
from dovetail.engine.devices.cuda.attention import (
    AttentionShape,
    DecodeScratch,
    PrefillPlan,
    decode,
    num_splits,
    prefill,
    prefill_tile,
)
from dovetail.engine.devices.cuda.greedy import fill_in, greedy
from dovetail.engine.devices.cuda.model import CudaModel
from dovetail.engine.devices.cuda.sampling import DeviceSampler
from dovetail.engine.devices.cuda.transfer import copy_words
from dovetail.sched.turn import TurnRow

_BATCHES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_LENGTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)
_MOST_CHUNKS = 32  # in one graph
_MANY_CHANGES = 24  # rows of the block table: beyond, one copy of all is cheaper
_EAGER_WORK = 6e12  # tokens · parameters: a longer chunk keeps the device busy while its kernels are launched

AnyArray = Any  # a tensor, or an array of the host's
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
        table_width: int,
        num_processors: int,
    ) -> None:
        """cache: [blocks, layers, 2, page, kv_heads, d], the whole range of addresses."""
        device = cache.device
        self._model, self._cache, self._scratch, self._steps = model, cache, scratch, steps
        self._num_processors = num_processors
        self.buckets = batch_sizes(max_batch)
        self._host = torch.zeros(4, max_batch, dtype=torch.int32, pin_memory=True)
        self._inputs = torch.zeros(4, max_batch, dtype=torch.int32, device=device)
        self._adapters = AdapterInputs(adapters, max_batch, max_batch, device)
        self._taken = torch.cuda.Event()  # the device has its inputs: what they were copied from may be written
        self._chosen = torch.zeros(max_batch, dtype=torch.int32, device=device)  # greedy tokens of the last run
        self._best = torch.zeros(2, max_batch, dtype=torch.int32, pin_memory=True)  # of the last two, for the host
        self._turn = 0  # which of them
        self._ran = ""  # the name of the last run's step
        self._host_table = torch.zeros(max_batch, table_width, dtype=torch.int32, pin_memory=True)
        self._table = torch.zeros(max_batch, table_width, dtype=torch.int32, device=device)
        self._known: list[tuple[list[int] | None, int]] = [(None, 0)] * max_batch  # lists of blocks, as last copied

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

    def forget_tables(self) -> None:
        """The lists of blocks are no longer anybody's."""
        self._known = [(None, 0)] * self.max_batch

    def _to_host(self, chosen: Tensor) -> Tensor:
        self._turn ^= 1
        return copy_words(chosen, self._best[self._turn, : len(chosen)])

    def _run(self, rows: Sequence[TurnRow], previous: Sequence[int], *, greedily: bool) -> Outputs:
        bucket = next(size for size in self.buckets if size >= len(rows))
        self._taken.synchronize()
        self._fill(rows, bucket, previous)
        copy_words(self._host, self._inputs)
        self._fill_table(rows)
        shape = self._adapters.fill(rows, bucket, bucket)
        self._taken.record()
        self._ran = _name(f"decode {bucket}{'' if greedily else ' to logits'}", shape)
        return self._steps.run(self._ran, lambda: self._step(bucket, shape, greedily, self._model))

    def run_empty(self, bucket: int, model: CudaModel) -> None:
        """Kernel by kernel, with rows that write nothing and attend to nothing."""
        self._fill_empty(bucket)
        self._step(bucket, NO_ADAPTERS, True, model)

    def capture(self, bucket: int, *, greedily: bool) -> bool:
        """The graph of a bucket, ahead of its first use, between two iterations; False if it is there."""
        name = _name(f"decode {bucket}{'' if greedily else ' to logits'}", NO_ADAPTERS)

        def run() -> Outputs:
            self._fill_empty(bucket)
            return self._steps.run(name, lambda: self._step(bucket, NO_ADAPTERS, greedily, self._model))

        return self._steps.capture(name, run)

    def _fill_empty(self, bucket: int) -> None:
        self._taken.synchronize()
        self._fill((), bucket, ())
        copy_words(self._host, self._inputs)
        self._taken.record()

    def _step(self, bucket: int, adapters: AdaptedShape, greedily: bool, model: CudaModel) -> Outputs:
        fill_in(self._inputs[0, :bucket], self._chosen)
        tokens, positions, slots, lengths = self._inputs[:, :bucket]

        def attend(qkv: Tensor, cache: Tensor, shape: AttentionShape) -> Tensor:
            size = shape.num_heads * shape.head_dim
            out = torch.empty(bucket, size, dtype=qkv.dtype, device=qkv.device)
            splits = num_splits(bucket, shape, self._num_processors)
            decode(qkv[:, :size], cache, self._table, lengths, shape, splits, self._scratch, out)
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

    def _fill_table(self, rows: Sequence[TurnRow]) -> None:
        """Lists of blocks grow at their end or are replaced, never changed within: what is known need not be copied."""
        changed = []
        table = self._host_table.numpy()
        for at, row in enumerate(rows):
            blocks, (known, length) = row.blocks, self._known[at]
            if known is not blocks or length != len(blocks):
                begin = length if known is blocks and length < len(blocks) else 0
                table[at, begin : len(blocks)] = blocks[begin:]
                self._known[at] = (blocks, len(blocks))
                changed.append((at, begin, len(blocks)))
        if len(changed) > _MANY_CHANGES:
            copy_words(self._host_table[: len(rows)], self._table[: len(rows)])
            return
        for at, begin, end in changed:
            copy_words(self._host_table[at, begin:end], self._table[at, begin:end])


class ChunkSteps:
    """Iterations of chunks of one prompt or a few, with whatever context they have; short ones, or those of a small
    model. One prompt has graphs of its own: several need a table of blocks each, and a head for every one."""

    def __init__(
        self, model: CudaModel, cache: Tensor, steps: CapturedSteps, adapters: BoundAdapters, table_width: int
    ) -> None:
        self._model, self._cache, self._steps, self._width = model, cache, steps, table_width
        most = _EAGER_WORK / model.spec.num_parameters()
        self._buckets = [size for size in _LENGTHS if size <= most]
        self._tile = prefill_tile(model.spec.head_dim)
        longest = self._buckets[-1] if self._buckets else 0
        self._host = torch.zeros(3 * longest + self._fixed(longest, _MOST_CHUNKS), dtype=torch.int32, pin_memory=True)
        self._inputs = torch.zeros_like(self._host, device=cache.device)
        self._best = torch.zeros(_MOST_CHUNKS, dtype=torch.int32, pin_memory=True)
        self._adapters = AdapterInputs(adapters, longest, most_tiles(longest, _MOST_CHUNKS), cache.device)

    def can_run(self, rows: Sequence[TurnRow]) -> bool:
        if not self._buckets or len(rows) > _MOST_CHUNKS:
            return False
        return sum(row.count for row in rows) <= self._buckets[-1]

    def run(self, rows: Sequence[TurnRow]) -> Outputs:
        """Logits of each row's last token; valid until the next run."""
        total = sum(row.count for row in rows)
        bucket = next(size for size in self._buckets if size >= total)
        places = 1 if len(rows) == 1 else _MOST_CHUNKS
        self._fill(rows, bucket, places)
        shape = self._adapters.fill(rows, bucket, most_tiles(bucket, places))
        name = _name(f"chunk {bucket} {places}", shape)
        logits, chosen = self._steps.run(name, lambda: self._step(bucket, places, shape, self._model))
        best = copy_words(chosen, self._best[:places])
        return logits[: len(rows)], best[: len(rows)]

    @property
    def kinds(self) -> list[tuple[int, int]]:
        """Lengths and places, of one prompt first."""
        return [(bucket, places) for places in (1, _MOST_CHUNKS) for bucket in self._buckets]

    def run_empty(self, bucket: int, places: int, model: CudaModel) -> None:
        """Kernel by kernel, for no prompt."""
        self._fill((), bucket, places)
        self._step(bucket, places, NO_ADAPTERS, model)
        torch.cuda.current_stream().synchronize()

    def capture(self, bucket: int, places: int) -> bool:
        """As `DecodeSteps.capture`."""
        name = _name(f"chunk {bucket} {places}", NO_ADAPTERS)

        def run() -> Outputs:
            self._fill((), bucket, places)
            outputs = self._steps.run(name, lambda: self._step(bucket, places, NO_ADAPTERS, self._model))
            torch.cuda.current_stream().synchronize()
            return outputs

        return self._steps.capture(name, run)

    def _num_tiles(self, bucket: int, places: int) -> int:
        return -(-bucket // self._tile) + places - 1

    def _fixed(self, bucket: int, places: int) -> int:
        """Of each place (first row, context, length), its sampled row and its block table; of each tile two numbers."""
        return places * (4 + self._width) + 2 * self._num_tiles(bucket, places)

    def _parts(self, inputs: AnyArray, bucket: int, places: int) -> list[AnyArray]:
        """Tokens, positions, slots; sequences, sampled rows, tables; rows and beginnings of tiles."""
        tiles = self._num_tiles(bucket, places)
        sizes = [bucket] * 3 + [3 * places, places, places * self._width, tiles, tiles]
        ends = list(accumulate(sizes))
        return [inputs[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def _step(self, bucket: int, places: int, adapters: AdaptedShape, model: CudaModel) -> Outputs:
        used = 3 * bucket + self._fixed(bucket, places)
        copy_words(self._host[:used], self._inputs[:used])
        parts = self._parts(self._inputs, bucket, places)
        tokens, positions, slots, sequences, sampled, table, tile_rows, tile_first = parts
        plan = PrefillPlan(tile_rows, tile_first, sequences.view(places, 3), table.view(places, -1))

        def attend(qkv: Tensor, cache: Tensor, shape: AttentionShape) -> Tensor:
            size = shape.num_heads * shape.head_dim
            out = torch.empty(bucket, size, dtype=qkv.dtype, device=qkv.device)
            prefill(qkv[:, :size], cache, plan, shape, out)
            return out

        adapted = self._adapters.rows(bucket, adapters)
        logits = model.forward(tokens, positions, slots, self._cache, sampled, attend, adapted)
        return logits, greedy(logits)

    def _fill(self, rows: Sequence[TurnRow], bucket: int, places: int) -> None:
        page, first, tile = self._cache.shape[3], 0, 0
        host = self._host.numpy()
        host[: 3 * bucket + self._fixed(bucket, places)] = 0
        parts = self._parts(host, bucket, places)
        tokens, all_positions, slots, sequences, sampled, table, tile_rows, tile_first = parts
        slots[:] = -1
        tile_first[:] = bucket  # beyond every chunk: nothing to do
        for at, row in enumerate(rows):
            last = first + row.count
            positions = np.arange(row.start, row.end, dtype=np.int32)
            blocks = np.asarray(row.blocks, np.int32)
            tokens[first:last] = row.tokens[row.start : row.end]
            all_positions[first:last] = positions
            slots[first:last] = blocks[positions // page] * page + positions % page
            sequences[3 * at : 3 * at + 3] = first, row.start, row.count
            sampled[at] = last - 1
            table[at * self._width : at * self._width + len(blocks)] = blocks
            num_tiles = -(-row.count // self._tile)
            tile_rows[tile : tile + num_tiles] = at
            tile_first[tile : tile + num_tiles] = np.arange(num_tiles, dtype=np.int32) * self._tile
            first, tile = last, tile + num_tiles


def _name(step: str, adapters: AdaptedShape) -> str:
    return f"{step}, ranks {adapters.ranks} in {adapters.tiles} tiles" if adapters.ranks else step
