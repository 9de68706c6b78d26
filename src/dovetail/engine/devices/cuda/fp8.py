"""Matrices of 8-bit floats (e4m3) with a scale per row, in Triton: rounding to them, and products with some rows of
activations that were rounded in the same way. Many rows are the vendor's.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.engine.devices.cuda.coded import add_up
from dovetail.engine.devices.cuda.launch import OVERLAP, launch_next, wait_for_previous

LARGEST = 448.0  # that e4m3 has
TYPE = torch.float8_e4m3fn
MOST_ROWS = 128  # of activations; beyond, the vendor's product is faster
PROGRAMS, MOST_SPLITS = 192, 8  # columns are split where rows alone give fewer programs than the card has room for


@dataclass(frozen=True)
class Fp8Matrix:
    values: Tensor  # [..., out, in] e4m3
    scales: Tensor  # [..., out] float32

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def __getitem__(self, index: int) -> Fp8Matrix:
        """One matrix of a stack."""
        return Fp8Matrix(self.values[index], self.scales[index])


class Rounded(NamedTuple):
    values: Tensor  # [rows, columns] e4m3
    scales: Tensor  # [rows] float32


@triton.jit
def _round_kernel(
    x, values, scales, columns, x_stride, LARGEST: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    launch_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    wait_for_previous(OVERLAP)
    v = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(v), axis=0), 1e-12) / LARGEST
    v = tl.clamp(v / scale, -LARGEST, LARGEST)
    tl.store(values + row * columns + column, v.to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def round_rows(x: Tensor, into: Rounded | None = None) -> Rounded:
    """x [rows, columns]; each row's largest becomes the largest that there is."""
    rows, columns = x.shape
    if into is None:
        into = Rounded(
            torch.empty(rows, columns, dtype=TYPE, device=x.device),
            torch.empty(rows, dtype=torch.float32, device=x.device),
        )
    block = triton.next_power_of_2(columns)
    _round_kernel[(rows,)](
        x, into.values, into.scales, columns, x.stride(0), LARGEST=LARGEST, BLOCK=block,
        num_warps=4 if block <= 4096 else 8, **OVERLAP,
    )  # fmt: skip
    return into


class Fp8Tile(NamedTuple):
    tokens: int
    rows: int  # of the weight
    columns: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["count"])
def _some_rows_kernel(
    x, x_scales, weight, scales, bias, out, count, rows, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows of the weight are the rows of the matrix units, which have 64 of them; tokens are as few as there are.
    SPLIT: each program sums some of the columns only, and writes that for itself."""
    launch_next(OVERLAP)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    at = weight + row.to(tl.int64)[:, None] * columns + column[None, :]
    given = x + token.to(tl.int64)[:, None] * columns + column[None, :]
    inside, known = (row < rows)[:, None], (token < count)[:, None]
    first, last = 0, columns
    if SPLIT:
        share = tl.cdiv(tl.cdiv(columns, BLOCK_K), tl.num_programs(2)) * BLOCK_K
        first = tl.program_id(2) * share
        last = min(first + share, columns)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    wait_for_previous(OVERLAP)
    for start in range(first, last, BLOCK_K):
        reach = (start + column < last)[None, :]
        w = tl.load(at + start, mask=inside & reach, other=0.0)
        v = tl.load(given + start, mask=known & reach, other=0.0)
        sums = tl.dot(w, tl.trans(v), sums)
    sums *= tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
    sums *= tl.load(x_scales + token, mask=token < count, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    target = out + token.to(tl.int64)[None, :] * rows + row[:, None]
    if SPLIT:
        target += tl.program_id(2).to(tl.int64) * count * rows
    tl.store(target, sums.to(out.dtype.element_ty), mask=inside & (token < count)[None, :])


def some_rows(
    x: Rounded, weight: Fp8Matrix, bias: Tensor | None, dtype: torch.dtype, tile: Fp8Tile, splits: int
) -> Tensor:
    count, (rows, columns), device = len(x.values), weight.shape, x.values.device
    out = torch.empty(count, rows, dtype=dtype, device=device)
    parts = out if splits == 1 else torch.empty(splits, count, rows, dtype=torch.float32, device=device)
    _some_rows_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(count, tile.tokens), splits)](
        x.values, x.scales, weight.values, weight.scales, weight.scales if bias is None else bias, parts, count, rows,
        columns, BLOCK_M=tile.tokens, BLOCK_N=tile.rows, BLOCK_K=tile.columns, SPLIT=splits > 1,
        HAS_BIAS=bias is not None and splits == 1, num_warps=tile.warps, num_stages=tile.stages, **OVERLAP,
    )  # fmt: skip
    if splits > 1:
        add_up(parts, bias, out)
    return out


def tile_of(count: int, rows: int, columns: int) -> Fp8Tile:
    tokens = max(16, triton.next_power_of_2(count))
    if tokens > 64 and rows >= 16384:
        return Fp8Tile(tokens, 128, 128, 8, 4)
    return Fp8Tile(tokens, 64, 128, 4, 5) if columns <= 1024 or rows <= 1024 else Fp8Tile(tokens, 64, 256, 4, 4)


def num_splits(rows: int, columns: int, tile: Fp8Tile) -> int:
    splits = min(PROGRAMS // triton.cdiv(rows, tile.rows), columns // (4 * tile.columns), MOST_SPLITS)
    return 1 << max(splits, 1).bit_length() - 1


def multiply(x: Tensor, weight: Fp8Matrix, bias: Tensor | None) -> Tensor:
    rounded = round_rows(x)
    if len(x) > MOST_ROWS:
        scale_a, scale_b = rounded.scales[:, None], weight.scales[None, :]
        out = torch._scaled_mm(rounded.values, weight.values.t(), scale_a, scale_b, out_dtype=x.dtype)
        return out if bias is None else out.add_(bias)
    tile = tile_of(len(x), *weight.shape)
    return some_rows(rounded, weight, bias, x.dtype, tile, num_splits(*weight.shape, tile))
