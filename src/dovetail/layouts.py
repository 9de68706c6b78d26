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

int8-cells
          int8 codes, a float32 scale per row; value = code · scale, codes within ±127. Columns padded with zeros to a
          multiple of 64, rows (those of a stack count through) to one of 16, then the codes in cells of 16 rows by 4
          columns (what an instruction multiplies: a lane per row, four columns of it side by side):

              [rows/16][columns/4][16][4]

          Behind them the scales [rows], those of rows that were added 0.

int4-cells
          the same with two codes per byte and a float16 scale per row and group of 32 columns, to multiples of which
          columns are padded. Byte j of a group and row holds element j in its low and element j + 16 in its high
          half, in two's complement: -8 to 7, of which quantising here uses ±7. These bytes lie in cells of 16 rows by
          4 bytes, as those of int8; behind them the scales as [rows/16][groups][16].

int8, int4
          as earlier releases wrote them, row by row; still read. int8: codes [rows, columns], zeros up to a multiple of
          64 bytes, float32 scales [rows]. int4: bytes [rows, groups, 16] with each code + 8, zeros up to a multiple
          of 64 bytes, float16 scales [rows, groups]. Rows of a stack count through.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]

NUMPY: dict[str, np.dtype[Any]] = {
    "f64": np.dtype("<f8"),
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),  # numpy has none; the bits
}
LAYOUTS = ("plain", "amx-bf16", "int8", "int4")  # of models: what one asks for
CELLS = {"int8": "int8-cells", "int4": "int4-cells"}  # how the matrices of such a model are written
MATRIX_LAYOUTS = (*LAYOUTS, *CELLS.values())  # of matrices: what can be read
SCALE_ALIGNMENT = 64
GROUP = 32  # columns that share a scale in int4
TILE = 32  # rows and columns of a block of amx-bf16
CELL = 16  # rows of a cell
PACKED_BYTES = 2**21  # of values that are packed at a time
CELL_COLUMNS = 64  # to a multiple of which the columns of int8 cells are padded


def packed_bytes(layout: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Size in memory of a tensor of this shape."""
    if layout == "plain":
        return math.prod(shape) * NUMPY[dtype].itemsize
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if layout == "amx-bf16":
        return math.prod(shape[:-2]) * _up(shape[-2], TILE) * _up(columns, TILE) * 2
    coding = coding_of(layout, columns)
    if layout in CELLS.values():
        return _num_blocks(shape) * CELL * (coding.row_bytes + coding.groups * coding.scale_type.itemsize)
    width = columns if layout == "int8" else coding.row_bytes
    return _up(rows * width, SCALE_ALIGNMENT) + rows * coding.groups * coding.scale_type.itemsize


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
    assert layout in CELLS.values(), f"{layout} is read, not written"
    return _CellPacker(coding_of(layout, shape[-1]), math.prod(shape[:-1]))


def pack(layout: str, dtype: str, values: Float32) -> Array:
    """All bytes of a tensor at once."""
    making = packer(layout, dtype, values.shape)
    parts = [*making.rows(values.reshape(-1, values.shape[-1])), *making.finish()]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


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
    codes, scales = unpack_codes(layout, shape, data)
    return coding_of(layout, shape[-1]).dequantise(codes, scales).reshape(shape)


def unpack_codes(layout: str, shape: tuple[int, ...], data: memoryview) -> Quantised:
    """The codes and scales of a quantised layout, in order of rows."""
    coding = coding_of(layout, shape[-1])
    packed, scales = (_from_cells if layout in CELLS.values() else _from_rows)(coding, shape, data)
    return Quantised(coding.unpack(packed), scales)


def int4_rows(biased: Array, scales: Array) -> Array:
    """Bytes of the layout int4, out of those of its rows [rows, groups · 16] (each code + 8) and their scales."""
    codes = _bytes(biased)
    padding = np.zeros(-codes.size % SCALE_ALIGNMENT, np.uint8)
    return np.concatenate([codes, padding, _bytes(scales.astype("<f2", copy=False))])


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
    """Codes go out as they come, scales are kept to the end: 1/8 of the codes of int4, far less of int8."""

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
        scales = np.ascontiguousarray(quantised.scales, self._coding.scale_type).view(np.uint8)
        for block in self._blocks.take(np.concatenate([self._coding.pack(quantised.codes), scales], axis=1)):
            codes, scales = (np.ascontiguousarray(part) for part in (block[:, :width], block[:, width:]))
            self._scales.append(np.ascontiguousarray(_by_block(scales.view(self._coding.scale_type))))
            yield _bytes(_by_block(codes.view(np.uint32)))

    def finish(self) -> Iterator[Array]:
        self._blocks.finish()
        yield from (_bytes(scales) for scales in self._scales)


class Quantised(NamedTuple):
    codes: npt.NDArray[np.int8]  # [rows, columns], columns padded to groups where there are groups
    scales: Array  # float32 [rows, 1], or float16 [rows, groups]


class Int8:
    groups = 1
    scale_type = np.dtype("<f4")

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.row_bytes = _up(columns, CELL_COLUMNS)

    def quantise(self, values: Float32) -> Quantised:
        """Symmetric, to the nearest code; a row of zeros has scale 0."""
        scales = (np.abs(values).max(axis=1, initial=0.0) / 127).astype("<f4")[:, None]
        return Quantised(_nearest(values, scales, 127), scales)

    def dequantise(self, codes: npt.NDArray[np.int8], scales: Array) -> Float32:
        values: Float32 = codes.astype(np.float32) * scales
        return values

    def part(self, whole: Quantised, rows: slice, columns: slice) -> Quantised | None:
        return Quantised(whole.codes[rows, columns], whole.scales[rows])

    def pack(self, codes: npt.NDArray[np.int8]) -> Array:
        """Bytes of rows [rows, row_bytes], not in cells yet."""
        return np.pad(codes, ((0, 0), (0, self.row_bytes - self.columns))).view(np.uint8)

    def unpack(self, packed: Array) -> npt.NDArray[np.int8]:
        return packed.view(np.int8)[:, : self.columns]


class Int4:
    scale_type = np.dtype("<f2")

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.groups = -(-columns // GROUP)
        self.row_bytes = self.groups * GROUP // 2

    def quantise(self, values: Float32) -> Quantised:
        """Symmetric per group. The scale is rounded to float16 before the codes are chosen, so that these are the
        nearest under the scale that is stored; a group of zeros has scale 0."""
        padded = np.pad(values, ((0, 0), (0, self.groups * GROUP - self.columns)))
        grouped = padded.reshape(-1, self.groups, GROUP)
        scales = np.minimum(np.abs(grouped).max(axis=2, initial=0.0) / 7, np.finfo(np.float16).max).astype("<f2")
        codes = _nearest(grouped, scales.astype(np.float32)[:, :, None], 7)
        return Quantised(codes.reshape(len(values), -1), scales)

    def dequantise(self, codes: npt.NDArray[np.int8], scales: Array) -> Float32:
        grouped = codes.reshape(-1, self.groups, GROUP) * scales.astype(np.float32)[:, :, None]
        return np.ascontiguousarray(grouped.reshape(len(codes), -1)[:, : self.columns])

    def part(self, whole: Quantised, rows: slice, columns: slice) -> Quantised | None:
        """None where columns are cut within a group."""
        if columns.start % GROUP or (columns.stop % GROUP and columns.stop != self.columns):
            return None
        first, last = columns.start // GROUP, -(-columns.stop // GROUP)
        return Quantised(whole.codes[rows, first * GROUP : last * GROUP], whole.scales[rows, first:last])

    def pack(self, codes: npt.NDArray[np.int8]) -> Array:
        """Bytes of rows [rows, row_bytes], not in cells yet."""
        grouped = np.ascontiguousarray(codes).view(np.uint8).reshape(-1, self.groups, GROUP)
        low, high = grouped[:, :, : GROUP // 2], grouped[:, :, GROUP // 2 :]
        return np.ascontiguousarray((low & np.uint8(15)) | (high << np.uint8(4))).reshape(len(codes), -1)

    def unpack(self, packed: Array) -> npt.NDArray[np.int8]:
        grouped = packed.reshape(-1, self.groups, GROUP // 2)
        high = grouped.view(np.int8) >> np.int8(4)
        low = (grouped << np.uint8(4)).view(np.int8) >> np.int8(4)
        codes: npt.NDArray[np.int8] = np.concatenate([low, high], axis=2).reshape(len(packed), -1)
        return codes


Coding = Int8 | Int4


def coding_of(layout: str, columns: int) -> Coding:
    return Int8(columns) if layout.startswith("int8") else Int4(columns)


def codes_and_scales(layout: str, shape: tuple[int, int], data: memoryview) -> tuple[Array, Array]:
    """A matrix in cells as kernels take it, no copy: int8 codes [rows/16, 16 · columns] and float32 [rows], or pairs of
    int4 as uint8 [rows/16, 256 per group] and float16 [rows/16, groups, 16]."""
    coding, codes_shape = coding_of(layout, shape[-1]), shape_of_codes(layout, shape)
    size = math.prod(codes_shape)
    codes = np.frombuffer(data, np.int8 if isinstance(coding, Int8) else np.uint8, size)
    scales = np.frombuffer(data, coding.scale_type, codes_shape[0] * CELL * coding.groups, size)
    return codes.reshape(codes_shape), scales


def shape_of_codes(layout: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Of a matrix in cells, as kernels take it: blocks of rows, and bytes of one."""
    return _num_blocks(shape), CELL * coding_of(layout, shape[-1]).row_bytes


def to_cells(layout: str, shape: tuple[int, int], data: memoryview) -> memoryview:
    """A copy of a matrix that an earlier release wrote row by row (int8, int4), as this one writes it: same codes."""
    coding = coding_of(layout, shape[-1])
    packed, scales = _from_rows(coding, shape, data)
    codes = coding.pack(coding.unpack(packed))
    padding = ((0, -len(codes) % CELL), (0, 0))
    parts = [_by_block(np.pad(codes, padding).view(np.uint32)), _by_block(np.pad(scales, padding))]
    return memoryview(np.concatenate([_bytes(part) for part in parts]))


def _by_block(rows: Array) -> Array:
    """[rows, n] as [rows/16, n, 16]; there and, of [blocks, n, 16], back."""
    return rows.reshape(-1, CELL, rows.shape[-1]).transpose(0, 2, 1)


def _from_cells(coding: Coding, shape: tuple[int, ...], data: memoryview) -> tuple[Array, Array]:
    """Bytes of rows [rows, row_bytes] and scales [rows, groups]."""
    blocks, rows = _num_blocks(shape), math.prod(shape[:-1])
    size = blocks * CELL * coding.row_bytes
    words = np.frombuffer(data, np.uint32, size // 4).reshape(blocks, -1, CELL)
    lanes = np.frombuffer(data, coding.scale_type, blocks * CELL * coding.groups, size).reshape(blocks, -1, CELL)
    packed, scales = (
        np.ascontiguousarray(part.transpose(0, 2, 1).reshape(blocks * CELL, -1)[:rows]) for part in (words, lanes)
    )
    return packed.view(np.uint8), scales


def _from_rows(coding: Coding, shape: tuple[int, ...], data: memoryview) -> tuple[Array, Array]:
    """The same of a matrix as earlier releases wrote it."""
    rows = math.prod(shape[:-1])
    width = coding.columns if isinstance(coding, Int8) else coding.row_bytes
    packed = np.frombuffer(data, np.uint8, rows * width).reshape(rows, width)
    offset = _up(rows * width, SCALE_ALIGNMENT)
    scales = np.frombuffer(data, coding.scale_type, rows * coding.groups, offset).reshape(rows, coding.groups)
    return (packed if isinstance(coding, Int8) else packed ^ np.uint8(0x88)), scales


def _num_blocks(shape: tuple[int, ...]) -> int:
    return -(-math.prod(shape[:-1]) // CELL)


def _nearest(values: Float32, scales: Float32, limit: int) -> npt.NDArray[np.int8]:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(scales > 0, values / scales, 0.0)
    codes: npt.NDArray[np.int8] = np.rint(np.clip(np.nan_to_num(ratio, nan=0.0), -limit, limit)).astype(np.int8)
    return codes


def _widen(array: Array, dtype: str) -> Float32:
    if dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
