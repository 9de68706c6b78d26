"""Products of few rows with a weight matrix, in Triton: bound by reading the weights once, which is all they do.

Larger batches are the vendor library's (torch). Which one multiplies what, and in tiles of what size, is chosen by what
was measured on an H200 (docs/design/gpu.md).
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dovetail.engine.devices.cuda import coded, fp8
from dovetail.engine.devices.cuda.coded import CodedMatrix
from dovetail.engine.devices.cuda.elementwise import ACTIVATIONS, activate, activate_values
from dovetail.engine.devices.cuda.fp8 import Fp8Matrix
from dovetail.engine.devices.cuda.in_place import HostMatrix, hybrid
from dovetail.engine.devices.cuda.launch import OVERLAP, launch_next, wait_for_previous

MANY_ROWS = 16  # from here on every product is the vendor's
MOST_IN_PLACE = 128  # rows up to which a matrix in host memory is read once without sums on the device
Matrix = Tensor | CodedMatrix | Fp8Matrix | HostMatrix


class Tile(NamedTuple):
    rows: int  # of the weight
    columns: int
    warps: int
    stages: int


IN_PLACE_ROW, IN_PLACE_FEW, IN_PLACE_MORE = Tile(4, 1024, 4, 3), Tile(32, 128, 4, 4), Tile(64, 64, 4, 4)


@triton.jit
def _one_row_kernel(
    x, weight, scales, bias, out, rows, columns,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, SCALED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    launch_next(OVERLAP)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    inside = (row < rows)[:, None]
    at = weight + row.to(tl.int64)[:, None] * columns + column[None, :]
    upper = at + tl.cast(rows, tl.int64) * columns  # of the rows that go with these in a gated pair
    taken = inside if EVEN else inside & (column < columns)[None, :]
    w = tl.load(at, mask=taken, other=0.0).to(tl.float32)  # weights depend on no earlier kernel
    u = w
    if GATED:
        u = tl.load(upper, mask=taken, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAP)
    v = tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    sums, others = w * v, u * v
    for start in range(BLOCK_K, columns, BLOCK_K):
        taken = inside if EVEN else inside & (start + column < columns)[None, :]
        v = tl.load(x + start + column, mask=start + column < columns, other=0.0).to(tl.float32)[None, :]
        sums += tl.load(at + start, mask=taken, other=0.0).to(tl.float32) * v
        if GATED:
            others += tl.load(upper + start, mask=taken, other=0.0).to(tl.float32) * v
    total = tl.sum(sums, axis=1)
    other = tl.sum(others, axis=1)
    if SCALED:
        total *= tl.load(scales + row, mask=row < rows, other=0.0)
        if GATED:
            other *= tl.load(scales + rows + row, mask=row < rows, other=0.0)
    dtype = out.dtype.element_ty
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    if GATED:
        gate = activate_values(total.to(dtype).to(tl.float32), KIND).to(dtype).to(tl.float32)
        total = gate * other.to(dtype).to(tl.float32)
    tl.store(out + row, total.to(dtype), mask=row < rows)


def one_row(
    x: Tensor, weight: Tensor | Fp8Matrix, bias: Tensor | None, tile: Tile, gated_by: str | None = None
) -> Tensor:
    """x [1, in]. With `gated_by`: the weight is gate and up, one above the other, and activation(gate)·up comes out."""
    values, scales = (weight.values, weight.scales) if isinstance(weight, Fp8Matrix) else (weight, None)
    rows, columns = values.shape
    rows = rows if gated_by is None else rows // 2
    assert gated_by is None or bias is None, "gated products have no bias"
    out = torch.empty(1, rows, dtype=x.dtype, device=x.device)
    _one_row_kernel[(triton.cdiv(rows, tile.rows),)](
        x, values, values if scales is None else scales, values if bias is None else bias, out, rows, columns,
        BLOCK_N=tile.rows, BLOCK_K=tile.columns, HAS_BIAS=bias is not None, EVEN=columns % tile.columns == 0,
        GATED=gated_by is not None, KIND=0 if gated_by is None else ACTIVATIONS[gated_by], SCALED=scales is not None,
        num_warps=tile.warps, num_stages=tile.stages, **OVERLAP,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def _few_rows_kernel(
    x, weight, bias, out, rows, columns, count, x_stride, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    launch_next(OVERLAP)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    at = weight + row.to(tl.int64)[:, None] * columns + column[None, :]
    given = x + token[:, None] * x_stride + column[None, :]
    inside, known = (row < rows)[:, None], (token < count)[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    wait_for_previous(OVERLAP)
    for start in range(0, columns, BLOCK_K):
        reach = (start + column < columns)[None, :]
        w = tl.load(at + start, mask=inside if EVEN else inside & reach, other=0.0)
        v = tl.load(given + start, mask=known if EVEN else known & reach, other=0.0)
        sums = tl.dot(v, tl.trans(w), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    target = out + token[:, None] * out_stride + row[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=known & (row < rows)[None, :])


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    rows, columns = weight.shape
    out = torch.empty(len(x), rows, dtype=x.dtype, device=x.device)
    _few_rows_kernel[(triton.cdiv(rows, tile.rows),)](
        x, weight, weight if bias is None else bias, out, rows, columns, len(x), x.stride(0), out.stride(0),
        BLOCK_M=max(16, triton.next_power_of_2(len(x))), BLOCK_N=tile.rows, BLOCK_K=tile.columns,
        HAS_BIAS=bias is not None, EVEN=columns % tile.columns == 0,
        num_warps=tile.warps, num_stages=tile.stages, **OVERLAP,
    )  # fmt: skip
    return out


def one_row_tile(rows: int, columns: int, gated: bool) -> Tile:
    if columns <= 1024:
        return Tile(2 if gated else 4, 1024, 4, 3)
    if gated:
        return Tile(2, 1024, 2, 4)
    return Tile(2, 1024, 4, 3) if rows >= 2048 else Tile(2, 2048, 4, 3)


def few_rows_tile(rows: int, columns: int) -> Tile | None:
    """None = the vendor's is faster."""
    if rows >= 65536:
        return Tile(64, 128, 4, 4)
    if (rows <= 8192 and columns <= 8192 and rows * columns >= 1 << 24) or rows * columns <= 1 << 21:
        return Tile(16, 128, 2, 6)
    return None


def fp8_row_tile(rows: int, columns: int, gated: bool) -> Tile:
    if gated or columns <= 1024:
        return Tile(2, 1024, 4, 3)
    return Tile(4, 1024, 4, 3) if columns <= 4096 and rows <= 4096 else Tile(2, 2048, 4, 3)


def fp8_linear(x: Tensor, weight: Fp8Matrix, bias: Tensor | None) -> Tensor:
    """One row as it is; of more, activations too are rounded to 8 bits, a scale for each."""
    if len(x) == 1:
        return one_row(x, weight, bias, fp8_row_tile(*weight.shape, gated=False))
    return fp8.multiply(x, weight, bias)


def in_place_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The weight is in host memory: whatever is done is done to read it once."""
    if len(x) == 1:
        return one_row(x, weight, bias, IN_PLACE_ROW)
    if len(x) <= MOST_IN_PLACE:
        return few_rows(x, weight, bias, IN_PLACE_FEW if len(x) <= 32 else IN_PLACE_MORE)
    return hybrid(x, weight, bias)


def linear(x: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
    """x [n, in], weight [out, in] → [n, out]."""
    if isinstance(weight, HostMatrix):
        return in_place_linear(x, weight.values, bias)
    if isinstance(weight, CodedMatrix):
        return coded.linear(x, weight, bias)
    if isinstance(weight, Fp8Matrix):
        return fp8_linear(x, weight, bias)
    count = len(x)
    if count == 1:
        return one_row(x, weight, bias, one_row_tile(*weight.shape, gated=False))
    tile = few_rows_tile(*weight.shape) if count <= MANY_ROWS else None
    return F.linear(x, weight, bias) if tile is None else few_rows(x, weight, bias, tile)


def gated_linear(x: Tensor, weight: Matrix, activation: str) -> Tensor:
    """x [n, in], weight of gate and up [2·out, in] → activation(gate)·up [n, out]."""
    if isinstance(weight, CodedMatrix):
        return coded.gated_linear(x, weight, activation)
    if isinstance(weight, HostMatrix) and len(x) == 1:
        return one_row(x, weight.values, None, IN_PLACE_ROW, activation)
    if len(x) == 1:
        tile = (fp8_row_tile if isinstance(weight, Fp8Matrix) else one_row_tile)(*weight.shape, gated=True)
        return one_row(x, weight, None, tile, activation)
    return activate(linear(x, weight, None), activation, gated=True)
