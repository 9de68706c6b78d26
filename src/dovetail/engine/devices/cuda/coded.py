"""Matrices that stay quantised on the device, in Triton: products with their codes, rows looked up, all of it widened.

A matrix is kept row by row, its codes apart from its scales (`codings` says what they stand for; `weights` makes rows
of the cells that a checkpoint has). One row of activations is multiplied in float32; of more the weights are rounded to
the type of the activations first, as in a matrix that was widened. Many rows are the vendor's, after widening.
"""

# mypy: ignore-errors

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dovetail.codings import CODINGS, FORMS, GROUP, Coding
from dovetail.engine.devices.cuda.elementwise import ACTIVATIONS, activate, activate_values
from dovetail.engine.devices.cuda.launch import OVERLAP, launch_next, wait_for_previous
from dovetail.layouts import CELL

MOST_ROWS = 128  # of activations that are multiplied with codes; beyond, widening the matrix costs less
NUMPY_TO_TORCH = {"float16": torch.float16, "int8": torch.int8, "float32": torch.float32}


@dataclass(frozen=True)
class CodedRows:
    """Some rows of one matrix, of one layout."""

    layout: str  # one of `codings`
    columns: int
    codes: Tensor  # [rows, bytes] int8
    scales: tuple[Tensor, ...]  # each [rows, n], as `Coding.parts` says

    def __len__(self) -> int:
        return len(self.codes)

    def part(self, start: int, stop: int) -> CodedRows:
        scales = tuple(scale[start:stop] for scale in self.scales)
        return CodedRows(self.layout, self.columns, self.codes[start:stop], scales)

    @cached_property
    def arguments(self) -> dict[str, object]:
        """Of every kernel that reads codes."""
        form, unused = Coding(self.layout, self.columns).form, self.codes
        kinds = 2 if form.minimum else 1
        outer = self.scales[:kinds] if form.nested else ()
        inner = self.scales[-kinds:]
        group = form.group or GROUP
        return {
            "codes": self.codes,
            "scale": inner[0],
            "minimum": inner[1] if form.minimum else unused,
            "outer": outer[0] if outer else unused,
            "outer_minimum": outer[1] if len(outer) > 1 else unused,
            "rows": len(self.codes),
            "columns": self.columns,
            "row_bytes": self.codes.shape[1],
            "groups": self.codes.shape[1] * 8 // (form.bits * group),
            "nests": outer[0].shape[1] if outer else 0,
            "FOUR": form.bits == 4,
            "GROUP": group,
            "PER_ROW": form.group == 0,
            "NESTED": form.nested,
            "MINIMUM": form.minimum,
            "ASSEMBLED": self.codes.is_cuda,
        }

    @property
    def group(self) -> int:
        return int(self.arguments["GROUP"])


@dataclass(frozen=True)
class CodedMatrix:
    """[..., out, in], in as many pieces, one below the other, as it has layouts."""

    shape: tuple[int, ...]
    pieces: tuple[CodedRows, ...]

    def __getitem__(self, index: int) -> CodedMatrix:
        """One matrix of a stack."""
        rows = math.prod(self.shape[1:-1])
        return CodedMatrix(self.shape[1:], tuple(self._rows(index * rows, (index + 1) * rows)))

    def _rows(self, start: int, stop: int) -> Iterator[CodedRows]:
        first = 0
        for piece in self.pieces:
            begin, end = max(start - first, 0), min(stop - first, len(piece))
            if begin < end:
                yield piece.part(begin, end)
            first += len(piece)


def can_keep(layout: str) -> bool:
    """Others are unpacked on their way."""
    return layout in CODINGS and not FORMS[layout].floats


def lay_out(cells: Tensor, coding: Coding, codes: Tensor, scales: Sequence[Tensor]) -> None:
    """Cells of 16 rows (`layouts`) as rows."""
    rows = len(codes)
    blocks = -(-rows // CELL)
    size = blocks * CELL * coding.row_bytes
    _lay_out_rows(cells[:size].view(torch.int32).view(blocks, -1, CELL), codes.view(torch.int32))
    records, start = cells[size:].view(blocks, -1), 0
    for part, target in zip(coding.parts, scales, strict=True):
        width = CELL * part.count * part.dtype.itemsize
        _lay_out_rows(records[:, start : start + width].view(target.dtype).unflatten(1, (part.count, CELL)), target)
        start += width


def _lay_out_rows(blocks: Tensor, rows: Tensor) -> None:
    """[blocks, n, 16] → [rows, n]; the last block may have fewer rows."""
    whole = len(rows) // CELL
    rows[: whole * CELL].unflatten(0, (whole, CELL)).copy_(blocks[:whole].transpose(1, 2))
    if whole < len(blocks):
        rows[whole * CELL :].copy_(blocks[whole].T[: len(rows) - whole * CELL])


# Kernels. A tile of codes is [rows, groups, bytes of a group]: what a group shares is one number of the tile's plane.


@triton.jit
def _bytes_of(codes, row, group, inside, row_bytes, WIDTH: tl.constexpr):
    """[rows, groups, bytes of a group]"""
    at = row.to(tl.int64)[:, None, None] * row_bytes + group[None, :, None] * WIDTH
    return tl.load(codes + at + tl.arange(0, WIDTH)[None, None, :], mask=inside[:, :, None], other=0)


@triton.jit
def _scaled_by(
    scale, minimum, outer, outer_minimum, row, group, inside, groups, nests,
    FOUR: tl.constexpr, GROUP: tl.constexpr, PER_ROW: tl.constexpr, NESTED: tl.constexpr, MINIMUM: tl.constexpr,
):  # fmt: skip
    """What a lifted code less `_base` is multiplied with, and what is added then, to be the value: [rows, groups]."""
    at = row.to(tl.int64)[:, None] * groups + group[None, :]
    if PER_ROW:
        at = row.to(tl.int64)[:, None] + 0 * group[None, :]
    factor = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
    if NESTED:
        nest = row.to(tl.int64)[:, None] * nests + (group // (256 // GROUP))[None, :]
        factor *= tl.load(outer + nest, mask=inside, other=0.0).to(tl.float32)
    least = tl.zeros_like(factor)
    if MINIMUM:
        least = tl.load(minimum + at, mask=inside, other=0.0).to(tl.float32)
        if NESTED:
            least *= -tl.load(outer_minimum + nest, mask=inside, other=0.0).to(tl.float32)
    return factor * (2048.0 if FOUR else 32768.0), least


@triton.jit
def _base(FOUR: tl.constexpr, MINIMUM: tl.constexpr):
    """A lifted zero. Codes of 4 bits with a minimum count from 0: what they are lifted by is theirs."""
    return 1.0 if FOUR and MINIMUM else 1.0 + 128.0 / 32768.0


@triton.jit
def _value(lifted, times, least, FOUR: tl.constexpr, MINIMUM: tl.constexpr, EXACT: tl.constexpr):
    """EXACT: rounded once; else in one instruction, right to some 17 bits, for types of 16."""
    if EXACT:
        return (lifted - _base(FOUR, MINIMUM)) * times[:, :, None] + least[:, :, None]
    plus = least - times * _base(FOUR, MINIMUM)
    return lifted * times[:, :, None] + plus[:, :, None]


@triton.jit
def _lift(byte, HIGH: tl.constexpr, FOUR: tl.constexpr, ASSEMBLED: tl.constexpr):
    """1 + (code + 128) / 32768 as a float32, or 1 + (code + 8) / 2048 of one of 4 bits. A byte is put into the middle
    of the mantissa of one, which is a single instruction; converting it to a number takes four."""
    if ASSEMBLED:
        if FOUR:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 t;
                shl.b32 t, $4, """ + ("0" if HIGH else "4") + """;
                lop3.b32 t, t, 0xF0F0F0F0, 0x80808080, 0x6A;
                prmt.b32 $0, t, 0x3F800000, 0x7604; prmt.b32 $1, t, 0x3F800000, 0x7614;
                prmt.b32 $2, t, 0x3F800000, 0x7624; prmt.b32 $3, t, 0x3F800000, 0x7634; }""",
                "=f,=f,=f,=f,r", [byte], dtype=tl.float32, is_pure=True, pack=4,
            )  # fmt: skip
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t;
            xor.b32 t, $4, 0x80808080;
            prmt.b32 $0, t, 0x3F800000, 0x7604; prmt.b32 $1, t, 0x3F800000, 0x7614;
            prmt.b32 $2, t, 0x3F800000, 0x7624; prmt.b32 $3, t, 0x3F800000, 0x7634; }""",
            "=f,=f,=f,=f,r", [byte], dtype=tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    wide = byte.to(tl.int32)
    if FOUR:
        wide = wide & 0xF0 if HIGH else (wide & 0x0F) << 4
    return (((wide & 0xFF ^ 0x80) << 8) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _one_row_kernel(
    x, bias, out,
    codes, scale, minimum, outer, outer_minimum, rows, columns, row_bytes, groups, nests,
    FOUR: tl.constexpr, GROUP: tl.constexpr, PER_ROW: tl.constexpr, NESTED: tl.constexpr, MINIMUM: tl.constexpr,
    ASSEMBLED: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    KIND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    launch_next(OVERLAP)
    WIDTH: tl.constexpr = GROUP // 2 if FOUR else GROUP
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    upper = row + rows  # of the rows that go with these in a gated pair
    sums = tl.zeros([BLOCK_N, GROUPS], tl.float32)
    others = tl.zeros([BLOCK_N, GROUPS], tl.float32)
    base = _base(FOUR, MINIMUM)
    wait_for_previous(OVERLAP)
    for start in range(0, groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        inside = (row < rows)[:, None] & (group < groups)[None, :]
        column = (group * GROUP)[:, None] + tl.arange(0, WIDTH)[None, :]
        low = tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32)
        high = low
        of_group = tl.sum(low, axis=1)
        if FOUR:
            high = tl.load(x + column + WIDTH, mask=column + WIDTH < columns, other=0.0).to(tl.float32)
            of_group += tl.sum(high, axis=1)
        byte = _bytes_of(codes, row, group, inside, row_bytes, WIDTH)
        times, least = _scaled_by(
            scale, minimum, outer, outer_minimum, row, group, inside, groups, nests,
            FOUR, GROUP, PER_ROW, NESTED, MINIMUM,
        )  # fmt: skip
        product = _lift(byte, False, FOUR, ASSEMBLED) * low[None, :, :]
        if FOUR:
            product += _lift(byte, True, FOUR, ASSEMBLED) * high[None, :, :]
        sums += times * (tl.sum(product, axis=2) - base * of_group[None, :]) + least * of_group[None, :]
        if GATED:
            byte = _bytes_of(codes, upper, group, inside, row_bytes, WIDTH)
            times, least = _scaled_by(
                scale, minimum, outer, outer_minimum, upper, group, inside, groups, nests,
                FOUR, GROUP, PER_ROW, NESTED, MINIMUM,
            )  # fmt: skip
            product = _lift(byte, False, FOUR, ASSEMBLED) * low[None, :, :]
            if FOUR:
                product += _lift(byte, True, FOUR, ASSEMBLED) * high[None, :, :]
            others += times * (tl.sum(product, axis=2) - base * of_group[None, :]) + least * of_group[None, :]
    total = tl.sum(sums, axis=1)
    dtype = out.dtype.element_ty
    if HAS_BIAS:
        total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    if GATED:
        gate = activate_values(total.to(dtype).to(tl.float32), KIND).to(dtype).to(tl.float32)
        total = gate * tl.sum(others, axis=1).to(dtype).to(tl.float32)
    tl.store(out + row, total.to(dtype), mask=row < rows)


@triton.jit(do_not_specialize=["count"])
def _few_rows_kernel(
    x, bias, out, count, x_stride, out_stride,
    codes, scale, minimum, outer, outer_minimum, rows, columns, row_bytes, groups, nests,
    FOUR: tl.constexpr, GROUP: tl.constexpr, PER_ROW: tl.constexpr, NESTED: tl.constexpr, MINIMUM: tl.constexpr,
    ASSEMBLED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, SWAPPED: tl.constexpr,
    SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """SPLIT: each program sums some of the columns only, and writes that for itself."""
    launch_next(OVERLAP)
    WIDTH: tl.constexpr = GROUP // 2 if FOUR else GROUP
    DEPTH: tl.constexpr = GROUPS * WIDTH
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    known = token < count
    place = tl.arange(0, DEPTH)
    dtype = x.dtype.element_ty
    sums = tl.zeros([BLOCK_N, BLOCK_M] if SWAPPED else [BLOCK_M, BLOCK_N], tl.float32)
    first, last = 0, groups
    if SPLIT:
        share = tl.cdiv(tl.cdiv(groups, GROUPS), tl.num_programs(2)) * GROUPS
        first = tl.program_id(2) * share
        last = min(first + share, groups)
    wait_for_previous(OVERLAP)
    for start in range(first, last, GROUPS):
        group = start + tl.arange(0, GROUPS)
        inside = (row < rows)[:, None] & (group < groups)[None, :]
        byte = _bytes_of(codes, row, group, inside, row_bytes, WIDTH)
        times, least = _scaled_by(
            scale, minimum, outer, outer_minimum, row, group, inside, groups, nests,
            FOUR, GROUP, PER_ROW, NESTED, MINIMUM,
        )  # fmt: skip
        for half in tl.static_range(2 if FOUR else 1):
            column = (start + place // WIDTH) * GROUP + place % WIDTH + half * WIDTH
            given = x + token.to(tl.int64)[:, None] * x_stride + column[None, :]
            v = tl.load(given, mask=known[:, None] & (column < columns)[None, :], other=0.0)
            lifted = _lift(byte, half == 1, FOUR, ASSEMBLED)
            w = _value(lifted, times, least, FOUR, MINIMUM, dtype == tl.float32)
            w = tl.reshape(w.to(dtype), [BLOCK_N, DEPTH])
            if SWAPPED:
                sums = tl.dot(w, tl.trans(v), sums, input_precision="ieee")
            else:
                sums = tl.dot(v, tl.trans(w), sums, input_precision="ieee")
    if SWAPPED:
        sums = tl.trans(sums)
    if HAS_BIAS:
        sums += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    target = out + token.to(tl.int64)[:, None] * out_stride + row[None, :]
    if SPLIT:
        target += tl.program_id(2).to(tl.int64) * count * out_stride
    tl.store(target, sums.to(out.dtype.element_ty), mask=known[:, None] & (row < rows)[None, :])


@triton.jit
def _add_up_kernel(
    parts, bias, out, rows, size, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * size + at, mask=at < size, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % rows, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def _widen_kernel(
    which, out, out_stride,
    codes, scale, minimum, outer, outer_minimum, rows, columns, row_bytes, groups, nests,
    FOUR: tl.constexpr, GROUP: tl.constexpr, PER_ROW: tl.constexpr, NESTED: tl.constexpr, MINIMUM: tl.constexpr,
    ASSEMBLED: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Rows as they come, or those that `which` names."""
    launch_next(OVERLAP)
    WIDTH: tl.constexpr = GROUP // 2 if FOUR else GROUP
    wait_for_previous(OVERLAP)
    target = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = target
    if CHOSEN:
        row = tl.load(which + target).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    inside = (row < rows)[:, None] & (group < groups)[None, :]
    byte = _bytes_of(codes, row, group, inside, row_bytes, WIDTH)
    times, least = _scaled_by(
        scale, minimum, outer, outer_minimum, row, group, inside, groups, nests, FOUR, GROUP, PER_ROW, NESTED, MINIMUM
    )
    dtype = out.dtype.element_ty
    for half in tl.static_range(2 if FOUR else 1):
        column = (group * GROUP)[None, :, None] + tl.arange(0, WIDTH)[None, None, :] + half * WIDTH
        value = _value(_lift(byte, half == 1, FOUR, ASSEMBLED), times, least, FOUR, MINIMUM, True).to(dtype)
        at = out + target[:, None, None] * out_stride + column
        tl.store(at, value, mask=inside[:, :, None] & (column < columns))


# Products


def linear(x: Tensor, weight: CodedMatrix, bias: Tensor | None) -> Tensor:
    """x [n, in] → [n, out]."""
    outs, first = [], 0
    for piece in weight.pieces:
        own = None if bias is None else bias[first : first + len(piece)]
        outs.append(_linear(x, piece, own))
        first += len(piece)
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)


def gated_linear(x: Tensor, weight: CodedMatrix, activation: str) -> Tensor:
    """x [n, in], weight of gate and up [2·out, in] → activation(gate)·up [n, out]."""
    if len(x) == 1 and len(weight.pieces) == 1:
        return one_row(x, weight.pieces[0], None, one_row_tile(weight.pieces[0], gated=True), activation)
    return activate(linear(x, weight, None), activation, gated=True)


def look_up(tokens: Tensor, weight: CodedMatrix, dtype: torch.dtype) -> Tensor:
    """Rows of a matrix of one piece, widened: [tokens, columns]."""
    (piece,) = weight.pieces
    out = torch.empty(len(tokens), piece.columns, dtype=dtype, device=tokens.device)
    _widen(piece, out, tokens)
    return out


def widen(piece: CodedRows, dtype: torch.dtype) -> Tensor:
    out = torch.empty(len(piece), piece.columns, dtype=dtype, device=piece.codes.device)
    _widen(piece, out, None)
    return out


def _linear(x: Tensor, piece: CodedRows, bias: Tensor | None) -> Tensor:
    if len(x) == 1:
        return one_row(x, piece, bias, one_row_tile(piece))
    if len(x) <= MOST_ROWS:
        return few_rows(x, piece, bias, few_rows_tile(len(x), piece))
    return F.linear(x, widen(piece, x.dtype), bias)


class OneRowTile(NamedTuple):
    rows: int
    columns: int
    warps: int
    stages: int


class FewRowsTile(NamedTuple):
    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int
    swapped: bool = False  # the weights are the first operand


def one_row_tile(piece: CodedRows, gated: bool = False) -> OneRowTile:
    """Measured on an H200."""
    is_four, is_tall = piece.arguments["FOUR"], len(piece) >= 8192
    if gated:
        return OneRowTile(4, 1024, 2, 3) if is_four else OneRowTile(2, 1024, 4, 3)
    if is_tall:
        return OneRowTile(4, 1024, 2, 3)
    return OneRowTile(1, 2048, 4, 3) if is_four else OneRowTile(2, 1024, 4, 3)


def few_rows_tile(count: int, piece: CodedRows) -> FewRowsTile:
    rows, is_four = len(piece), bool(piece.arguments["FOUR"])
    if rows < 4096:  # a small model: tiles that are small enough for every processor to have one
        return FewRowsTile(16, 32, 128, 2, 5) if count <= 16 else FewRowsTile(min(_tokens(count), 64), 32, 128, 4, 3)
    if count <= 16:
        return FewRowsTile(16, 128, 128, 4, 3)
    if count <= 32:
        return FewRowsTile(32, 128, 128, 8, 3) if rows <= 4096 else FewRowsTile(32, 128, 64, 4, 4)
    if count <= 64:
        return FewRowsTile(64, 128, 128, 8, 3, swapped=True) if is_four else FewRowsTile(64, 64, 128, 4, 3)
    return FewRowsTile(128, 128, 64, 8, 3, is_four)


def num_splits(piece: CodedRows, count: int, tile: FewRowsTile) -> int:
    """So that every processor has some of it, and none less than is worth being added up."""
    programs = triton.cdiv(len(piece), tile.rows) * triton.cdiv(count, tile.tokens)
    if programs >= (512 if count <= 32 else 200):
        return 1
    return max(1, min(4 if count <= 16 or programs >= 64 else 8, piece.columns // (2 * tile.columns)))


def _tokens(count: int) -> int:
    return max(16, triton.next_power_of_2(count))


def one_row(x: Tensor, piece: CodedRows, bias: Tensor | None, tile: OneRowTile, gated_by: str | None = None) -> Tensor:
    arguments = dict(piece.arguments)
    rows = len(piece) if gated_by is None else len(piece) // 2
    arguments["rows"] = rows
    out = torch.empty(1, rows, dtype=x.dtype, device=x.device)
    _one_row_kernel[(triton.cdiv(rows, tile.rows),)](
        x, piece.codes if bias is None else bias, out, **arguments,
        BLOCK_N=tile.rows, GROUPS=tile.columns // piece.group, HAS_BIAS=bias is not None,
        GATED=gated_by is not None, KIND=0 if gated_by is None else ACTIVATIONS[gated_by],
        num_warps=tile.warps, num_stages=tile.stages, **OVERLAP,
    )  # fmt: skip
    return out


def few_rows(x: Tensor, piece: CodedRows, bias: Tensor | None, tile: FewRowsTile, splits: int | None = None) -> Tensor:
    count, rows = len(x), len(piece)
    splits = splits or num_splits(piece, count, tile)
    out = torch.empty(count, rows, dtype=x.dtype, device=x.device)
    parts = out if splits == 1 else torch.empty(splits, count, rows, dtype=torch.float32, device=x.device)
    unused = piece.codes
    _few_rows_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(count, tile.tokens), splits)](
        x, unused if bias is None else bias, parts, count, x.stride(0), rows, **piece.arguments,
        BLOCK_M=tile.tokens, BLOCK_N=tile.rows, GROUPS=tile.columns // piece.group, SWAPPED=tile.swapped,
        SPLIT=splits > 1, HAS_BIAS=bias is not None and splits == 1,
        num_warps=tile.warps, num_stages=tile.stages, **OVERLAP,
    )  # fmt: skip
    if splits > 1:
        add_up(parts, bias, out)
    return out


def add_up(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """parts [splits, count, rows] → out [count, rows], and the bias with it."""
    splits, count, rows = parts.shape
    _add_up_kernel[(triton.cdiv(count * rows, 512),)](
        parts, parts if bias is None else bias, out, rows, count * rows, SPLITS=splits,
        HAS_BIAS=bias is not None, BLOCK=512, num_warps=4, **OVERLAP,
    )  # fmt: skip


def _widen(piece: CodedRows, out: Tensor, which: Tensor | None) -> None:
    block, groups = (8, 512 // piece.group) if which is None else (1, 1024 // piece.group)
    grid = (triton.cdiv(len(out), block), triton.cdiv(piece.arguments["groups"], groups))
    _widen_kernel[grid](
        piece.codes if which is None else which, out, out.stride(0), **piece.arguments,
        BLOCK_N=block, GROUPS=groups, CHOSEN=which is not None, num_warps=4, **OVERLAP,
    )  # fmt: skip
