"""Products with matrices that stay in host memory, read over the link by the kernel itself (C2), in Triton.

    columns of the product   | 0 ... α·N | α·N ... N |
    output-stationary        one program sums a tile of it; every tile of rows fetches the weights again
    weight-stationary                    one program holds a tile of weights and goes through all rows; what it sums of
                                         its part of the inner dimension is added to float32 sums on the device

Programs of both kinds are launched together, in turns, and write columns of their own: nothing waits for anything. Up
to as many rows as a tile has, `products` reads the weights once and sums nowhere else.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.engine.devices.cuda.launch import OVERLAP, launch_next, wait_for_previous


@dataclass(frozen=True)
class HostMatrix:
    values: Tensor  # [..., out, in]: on the device by its address, on the host by its memory
    keeps: tuple[Tensor, ...] = ()  # that memory, where nothing else holds it

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def __getitem__(self, index: int) -> HostMatrix:
        """One matrix of a stack."""
        return HostMatrix(self.values[index], self.keeps)


class Tiles(NamedTuple):
    """tokens × rows of the weight × columns, of either path."""

    output: tuple[int, int, int]
    weight: tuple[int, int, int]
    warps: int
    stages: int


# The more columns a held tile has, the less is added on the device. By what shared memory has room for, 16-bit numbers.
LARGE = Tiles(output=(128, 64, 64), weight=(64, 64, 512), warps=4, stages=2)
MEDIUM = Tiles(output=(128, 64, 64), weight=(64, 128, 128), warps=4, stages=3)
SMALL = Tiles(output=(64, 64, 32), weight=(64, 64, 64), warps=4, stages=2)
LARGE_BYTES, MEDIUM_BYTES = 212_992, 114_688  # of shared memory that they take


def tiles_for(x: Tensor) -> Tiles:
    if x.dtype.itemsize > 2 or not x.is_cuda:
        return SMALL
    shared = torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin
    return LARGE if shared >= LARGE_BYTES else MEDIUM if shared >= MEDIUM_BYTES else SMALL


@triton.jit
def _sum_outputs(
    x, weight, bias, out, tile, count, rows, columns, first, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of the product, of columns before `first`."""
    tiles = tl.cdiv(count, BLOCK_M)
    token = (tile % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = (tile // tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    known, inside = (token < count)[:, None], row < first
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    wait_for_previous(OVERLAP)
    for start in range(0, columns, BLOCK_K):
        reach = (start + column < columns)[None, :]
        w = tl.load(weight + row[:, None] * columns + start + column[None, :], mask=inside[:, None] & reach, other=0.0)
        v = tl.load(x + token[:, None] * x_stride + start + column[None, :], mask=known & reach, other=0.0)
        total = tl.dot(v, tl.trans(w), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = out + token[:, None] * rows + row[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=known & inside[None, :])


@triton.jit
def _add_products(
    x, weight, sums, tile, count, rows, columns, first, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """What one tile of weights adds to all rows of the product."""
    parts = tl.cdiv(columns, BLOCK_K)
    row = first + (tile // parts) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = (tile % parts) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside, reach = row < rows, (column < columns)[None, :]
    w = tl.load(weight + row[:, None] * columns + column[None, :], mask=inside[:, None] & reach, other=0.0)
    wait_for_previous(OVERLAP)
    width = rows - first
    for start in range(0, count, BLOCK_M):
        token = start + tl.arange(0, BLOCK_M).to(tl.int64)
        known = (token < count)[:, None]
        v = tl.load(x + token[:, None] * x_stride + column[None, :], mask=known & reach, other=0.0)
        part = tl.dot(v, tl.trans(w), input_precision="ieee")
        target = sums + token[:, None] * width + (row - first)[None, :]
        tl.atomic_add(target, part, mask=known & inside[None, :], sem="relaxed")


@triton.jit(do_not_specialize=["count", "first", "outputs", "programs"])
def _hybrid_kernel(
    x, weight, bias, out, sums, count, rows, columns, first, outputs, programs, x_stride,
    OUT_M: tl.constexpr, OUT_N: tl.constexpr, OUT_K: tl.constexpr,
    HELD_M: tl.constexpr, HELD_N: tl.constexpr, HELD_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`first`: column of the product where the weight-stationary part begins; `outputs` of all programs are the
    others, evenly among them."""
    launch_next(OVERLAP)
    program = tl.program_id(0).to(tl.int64)
    before = program * outputs // programs
    if (program + 1) * outputs // programs > before:
        _sum_outputs(
            x, weight, bias, out, before, count, rows, columns, first, x_stride,
            OUT_M, OUT_N, OUT_K, HAS_BIAS, OVERLAP,
        )  # fmt: skip
    else:
        _add_products(
            x, weight, sums, program - before, count, rows, columns, first, x_stride, HELD_M, HELD_N, HELD_K, OVERLAP
        )


@triton.jit(do_not_specialize=["first", "size"])
def _round_kernel(
    sums, bias, out, rows, first, size, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    row = first + at % (rows - first)
    total = tl.load(sums + at, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at // (rows - first) * rows + row, total.to(out.dtype.element_ty), mask=inside)


def hybrid(x: Tensor, weight: Tensor, bias: Tensor | None, share: float = 0.0, tiles: Tiles | None = None) -> Tensor:
    """x [n, in], weight [out, in] → [n, out]. `share` (α): of the columns, output-stationary. On a link that is much
    slower than the device's memory it is 0: fetching anything twice costs more than summing on the device."""
    tiles = tiles or tiles_for(x)
    (count, columns), rows = x.shape, len(weight)
    out_m, out_n, out_k = tiles.output
    held_m, held_n, held_k = tiles.weight
    first = rows if share >= 1.0 else int(rows * share) // out_n * out_n
    outputs = triton.cdiv(count, out_m) * triton.cdiv(first, out_n)
    programs = outputs + triton.cdiv(rows - first, held_n) * triton.cdiv(columns, held_k)
    out = torch.empty(count, rows, dtype=x.dtype, device=x.device)
    sums = torch.zeros(count, rows - first, dtype=torch.float32, device=x.device)
    unused = weight if bias is None else bias
    _hybrid_kernel[(programs,)](
        x, weight, unused, out, sums, count, rows, columns, first, outputs, programs, x.stride(0),
        OUT_M=out_m, OUT_N=out_n, OUT_K=out_k, HELD_M=held_m, HELD_N=held_n, HELD_K=held_k,
        HAS_BIAS=bias is not None, num_warps=tiles.warps, num_stages=tiles.stages, **OVERLAP,
    )  # fmt: skip
    if first < rows:
        _round_kernel[(triton.cdiv(sums.numel(), 2048),)](
            sums, unused, out, rows, first, sums.numel(), HAS_BIAS=bias is not None, BLOCK=2048, num_warps=8, **OVERLAP
        )
    return out
