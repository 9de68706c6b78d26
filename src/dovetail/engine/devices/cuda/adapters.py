"""LoRA adapters in a GPU's memory, and which of them the rows of an iteration are computed with.

Each adapter has memory of its own, mapped when it is placed and unmapped when it is closed, which the node's ledger has
counted to the byte. Executors know addresses only; graphs read those from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dovetail.engine.devices.cuda.adapter_image import (
    MATRICES,
    TILE_WORDS,
    AdapterImage,
    adapted_matrix,
    fill_words,
    group_rows,
    rank_capacity,
    tile_room,
)
from dovetail.engine.devices.cuda.arena import CudaArena
from dovetail.engine.devices.cuda.lora import MANY_TILES, AdaptedRows
from dovetail.engine.devices.cuda.transfer import copy_words, to_device
from dovetail.modelspec import ModelSpec
from dovetail.sched.turn import RowOutcome, TurnRow


class Streams(Protocol):
    device: torch.device
    stream: torch.cuda.Stream  # of iterations
    adapter_stream: torch.cuda.Stream


class AdaptedShape(NamedTuple):
    """What graphs with adapters differ by."""

    ranks: int  # that there is room for; 0 = no row has an adapter
    tiles: int


NO_ADAPTERS = AdaptedShape(0, 0)


class CudaAdapter:
    """Owns its device memory from place() to close(), and until then the image on the host."""

    def __init__(self, image: AdapterImage, spec: ModelSpec, streams: Streams) -> None:
        self.dtype, self.capacity = image.dtype, rank_capacity(image.rank)
        self._image: AdapterImage | None = image
        self._spec, self._streams = spec, streams
        self._arena = CudaArena(len(image.data), streams.device)  # addresses, no memory yet
        self._bytes: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """What will be mapped, or is."""
        return self._arena.reserved_bytes

    @property
    def address(self) -> int:
        assert self._bytes is not None, "it is not placed"
        return self._bytes.data_ptr()

    def place(self) -> None:
        assert self._image is not None
        size, stream = len(self._image.data), self._streams.adapter_stream
        with torch.inference_mode(), torch.cuda.stream(stream):
            self._arena.resize(size)
            self._bytes = self._arena.tensor(torch.uint8, (size,))
            self._bytes.copy_(self._image.relocated(self.address))
            self._compile()
            stream.synchronize()
        self._image = None

    def close(self) -> None:
        self._image = self._bytes = None
        read = torch.cuda.Event()  # by iterations that are not collected yet
        read.record(self._streams.stream)
        self._arena.in_use = (read,)
        self._arena.close()

    def _compile(self) -> None:
        """One row through every kind of matrix: kernels that are not compiled yet are so in this thread, and not while
        everybody waits for an iteration."""
        device, shapes = self._streams.device, dict(self._spec.tensors())
        tiles = torch.zeros(MANY_TILES, TILE_WORDS, dtype=torch.int64, device=device)
        one = grouped_rows([self.address], [1], self.capacity, device)
        tiles[:1] = one.tiles
        for name in MATRICES:
            rows, columns = shapes.get(f"layers.0.{name}.weight", (0, 0))
            for num_tiles in (1, MANY_TILES) if rows else ():
                x, out = (torch.zeros(1, size, dtype=self.dtype, device=device) for size in (columns, rows))
                adapted = AdaptedRows(tiles[:num_tiles], one.order, self.capacity)
                matrix = adapted_matrix(self._spec, 0, name, rows)
                adapted.expand(adapted.shrink(x, matrix), out, matrix)


class BoundAdapters:
    """Those that rows of one executor may name."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._adapters: dict[str, CudaAdapter] = {}
        self._broken: dict[str, str] = {}  # those that rows cannot be computed with, and why
        self.capacity = 0  # ranks, of the largest that there ever was: graphs are captured for it

    def add(self, key: str, adapter: CudaAdapter | None, problem: str) -> None:
        if adapter is None:
            self._broken[key] = problem
            return
        assert adapter.dtype == self._dtype, "it was packed for this model"
        self._adapters[key] = adapter
        self.capacity = max(self.capacity, adapter.capacity)

    def remove(self, key: str) -> None:
        self._broken.pop(key, None)
        self._adapters.pop(key, None)

    def clear(self) -> None:
        self._broken.clear()
        self._adapters.clear()

    def take_failed(self, rows: Sequence[TurnRow]) -> tuple[tuple[TurnRow, ...], list[RowOutcome]]:
        """The rows that can be computed, and what is said of the others."""
        if not self._broken:
            return tuple(rows), []
        failed = [row for row in rows if row.adapter in self._broken]
        outcomes = [RowOutcome(row.sequence, 0, error=self._broken[row.adapter]) for row in failed if row.samples]
        return tuple(row for row in rows if row.adapter not in self._broken), outcomes

    def addresses(self, rows: Sequence[TurnRow]) -> list[int] | None:
        """Of each row's adapter, 0 = none; None if no row has one."""
        if not any(row.adapter for row in rows):
            return None
        return [self._adapters[row.adapter].address if row.adapter else 0 for row in rows]

    def of(self, rows: Sequence[TurnRow]) -> AdaptedRows | None:
        """For an iteration that runs kernel by kernel."""
        addresses = self.addresses(rows)
        if addresses is None:
            return None
        return grouped_rows(addresses, [row.count for row in rows], self.capacity, self._device)


class AdapterInputs:
    """The same for iterations that are graphs: in memory whose address stays."""

    def __init__(self, bound: BoundAdapters, max_rows: int, max_tiles: int, device: torch.device) -> None:
        self._bound = bound
        self._host = torch.zeros(TILE_WORDS * max_tiles + max_rows + 1, dtype=torch.int64, pin_memory=True)
        self._words = torch.zeros_like(self._host, device=device)

    def fill(self, rows: Sequence[TurnRow], tokens: int, most_tiles: int) -> AdaptedShape:
        """For a graph of so many tokens. Until the copy is done, what it is made from must stay as it is."""
        addresses = self._bound.addresses(rows)
        if addresses is None:
            return NO_ADAPTERS
        tiles, order = group_rows(addresses, [row.count for row in rows])
        num_tiles = tile_room(len(tiles), tokens, most_tiles)
        fill_words(self._host.numpy(), tiles, order, num_tiles)
        used = TILE_WORDS * num_tiles + len(order)
        copy_words(self._host[:used], self._words[:used])
        return AdaptedShape(self._bound.capacity, num_tiles)

    def rows(self, num_rows: int, shape: AdaptedShape) -> AdaptedRows | None:
        """Where they are."""
        if not shape.ranks:
            return None
        first = TILE_WORDS * shape.tiles
        rows = self._words[first : first + num_rows]
        return AdaptedRows(self._words[:first].view(-1, TILE_WORDS), rows, shape.ranks)


def grouped_rows(addresses: Sequence[int], counts: Sequence[int], capacity: int, device: torch.device) -> AdaptedRows:
    tiles, order = group_rows(addresses, counts)
    words = to_device(torch.from_numpy(np.concatenate([tiles.reshape(-1), order])).pin_memory(), device)
    return AdaptedRows(words[: tiles.size].view(-1, TILE_WORDS), words[tiles.size :], capacity)
