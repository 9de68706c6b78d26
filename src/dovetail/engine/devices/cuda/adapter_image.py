"""A LoRA adapter as the GPU's kernels read it, put together on the host: one range of bytes, in which a header of
addresses comes before the matrices. Which rows of an iteration go together is decided here too.

    | rank, scaling | A, B of q k v · out · gate up · down of layer 0 | of layer 1 | … | matrices, each at 256 bytes |
                      └─ 0 where the adapter has nothing for these rows

A kernel finds everything through the address of the header, so graphs know no adapter: they read the addresses of an
iteration from memory. Nothing here needs a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.engine.adapters import AdapterMatrices, Part
from dovetail.errors import UnsupportedModel
from dovetail.modelspec import ModelSpec

TILE_WORDS = 4  # address, first place, how many rows, and one more so that what follows is aligned
TILE = 16  # rows of one adapter that are multiplied together: as many as the matrix units have
ALIGNMENT = 256
_SPARE_TILES = 8
_HEAD = 2  # words before the addresses
_PIECES = 7  # of a layer: q, k, v, out, gate, up, down; a matrix `up` alone has the place of the gate
_FIRST_PIECE = {"qkv": 0, "out": 3, "gate_up": 4, "up": 4, "down": 6}
MATRICES = tuple(_FIRST_PIECE)

Words = NDArray[np.int64]


class AdaptedMatrix(NamedTuple):
    """One matrix of a layer: the pieces of its rows that adapters have matrices of their own for."""

    entry: int  # of its first piece in the header
    sizes: tuple[int, ...]  # rows of each piece


class _Rows(NamedTuple):
    first: int
    last: int


def adapted_matrix(spec: ModelSpec, layer: int, name: str, rows: int) -> AdaptedMatrix:
    """`name`: one of MATRICES."""
    sizes = {"qkv": (spec.q_size, spec.kv_size, spec.kv_size), "gate_up": (rows // 2, rows // 2)}.get(name, (rows,))
    assert sum(sizes) == rows
    return AdaptedMatrix(layer * _PIECES + _FIRST_PIECE[name], sizes)


def rank_capacity(rank: int) -> int:
    """What kernels have room for: a power of two, so that a few graphs serve all ranks."""
    return max(16, 1 << (rank - 1).bit_length())


class AdapterImage:
    """`data` holds offsets where the device wants addresses, until `relocated` has made them such."""

    def __init__(self, adapter: AdapterMatrices, spec: ModelSpec, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.rank = max(len(part.first) for part in adapter.parts)
        self._offsets: Words = np.zeros((spec.num_layers * _PIECES, 2), np.int64)
        self._scaling = adapter.scaling
        self._end = 8 * (_HEAD + self._offsets.size)
        shapes = dict(spec.tensors())
        pieces: list[tuple[int, Tensor]] = []
        for part in adapter.parts:
            self._take(part, spec, shapes[part.tensor], pieces)
        self.data = torch.zeros(self._end, dtype=torch.uint8)
        for offset, values in pieces:
            self._view(offset, values).copy_(values)

    def relocated(self, address: int) -> Tensor:
        """The bytes as they are to lie at this address."""
        header = self.data[: 8 * (_HEAD + self._offsets.size)].numpy().view(np.int64)
        header[0] = self.rank
        header[1] = np.float32(self._scaling).view(np.int32)
        header[_HEAD:] = np.where(self._offsets, self._offsets + address, 0).reshape(-1)
        return self.data

    def _take(self, part: Part, spec: ModelSpec, shape: tuple[int, ...], pieces: list[tuple[int, Tensor]]) -> None:
        """A matrix that transformers keeps for several pieces at once has one A for all of them."""
        _, layer, name, _ = part.tensor.split(".")
        matrix = adapted_matrix(spec, int(layer), name, shape[0])
        first = self._place(part.first, pieces)
        for at, rows in enumerate(_pieces_within(matrix, part)):
            if rows is not None:
                self._offsets[matrix.entry + at] = first, self._place(part.second[:, rows.first : rows.last], pieces)

    def _place(self, values: Tensor, pieces: list[tuple[int, Tensor]]) -> int:
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._end = offset + values.numel() * self.dtype.itemsize
        pieces.append((offset, values))
        return offset

    def _view(self, offset: int, values: Tensor) -> Tensor:
        size = values.numel() * self.dtype.itemsize
        return self.data[offset : offset + size].view(self.dtype).view(values.shape)


def _pieces_within(matrix: AdaptedMatrix, part: Part) -> list[_Rows | None]:
    """Of each piece, which rows of the part it has; None = none."""
    count = part.second.shape[1]
    found: list[_Rows | None] = []
    for size, end in zip(matrix.sizes, accumulate(matrix.sizes), strict=True):
        first, last = end - size - part.row, end - part.row
        if first >= count or last <= 0:
            found.append(None)
        elif first < 0 or last > count:
            raise UnsupportedModel(f"the adapter has some rows only of what {part.tensor} keeps together")
        else:
            found.append(_Rows(first, last))
    return found


def group_rows(addresses: Sequence[int], counts: Sequence[int]) -> tuple[Words, Words]:
    """Tiles of rows of one adapter: its address, the tile's first place in the order, how many rows; and the order.
    `addresses` has 0 for rows without an adapter, which are in no tile; `counts` are tokens of each row."""
    owners = np.repeat(np.array(addresses, np.int64), counts)
    order = np.argsort(owners, kind="stable")
    order = order[np.count_nonzero(owners == 0) :]
    adapters, starts = np.unique(owners[order], return_index=True)
    ends = np.append(starts, len(order))[1:]
    tiles = [
        (adapter, first, min(TILE, end - first), 0)
        for adapter, start, end in zip(adapters, starts, ends, strict=True)
        for first in range(start, end, TILE)
    ]
    return np.array(tiles, np.int64).reshape(-1, TILE_WORDS), order.astype(np.int64)


def most_tiles(tokens: int, rows: int) -> int:
    """That so many tokens of so many sequences are ever cut into: each sequence leaves one tile unfilled at most."""
    return min(tokens, tokens // TILE + rows)


def tile_room(needed: int, tokens: int, most: int) -> int:
    """Tiles that a graph has programs for: all that there may ever be, or, where that is many, far fewer, as long as
    these are enough: adapters are few, mostly, and programs that have nothing to do are not for free."""
    few = tokens // TILE + _SPARE_TILES
    return few if needed <= few <= most // 2 else most


def fill_words(target: Any, tiles: Words, order: Words, num_tiles: int) -> None:
    """Tiles, then unused tiles, then the order."""
    assert len(tiles) <= num_tiles
    first = TILE_WORDS * num_tiles
    target[:first] = 0
    target[: tiles.size] = tiles.reshape(-1)
    target[first : first + len(order)] = order
