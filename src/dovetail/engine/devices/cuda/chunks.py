"""Iterations with chunks of prompts as CUDA graphs: of one prompt, of several, and of several beside rows that decode.

    tokens    | singles: a token each | chunk | chunk | … | padding |      as many as the bucket has
    logits    | singles | last tokens of chunks that sample | unused |     as many as the kind has room for

Everything that changes from one iteration to the next (which tokens are whose, how long contexts are and where they are
split) is read from memory, so that one graph serves all mixtures of its size. Single tokens are read by the kernel for
decoding, with the block tables that decoding has, chunks by the one for prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dovetail.engine.devices.cuda.adapter_image import most_tiles
from dovetail.engine.devices.cuda.adapters import NO_ADAPTERS, AdaptedShape, AdapterInputs, BoundAdapters
from dovetail.engine.devices.cuda.attention import DecodeScratch, PrefillPlan, decode, prefill, prefill_tile
from dovetail.engine.devices.cuda.block_table import BlockTable
from dovetail.engine.devices.cuda.graphs import CapturedSteps, Outputs, step_name
from dovetail.engine.devices.cuda.greedy import greedy
from dovetail.engine.devices.cuda.model import CudaModel
from dovetail.engine.devices.cuda.splits import AttentionShape, SplitPlans
from dovetail.engine.devices.cuda.transfer import copy_words
from dovetail.sched.turn import TurnRow

_LENGTHS = (
    *(16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 576, 640, 768, 896),
    *(1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096),
)
_MOST_CHUNKS, _MOST_BESIDE = 32, 8  # in one graph; beside rows that decode
_SINGLES = (32, 128)  # rows that decode, up to which graphs are shared; and all others
_EAGER_WORK = 6e12  # tokens · parameters: a longer chunk keeps the device busy while its kernels are launched
_EAGER_BESIDE = 9e12  # the same beside rows that decode, for which the host has more to prepare
_NO_ROW = -1  # as a length

AnyArray = Any  # a tensor, or an array of the host's


class ChunkKind(NamedTuple):
    """What iterations have in common that share a graph."""

    bucket: int  # tokens
    places: int  # chunks: each has a block table and a head
    singles: int  # rows that decode, at most; 0 = none

    @property
    def outputs(self) -> int:
        return self.singles + self.places


class ChunkRows(NamedTuple):
    """An iteration's rows in the order of their tokens."""

    singles: list[TurnRow]
    chunks: list[TurnRow]  # those that sample first

    @property
    def sampled(self) -> list[TurnRow]:
        return self.singles + [row for row in self.chunks if row.samples]


def chunk_rows(rows: Sequence[TurnRow]) -> ChunkRows:
    """A prompt alone is a chunk, however short."""
    singles = [row for row in rows if row.count == 1 and row.samples] if len(rows) > 1 else []
    others = [row for row in rows if row.count > 1 or not row.samples] if singles else rows
    return ChunkRows(singles, [*(row for row in others if row.samples), *(row for row in others if not row.samples)])


class ChunkSteps:
    """With whatever context; short ones, or those of a small model. One prompt has graphs of its own: several need a
    table of blocks each, and a head for every one."""

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
        self._model, self._cache, self._scratch, self._steps = model, cache, scratch, steps
        self._table, self._width, self._num_processors = table, table.on_device.shape[1], num_processors
        parameters = model.spec.num_parameters()
        self._buckets = [size for size in _LENGTHS if size <= _EAGER_WORK / parameters]
        self._buckets_beside = [size for size in _LENGTHS if size <= _EAGER_BESIDE / parameters]
        self._singles = [0, *(size for size in _SINGLES if size < max_batch), max_batch]
        self._tile = prefill_tile(model.spec.head_dim)
        longest = self._buckets_beside[-1] if self._buckets_beside else 0
        largest = ChunkKind(longest, _MOST_CHUNKS, max_batch)  # and more than any has
        self._host = torch.zeros(sum(self._sizes(largest)), dtype=torch.int32, pin_memory=True)
        self._inputs = torch.zeros_like(self._host, device=cache.device)
        self._best = torch.zeros(largest.outputs, dtype=torch.int32, pin_memory=True)
        self._adapters = AdapterInputs(adapters, longest, most_tiles(longest, largest.outputs), cache.device)

    def kind_of(self, rows: ChunkRows) -> ChunkKind | None:
        """None: no graph has room for them."""
        total = len(rows.singles) + sum(row.count for row in rows.chunks)
        buckets = self._buckets_beside if rows.singles else self._buckets
        bucket = next((size for size in buckets if size >= total), None)
        singles = next((size for size in self._singles if size >= len(rows.singles)), None)
        most = _MOST_BESIDE if singles else _MOST_CHUNKS
        if bucket is None or singles is None or len(rows.chunks) > most:
            return None
        return ChunkKind(bucket, 1 if len(rows.chunks) == 1 and not singles else most, singles)

    def run(self, rows: ChunkRows, kind: ChunkKind) -> Outputs:
        """Logits of what samples, in that order; valid until the next run."""
        self._fill(rows, kind)
        self._table.fill(rows.singles)
        shape = self._adapters.fill([*rows.singles, *rows.chunks], kind.bucket, most_tiles(kind.bucket, kind.outputs))
        logits, chosen = self._steps.run(_name(kind, shape), lambda: self._step(kind, shape, self._model))
        best = copy_words(chosen, self._best[: kind.outputs])
        count = len(rows.sampled)
        return logits[:count], best[:count]

    @property
    def kinds(self) -> list[ChunkKind]:
        """Of prompts alone, of one first."""
        return [ChunkKind(bucket, places, 0) for places in (1, _MOST_CHUNKS) for bucket in self._buckets]

    @property
    def mixed_kinds(self) -> list[ChunkKind]:
        """As many as have all kernels of those beside rows that decode between them."""
        longest = self._buckets_beside[-1:]
        return [ChunkKind(bucket, _MOST_BESIDE, most) for bucket in longest for most in self._singles[1:]]

    @property
    def kinds_beside(self) -> list[ChunkKind]:
        """All of those."""
        return [
            ChunkKind(bucket, _MOST_BESIDE, most)
            for fewer, most in pairwise(self._singles)
            for bucket in self._buckets_beside
            if bucket > fewer + 1
        ]

    def run_empty(self, kind: ChunkKind, model: CudaModel) -> None:
        """Kernel by kernel, for no prompt."""
        self._fill(_NO_ROWS, kind)
        self._step(kind, NO_ADAPTERS, model)
        torch.cuda.current_stream().synchronize()

    def capture(self, kind: ChunkKind) -> bool:
        """As `DecodeSteps.capture`."""
        name = _name(kind, NO_ADAPTERS)

        def run() -> Outputs:
            self._fill(_NO_ROWS, kind)
            outputs = self._steps.run(name, lambda: self._step(kind, NO_ADAPTERS, self._model))
            torch.cuda.current_stream().synchronize()
            return outputs

        return self._steps.capture(name, run)

    def _sizes(self, kind: ChunkKind) -> list[int]:
        """Tokens, positions, slots; lengths of singles; sampled rows; of each chunk its first row, context and length,
        and its block table; rows and beginnings of tiles."""
        tiles = -(-kind.bucket // self._tile) + kind.places - 1
        chunks = [3 * kind.places, kind.places * self._width]
        return [*[kind.bucket] * 3, kind.singles, kind.outputs, *chunks, tiles, tiles]

    def _parts(self, inputs: AnyArray, kind: ChunkKind) -> list[AnyArray]:
        sizes = self._sizes(kind)
        return [inputs[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def _step(self, kind: ChunkKind, adapters: AdaptedShape, model: CudaModel) -> Outputs:
        used = sum(self._sizes(kind))
        copy_words(self._host[:used], self._inputs[:used])
        parts = self._parts(self._inputs, kind)
        tokens, positions, slots, lengths, sampled, sequences, table, tile_rows, tile_first = parts
        prompts = PrefillPlan(tile_rows, tile_first, sequences.view(kind.places, 3), table.view(kind.places, -1))
        plans = SplitPlans(lengths, model.attention_shapes() if kind.singles else (), self._num_processors)
        decoding = self._table.on_device

        def attend(qkv: Tensor, cache: Tensor, shape: AttentionShape) -> Tensor:
            size = shape.num_heads * shape.head_dim
            out = torch.empty(kind.bucket, size, dtype=qkv.dtype, device=qkv.device)
            if kind.singles:
                decode(qkv[:, :size], cache, decoding, lengths, shape, plans.of(shape), self._scratch, out)
            prefill(qkv[:, :size], cache, prompts, shape, out)
            return out

        adapted = self._adapters.rows(kind.bucket, adapters)
        logits = model.forward(tokens, positions, slots, self._cache, sampled, attend, adapted)
        return logits, greedy(logits)

    def _fill(self, rows: ChunkRows, kind: ChunkKind) -> None:
        page, tile, alone = self._cache.shape[3], 0, len(rows.singles)
        host = self._host.numpy()
        host[: sum(self._sizes(kind))] = 0
        parts = self._parts(host, kind)
        tokens, all_positions, slots, lengths, sampled, sequences, table, tile_rows, tile_first = parts
        slots[:] = -1
        lengths[:] = _NO_ROW
        tile_first[:] = kind.bucket  # beyond every chunk: nothing to do
        starts = np.array([row.start for row in rows.singles], np.int32)
        tokens[:alone] = [row.tokens[row.start] for row in rows.singles]
        all_positions[:alone] = starts
        blocks = np.array([row.blocks[row.start // page] for row in rows.singles], np.int32)
        slots[:alone] = blocks * page + starts % page
        lengths[:alone] = starts + 1
        sampled[:alone] = np.arange(alone)
        first = alone
        for at, row in enumerate(rows.chunks):
            last = first + row.count
            positions = np.arange(row.start, row.end, dtype=np.int32)
            blocks = np.asarray(row.blocks, np.int32)
            tokens[first:last] = row.tokens[row.start : row.end]
            all_positions[first:last] = positions
            slots[first:last] = blocks[positions // page] * page + positions % page
            sequences[3 * at : 3 * at + 3] = first, row.start, row.count
            sampled[alone + at] = last - 1
            table[at * self._width : at * self._width + len(blocks)] = blocks
            num_tiles = -(-row.count // self._tile)
            tile_rows[tile : tile + num_tiles] = at
            tile_first[tile : tile + num_tiles] = np.arange(num_tiles, dtype=np.int32) * self._tile
            first, tile = last, tile + num_tiles


_NO_ROWS = ChunkRows([], [])


def _name(kind: ChunkKind, adapters: AdaptedShape) -> str:
    beside = f" beside {kind.singles}" if kind.singles else ""
    return step_name(f"chunk {kind.bucket} {kind.places}{beside}", adapters)
