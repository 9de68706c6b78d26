"""How the elements of a weight lie in memory: packing and unpacking of every layout, on numpy alone.

Stands left of both `store`, which packs, and `engine`, which unpacks or multiplies what is packed. A weight is
[..., rows, columns] = [..., out, in]; leading dimensions (experts) are a stack of matrices. Bytes are little-endian.

plain     row-major, in the tensor's own type.

amx-bf16  bfloat16 in the order in which AMX tiles (TDPBF16PS) take their second operand. Each matrix of a stack for
          itself: rows padded with zeros to a multiple of 32, columns too, then the bits as the array

              [rows/32][columns/32][2][16][16][2]
               block    block       |   |   |   └ k: the two columns of a pair, side by side (VNNI)
                                    |   |   └ n: row within the tile
                                    |   └ p: pair of columns within the tile
                                    └ t: which half of the 32 rows

          so that element (r, c) is at [r//32][c//32][r%32//16][c%32//2][r%16][c%2]. A tile is 16 lines of 64 bytes,
          the two tiles of 32 rows lie side by side, and walking along the columns is walking along memory.

quantised layouts (`codings` says what their codes stand for)
          Rows (those of a stack count through) are padded with zeros to a multiple of 16, columns to one of 32, and the
          codes lie in cells of 16 rows by 4 bytes (what an instruction multiplies: a lane per row, four columns of it
          side by side):

              [rows/16][bytes of a row/4][16][4]

          8 bits: a byte is a code. 4 bits: byte j of 32 columns holds element j in its low and element j + 16 in its
          high half, in two's complement. Behind the codes a record of scales for every 16 rows: each of its parts as
          [n][16], one after the other. int8-cells: columns padded to a multiple of 64, scales f32 [rows].

int8, int4
          as earlier releases wrote them, row by row; still read. int8: codes [rows, columns], zeros up to a multiple of
          64 bytes, float32 scales [rows]. int4: bytes [rows, groups, 16] with each code + 8, zeros up to a multiple
          of 64 bytes, float16 scales [rows, groups]. Rows of a stack count through.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dovetail.codings import CODINGS, Array, Coding, Float32, Quantised

NUMPY: dict[str, np.dtype[Any]] = {
    "f64": np.dtype("<f8"),
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),  # numpy has none; the bits
}
GGUF = "gguf"  # every matrix in the layout that holds its GGUF blocks to the bit
LAYOUTS = ("plain", "amx-bf16", "int8", "int4", GGUF)  # of models: what one asks for
CELLS = {"int8": "int8-g32", "int4": "int4-g32"}  # how the matrices of such a model are written
BY_ROWS = {"int8": "int8-cells", "int4": "int4-g32"}  # of matrices that earlier releases wrote row by row: in cells
OUTDATED = (*BY_ROWS, "int8-cells")  # of matrices: read, written better now
MATRIX_LAYOUTS = ("plain", "amx-bf16", *BY_ROWS, *CODINGS)  # of matrices: what can be read
SCALE_ALIGNMENT = 64
TILE = 32  # rows and columns of a block of amx-bf16
CELL = 16  # rows of a cell
PACKED_BYTES = 2**21  # of values that are packed at a time


def packed_bytes(layout: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Size in memory of a tensor of this shape."""
    if layout == "plain":
        return math.prod(shape) * NUMPY[dtype].itemsize
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if layout == "amx-bf16":
        return math.prod(shape[:-2]) * _up(shape[-2], TILE) * _up(columns, TILE) * 2
    coding = coding_of(layout, columns)
    if layout in CODINGS:
        return _num_blocks(shape) * CELL * (coding.row_bytes + coding.scale_bytes)
    width = columns if layout == "int8" else coding.row_bytes
    return _up(rows * width, SCALE_ALIGNMENT) + rows * coding.scale_bytes


class Packer(Protocol):
    """Makes a tensor's bytes while its rows arrive, in order, in as many calls as one likes."""

    def rows(self, values: Float32) -> Iterator[Array]:
        """Bytes (uint8) that are settled by these rows."""

    def coded_rows(self, quantised: Quantised) -> Iterator[Array]:
        """The same of rows that come with codes and scales, which stay as they are. Cells only."""

    def finish(self) -> Iterator[Array]:
        """The rest."""


def packer(layout: str, dtype: str, shape: tuple[int, ...]) -> Packer:
    if layout == "plain":
        return _PlainPacker(dtype)
    if layout == "amx-bf16":
        return _TilePacker(shape)
    assert layout in CODINGS, f"{layout} is read, not written"
    return _CellPacker(coding_of(layout, shape[-1]), math.prod(shape[:-1]))


def pack_codes(layout: str, shape: tuple[int, ...], quantised: Quantised) -> Array:
    """The same of codes and scales, which stay as they are."""
    making = packer(layout, "f32", shape)
    return np.concatenate([*making.coded_rows(quantised), *making.finish()])


def unpack(layout: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> Float32:
    """The values in float32, which holds those of every other type here but f64 exactly."""
    if layout == "plain":
        return _widen(np.frombuffer(data, NUMPY[dtype]), dtype).reshape(shape)
    if layout == "amx-bf16":
        return _widen(unpack_tiles(shape, data), "bf16")
    return coding_of(layout, shape[-1]).dequantise(unpack_codes(layout, shape, data)).reshape(shape)


def unpack_codes(layout: str, shape: tuple[int, ...], data: memoryview) -> Quantised:
    """The codes and scales of a quantised layout, in order of rows."""
    coding = coding_of(layout, shape[-1])
    packed, scales = (_from_cells if layout in CODINGS else _from_rows)(coding, shape, data)
    return Quantised(coding.unpack(packed), scales)


def unpack_tiles(shape: tuple[int, ...], data: memoryview) -> npt.NDArray[np.uint16]:
    """The bits of amx-bf16, row-major and without the padding."""
    *stack, rows, columns = shape
    bits = np.frombuffer(data, "<u2").reshape(*stack, -(-rows // TILE), -(-columns // TILE), 2, 16, 16, 2)
    depth = len(stack)
    order = [*range(depth), *(depth + axis for axis in (0, 2, 4, 1, 3, 5))]
    padded = bits.transpose(order).reshape(*stack, _up(rows, TILE), _up(columns, TILE))
    return np.ascontiguousarray(padded[..., :rows, :columns])


def bfloat16_bits(values: Float32) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even. A NaN keeps its sign and top bits and is made quiet: rounding up the low half
    of one could otherwise carry into infinity or wrap to zero."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    upper = bits >> 16
    rounded = ((bits + 0x7FFF + (upper & 1)) >> 16).astype(np.uint16)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if is_nan.any():
        rounded[is_nan] = (upper[is_nan] | 0x0040).astype(np.uint16)
    return rounded


def narrow(values: Float32, dtype: str) -> Array:
    """In another type, rounded to nearest even; bfloat16 as the uint16 of its bits. What float16 would make
    infinite is refused."""
    if dtype == "bf16":
        return bfloat16_bits(values)
    with np.errstate(over="ignore"):
        narrowed: Array = values.astype(NUMPY[dtype], copy=False)
    if dtype == "f16" and np.isinf(narrowed).any():
        beyond = values[np.isinf(narrowed) & np.isfinite(values)]
        if len(beyond):
            raise OverflowError(f"{beyond[0]:g} is beyond float16")
    return narrowed


class _PlainPacker:
    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def rows(self, values: Float32) -> Iterator[Array]:
        yield _bytes(narrow(values, self._dtype))

    def coded_rows(self, quantised: Quantised) -> Iterator[Array]:
        raise NotImplementedError("floats have no codes")

    def finish(self) -> Iterator[Array]:
        return iter(())


class _Blocks:
    """Whole blocks of rows, and what ends a matrix, filled up with zeros; keeps less than a block until it is full."""

    def __init__(self, block_rows: int, matrix_rows: int) -> None:
        self._block_rows = block_rows
        self._matrix_rows = matrix_rows
        self._held: Array | None = None
        self._row = 0  # of the matrix, where the held rows begin

    def take(self, rows: Array) -> Iterator[Array]:
        """Not more than some MiB at a time: who packs them makes several copies."""
        held = rows if self._held is None or len(self._held) == 0 else np.concatenate([self._held, rows])
        most = max(PACKED_BYTES // (rows.shape[1] * rows.itemsize), self._block_rows)
        while (take := self._settled(min(len(held), most))) > 0:
            yield np.pad(held[:take], ((0, -take % self._block_rows), (0, 0)))
            held = held[take:]
            self._row = (self._row + take) % self._matrix_rows
        self._held = held.copy()

    def finish(self) -> None:
        assert self._held is None or len(self._held) == 0, "a matrix ended early"

    def _settled(self, available: int) -> int:
        """Rows that can be written: whole blocks, and whatever ends the matrix; 0 = none yet."""
        left = self._matrix_rows - self._row
        return left if available >= left else available - available % self._block_rows


class _TilePacker:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self._blocks = _Blocks(TILE, shape[-2])
        self._padded_columns = _up(shape[-1], TILE)

    def rows(self, values: Float32) -> Iterator[Array]:
        bits = bfloat16_bits(values)
        bits = np.pad(bits, ((0, 0), (0, self._padded_columns - bits.shape[1])))
        yield from (self._tiles(rows) for rows in self._blocks.take(bits))

    def coded_rows(self, quantised: Quantised) -> Iterator[Array]:
        raise NotImplementedError("floats have no codes")

    def finish(self) -> Iterator[Array]:
        self._blocks.finish()
        return iter(())

    def _tiles(self, rows: Array) -> Array:
        blocks = rows.reshape(len(rows) // TILE, 2, 16, self._padded_columns // TILE, 16, 2)
        return _bytes(np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 2, 5)))


class _CellPacker:
    """Codes go out as they come, scales are kept to the end: an eighth of the codes of int4, half that of int8."""

    def __init__(self, coding: Coding, num_rows: int) -> None:
        self._coding = coding
        self._blocks = _Blocks(CELL, num_rows)
        self._scales: list[Array] = []

    def rows(self, values: Float32) -> Iterator[Array]:
        step = max(PACKED_BYTES // (4 * values.shape[1]), 1)
        for start in range(0, len(values), step):
            yield from self.coded_rows(self._coding.quantise(values[start : start + step]))

    def coded_rows(self, quantised: Quantised) -> Iterator[Array]:
        """Of each row its codes and, behind them, its scales go through the blocks."""
        width = self._coding.row_bytes
        codes, scales = self._coding.pack(quantised.codes), self._coding.join_scales(quantised.scales)
        for block in self._blocks.take(np.concatenate([codes, scales], axis=1)):
            self._scales.append(_scale_records(self._coding, block[:, width:]))
            yield _bytes(_by_block(np.ascontiguousarray(block[:, :width]).view(np.uint32)))

    def finish(self) -> Iterator[Array]:
        self._blocks.finish()
        yield from self._scales


def coding_of(layout: str, columns: int) -> Coding:
    return Coding(BY_ROWS.get(layout, layout), columns)


def to_cells(layout: str, shape: tuple[int, int], data: memoryview) -> memoryview:
    """A copy of a matrix that an earlier release wrote row by row (int8, int4), in cells: same codes."""
    making = packer(BY_ROWS[layout], "f32", shape)
    parts = [*making.coded_rows(unpack_codes(layout, shape, data)), *making.finish()]
    return np.concatenate(parts).data


def _scale_records(coding: Coding, rows: Array) -> Array:
    """Of scales as bytes of rows, a multiple of 16: records of 16 rows, one after the other."""
    parts = [_by_block(part) for part in coding.split_scales(rows)]  # [blocks, n, 16]
    flat = [np.ascontiguousarray(part).reshape(len(part), -1).view(np.uint8) for part in parts]
    return _bytes(np.concatenate(flat, axis=1))


def _by_block(rows: Array) -> Array:
    """[rows, n] as [rows/16, n, 16]"""
    return rows.reshape(-1, CELL, rows.shape[-1]).transpose(0, 2, 1)


def _by_row(blocks: Array, rows: int) -> Array:
    """[rows/16, n, 16] as [rows, n]"""
    return np.ascontiguousarray(blocks.transpose(0, 2, 1).reshape(-1, blocks.shape[1])[:rows])


def _from_cells(coding: Coding, shape: tuple[int, ...], data: memoryview) -> tuple[Array, tuple[Array, ...]]:
    """Bytes of rows [rows, row_bytes], and scales."""
    blocks, rows = _num_blocks(shape), math.prod(shape[:-1])
    size = blocks * CELL * coding.row_bytes
    words = np.frombuffer(data, np.uint32, size // 4).reshape(blocks, -1, CELL)
    records = np.frombuffer(data, np.uint8, blocks * CELL * coding.scale_bytes, size).reshape(blocks, -1)
    scales, start = [], 0
    for part in coding.parts:
        width = CELL * part.count * part.dtype.itemsize
        lanes = np.ascontiguousarray(records[:, start : start + width]).view(part.dtype)
        scales.append(_by_row(lanes.reshape(blocks, part.count, CELL), rows))
        start += width
    return _by_row(words, rows).view(np.uint8), tuple(scales)


def _from_rows(coding: Coding, shape: tuple[int, ...], data: memoryview) -> tuple[Array, tuple[Array, ...]]:
    """The same of a matrix as earlier releases wrote it."""
    rows, is_byte = math.prod(shape[:-1]), coding.form.bits == 8
    width = coding.columns if is_byte else coding.row_bytes
    packed = np.frombuffer(data, np.uint8, rows * width).reshape(rows, width)
    (part,), offset = coding.parts, _up(rows * width, SCALE_ALIGNMENT)
    scales = np.frombuffer(data, part.dtype, rows * part.count, offset).reshape(rows, part.count)
    if is_byte:
        return np.pad(packed, ((0, 0), (0, coding.padded - width))), (scales,)
    return packed ^ np.uint8(0x88), (scales,)


def _num_blocks(shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape[:-1]) // CELL)


def _widen(array: Array, dtype: str) -> Float32:
    if dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
