"""What adapters add to a product: scaling · (x·Aᵀ)·Bᵀ, for rows of many adapters in two launches, in Triton.

Tiles of up to 16 rows of one adapter find its matrices by the address of its header (`adapter_image`). Each chunk of
columns is summed by a program of its own, and the second launch adds up these parts in their order: a row has the same
numbers alone and in company, whatever the others are computed with. Neither launch has much to do beside waiting for
memory, so both have read all that no kernel writes before they wait for the one before them.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.engine.devices.cuda.adapter_image import TILE, AdaptedMatrix
from dovetail.engine.devices.cuda.launch import OVERLAP, launch_next, wait_for_previous

MANY_TILES = 32  # from here on a program adds to two blocks of rows
MAX_UNROLLED = tl.constexpr(4)  # blocks of ranks; of 32 the compiler would make one program for five minutes


class Sizes(NamedTuple):
    """What programs work on at a time."""

    chunk: int  # columns of x
    ranks: int  # at most
    rows: int  # of the matrix
    parts: int  # beyond, they are added up in a loop


@dataclass(frozen=True)
class AdaptedRows:
    """Which rows of an iteration have an adapter, and which one."""

    tiles: Tensor  # [tiles, 4] int64: address of the adapter's header (0 = nothing to do), first place, how many
    order: Tensor  # [places] int64: rows of the iteration
    capacity: int  # ranks that there is room for

    def shrink(self, x: Tensor, matrix: AdaptedMatrix) -> Tensor:
        """x [n, columns] by the first matrices, in the order of places."""
        return shrink(x, self, matrix)

    def expand(self, sums: Tensor, out: Tensor, matrix: AdaptedMatrix) -> None:
        """What `shrink` made of x by the second matrices, added to out [n, rows], the product of x with the matrix."""
        expand(sums, out, self, matrix)


@triton.jit(do_not_specialize=["entry", "num_places"])
def _shrink_kernel(
    x, tiles, order, sums, entry, columns, x_stride, num_places,
    TILE: tl.constexpr, PIECES: tl.constexpr, CAPACITY: tl.constexpr, RANKS: tl.constexpr, CHUNK: tl.constexpr,
    EVEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """x·Aᵀ of each tile, piece and chunk of columns, into sums [chunks, places, PIECES, CAPACITY]."""
    launch_next(OVERLAP)
    tile = tiles + 4 * tl.program_id(0)
    piece = tl.program_id(1)
    part = tl.program_id(2)
    header = tl.load(tile)
    words = header.to(tl.pointer_type(tl.int64))
    matrix = tl.load(words + 2 + 2 * (entry + piece), mask=header != 0, other=0)
    if matrix == 0:
        wait_for_previous(OVERLAP)
    else:
        rank = tl.load(words).to(tl.int32)
        first = tl.multiple_of(matrix.to(tl.pointer_type(x.dtype.element_ty)), 16)
        number = tl.arange(0, RANKS)
        column = part * CHUNK + tl.arange(0, CHUNK)[None, :]
        at = first + number[:, None] * columns + column
        there = (number < rank)[:, None]
        w = tl.load(at, mask=there if EVEN else there & (column < columns), other=0.0)
        place = tl.load(tile + 1) + tl.arange(0, TILE)[:, None]
        known = tl.arange(0, TILE)[:, None] < tl.load(tile + 2)
        row = tl.load(order + place, mask=known, other=0)
        target = sums + ((part * num_places + place) * PIECES + piece) * CAPACITY + number[None, :]
        wait_for_previous(OVERLAP)
        v = tl.load(x + row * x_stride + column, mask=known if EVEN else known & (column < columns), other=0.0)
        found = tl.dot(v, tl.trans(w), tl.zeros([TILE, RANKS], tl.float32), input_precision="ieee")
        tl.store(target, found, mask=known)
        if CAPACITY > MAX_UNROLLED * RANKS:
            for lowest in range(RANKS, rank, RANKS):
                _shrink_more(v, at, target, lowest, rank, columns, column, known, TILE, RANKS, EVEN)
        else:
            for lowest in tl.static_range(RANKS, CAPACITY, RANKS):
                _shrink_more(v, at, target, lowest, rank, columns, column, known, TILE, RANKS, EVEN)


@triton.jit
def _shrink_more(
    v, at, target, lowest, rank, columns, column, known, TILE: tl.constexpr, RANKS: tl.constexpr, EVEN: tl.constexpr
):
    """The ranks from `lowest` on."""
    there = (lowest + tl.arange(0, RANKS) < rank)[:, None]
    w = tl.load(at + lowest * columns, mask=there if EVEN else there & (column < columns), other=0.0)
    found = tl.dot(v, tl.trans(w), tl.zeros([TILE, RANKS], tl.float32), input_precision="ieee")
    tl.store(target + lowest, found, mask=known)


@triton.jit
def _add_parts(at, known, step, TILE: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, MANY: tl.constexpr):
    """In their order; a few at once, as far as waiting for memory goes."""
    summed = tl.zeros([TILE, RANKS], tl.float32)
    if PARTS <= MANY:
        for part in tl.static_range(PARTS):
            summed += tl.load(at + part * step, mask=known, other=0.0)
    else:
        for part in range(PARTS):
            summed += tl.load(at + part * step, mask=known, other=0.0)
    return summed


@triton.jit(do_not_specialize=["entry", "num_places"])
def _expand_kernel(
    tiles, order, sums, out, entry, size0, size1, size2, out_stride, num_places,
    TILE: tl.constexpr, PIECES: tl.constexpr, CAPACITY: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr,
    MANY: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Adds scaling · sums·Bᵀ to BLOCKS times ROWS columns of out; B is kept as [rank, rows]."""
    launch_next(OVERLAP)
    tile = tiles + 4 * tl.program_id(1)
    block = tl.program_id(0)
    piece, begin, size = 0, 0, size0
    if PIECES > 1:
        second = tl.cdiv(size0, ROWS * BLOCKS)
        third = second + tl.cdiv(size1, ROWS * BLOCKS)
        piece = (block >= second).to(tl.int32) + (block >= third).to(tl.int32)
        begin = tl.where(piece == 0, 0, tl.where(piece == 1, size0, size0 + size1))
        size = tl.where(piece == 0, size0, tl.where(piece == 1, size1, size2))
        block -= tl.where(piece == 0, 0, tl.where(piece == 1, second, third))
    header = tl.load(tile)
    words = header.to(tl.pointer_type(tl.int64))
    matrix = tl.load(words + 3 + 2 * (entry + piece), mask=header != 0, other=0)
    if matrix == 0:
        wait_for_previous(OVERLAP)
    else:
        rank = tl.load(words).to(tl.int32)
        scaling = tl.load(words + 1).to(tl.int32).to(tl.float32, bitcast=True)
        number = tl.arange(0, RANKS)[:, None]
        column = block * ROWS * BLOCKS + tl.arange(0, ROWS)[None, :]
        at = tl.multiple_of(matrix.to(tl.pointer_type(out.dtype.element_ty)), 16) + number * size + column
        w = tl.load(at, mask=(number < rank) & (column < size), other=0.0)
        place = tl.load(tile + 1) + tl.arange(0, TILE)
        known = (tl.arange(0, TILE) < tl.load(tile + 2))[:, None]
        row = tl.load(order + place[:, None], mask=known, other=0)
        target = out + row * out_stride + begin + column
        given = sums + (place[:, None] * PIECES + piece) * CAPACITY + tl.arange(0, RANKS)[None, :]
        step = num_places * PIECES * CAPACITY
        wait_for_previous(OVERLAP)
        summed = _add_parts(given, known, step, TILE, RANKS, PARTS, MANY).to(w.dtype)
        for which in tl.static_range(BLOCKS):
            inside = which * ROWS + column < size
            value = tl.load(target + which * ROWS, mask=known & inside, other=0.0)
            if which > 0:
                w = tl.load(at + which * ROWS, mask=(number < rank) & inside, other=0.0)
            total = tl.zeros([TILE, ROWS], tl.float32)
            total = tl.dot(summed, w, total, input_precision="ieee")
            further = at + which * ROWS
            if CAPACITY > MAX_UNROLLED * RANKS:
                for lowest in range(RANKS, rank, RANKS):
                    more = _add_parts(given + lowest, known, step, TILE, RANKS, PARTS, MANY).to(w.dtype)
                    total = _expand_more(more, further, total, lowest, rank, size, inside, RANKS)
            else:
                for lowest in tl.static_range(RANKS, CAPACITY, RANKS):
                    there = known & (lowest < rank)
                    more = _add_parts(given + lowest, there, step, TILE, RANKS, PARTS, MANY).to(w.dtype)
                    total = _expand_more(more, further, total, lowest, rank, size, inside, RANKS)
            result = value.to(tl.float32) + total * scaling
            tl.store(target + which * ROWS, result.to(out.dtype.element_ty), mask=known & inside)


@triton.jit
def _expand_more(more, at, total, lowest, rank, size, inside, RANKS: tl.constexpr):
    """With the ranks from `lowest` on."""
    there = lowest + tl.arange(0, RANKS)[:, None] < rank
    w = tl.load(at + lowest * size, mask=there & inside, other=0.0)
    return tl.dot(more, w, total, input_precision="ieee")


def sizes_of(dtype: torch.dtype) -> Sizes:
    """Float32 has no matrix units: its products are many more instructions, and nobody is in a hurry."""
    if dtype == torch.float32:
        return Sizes(chunk=128, ranks=16, rows=32, parts=4)
    return Sizes(chunk=512, ranks=32, rows=128, parts=32)


def shrink(x: Tensor, rows: AdaptedRows, matrix: AdaptedMatrix) -> Tensor:
    columns, places, pieces = x.shape[1], len(rows.order), len(matrix.sizes)
    sizes = sizes_of(x.dtype)
    parts = triton.cdiv(columns, sizes.chunk)
    sums = torch.empty(parts, places, pieces, rows.capacity, dtype=torch.float32, device=x.device)
    _shrink_kernel[(len(rows.tiles), pieces, parts)](
        x, rows.tiles, rows.order, sums, matrix.entry, columns, x.stride(0), places, TILE=TILE, PIECES=pieces,
        CAPACITY=rows.capacity, RANKS=min(rows.capacity, sizes.ranks), CHUNK=sizes.chunk,
        EVEN=columns % sizes.chunk == 0, num_warps=2, **OVERLAP,
    )  # fmt: skip
    return sums


def expand(sums: Tensor, out: Tensor, rows: AdaptedRows, matrix: AdaptedMatrix) -> None:
    parts, places, pieces, capacity = sums.shape
    sizes = sizes_of(out.dtype)
    ranks = min(capacity, sizes.ranks)
    blocks = 2 if len(rows.tiles) >= MANY_TILES and ranks == capacity else 1
    size0, size1, size2 = (*matrix.sizes, 0, 0)[:3]
    num_programs = sum(triton.cdiv(size, sizes.rows * blocks) for size in matrix.sizes)
    _expand_kernel[(num_programs, len(rows.tiles))](
        rows.tiles, rows.order, sums, out, matrix.entry, size0, size1, size2, out.stride(0), places, TILE=TILE,
        PIECES=pieces, CAPACITY=capacity, RANKS=ranks, PARTS=parts, MANY=sizes.parts, ROWS=sizes.rows, BLOCKS=blocks,
        num_warps=1, **OVERLAP,
    )  # fmt: skip
