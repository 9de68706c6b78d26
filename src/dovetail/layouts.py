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

int8      int8 codes [rows, columns], row-major, then zeros up to a multiple of 64 bytes, then a float32 scale per
          row. value = code · scale, codes within ±127. Rows of a stack count through.

int4      columns padded with zeros to groups of 32. Nibbles [rows, groups, 16], then zeros up to a multiple of 64
          bytes, then float16 scales [rows, groups]. Byte j of a group holds element j in its low and element j + 16
          in its high nibble, each as code + 8; value = code · scale, codes within ±7. Rows of a stack count through.
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
LAYOUTS = ("plain", "amx-bf16", "int8", "int4")
SCALE_ALIGNMENT = 64
GROUP = 32  # columns that share a scale in int4
TILE = 32  # rows and columns of a block of amx-bf16


def packed_bytes(layout: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Size in memory of a tensor of this shape."""
    if layout == "plain":
        return math.prod(shape) * NUMPY[dtype].itemsize
    rows, columns = math.prod(shape[:-1]), shape[-1]
    if layout == "amx-bf16":
        return math.prod(shape[:-2]) * _up(shape[-2], TILE) * _up(columns, TILE) * 2
    if layout == "int8":
        return _up(rows * columns, SCALE_ALIGNMENT) + 4 * rows
    assert layout == "int4", layout
    groups = -(-columns // GROUP)
    return _up(rows * groups * GROUP // 2, SCALE_ALIGNMENT) + 2 * rows * groups


class Packer(Protocol):
    """Makes a tensor's bytes while its rows arrive, in order, in as many calls as one likes."""

    def rows(self, values: Float32) -> Iterator[Array]:
        """Bytes (uint8) that are settled by these rows."""

    def finish(self) -> Iterator[Array]:
        """The rest."""


def packer(layout: str, dtype: str, shape: tuple[int, ...]) -> Packer:
    if layout == "plain":
        return _PlainPacker(dtype)
    if layout == "amx-bf16":
        return _TilePacker(shape)
    return _ScaledPacker(quantised_as(layout, shape[-1]))


def pack(layout: str, dtype: str, values: Float32) -> Array:
    """All bytes of a tensor at once."""
    making = packer(layout, dtype, values.shape)
    parts = [*making.rows(values.reshape(-1, values.shape[-1])), *making.finish()]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def unpack(layout: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> Float32:
    """The values in float32, which holds those of every other type here but f64 exactly."""
    if layout == "plain":
        return _widen(np.frombuffer(data, NUMPY[dtype]), dtype).reshape(shape)
    if layout == "amx-bf16":
        return _widen(unpack_tiles(shape, data), "bf16")
    quantised = quantised_as(layout, shape[-1])
    codes, scales = quantised.split(math.prod(shape[:-1]), data)
    return quantised.dequantise(quantised.unpack(codes), scales).reshape(shape)


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
    """In another type, rounded to nearest even; bfloat16 as the uint16 of its bits."""
    return bfloat16_bits(values) if dtype == "bf16" else values.astype(NUMPY[dtype], copy=False)


class _PlainPacker:
    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    def rows(self, values: Float32) -> Iterator[Array]:
        yield _bytes(narrow(values, self._dtype))

    def finish(self) -> Iterator[Array]:
        return iter(())


class _TilePacker:
    """Keeps at most 31 rows until their block is full or their matrix ends."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._matrix_rows, columns = shape[-2:]
        self._padded_columns = _up(columns, TILE)
        self._held = np.zeros((0, self._padded_columns), np.uint16)
        self._row = 0  # of the matrix, where the held rows begin

    def rows(self, values: Float32) -> Iterator[Array]:
        bits = bfloat16_bits(values)
        bits = np.pad(bits, ((0, 0), (0, self._padded_columns - bits.shape[1])))
        held = np.concatenate([self._held, bits])
        while len(held) >= (take := self._settled(len(held))) > 0:
            yield self._tiles(held[:take])
            held = held[take:]
            self._row = (self._row + take) % self._matrix_rows
        self._held = held.copy()

    def finish(self) -> Iterator[Array]:
        assert len(self._held) == 0, "a matrix ended early"
        return iter(())

    def _settled(self, available: int) -> int:
        """Rows that can be written: whole blocks, and whatever ends the matrix; 0 = none yet."""
        left = self._matrix_rows - self._row
        return left if available >= left else available - available % TILE

    def _tiles(self, rows: Array) -> Array:
        rows = np.pad(rows, ((0, -len(rows) % TILE), (0, 0)))
        blocks = rows.reshape(len(rows) // TILE, 2, 16, self._padded_columns // TILE, 16, 2)
        return _bytes(np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 2, 5)))


class Quantised(NamedTuple):
    codes: npt.NDArray[np.int8]  # [rows, columns], columns padded where the layout pads
    scales: Array  # float32 [rows], or float16 [rows, groups]


class Int8:
    def __init__(self, columns: int) -> None:
        self.columns = columns

    def quantise(self, values: Float32) -> Quantised:
        """Symmetric, to the nearest code; a row of zeros has scale 0."""
        scales = (np.abs(values).max(axis=1, initial=0.0) / 127).astype(np.float32)
        return Quantised(_nearest(values, scales[:, None], 127), scales)

    def dequantise(self, codes: npt.NDArray[np.int8], scales: Array) -> Float32:
        values: Float32 = codes.astype(np.float32) * scales[:, None]
        return values

    def pack(self, codes: npt.NDArray[np.int8]) -> Array:
        return _bytes(codes)

    def unpack(self, data: Array) -> npt.NDArray[np.int8]:
        return data.view(np.int8).reshape(-1, self.columns)

    def split(self, rows: int, data: memoryview) -> tuple[Array, Array]:
        """Codes (still packed) and scales as views of the bytes of a tensor."""
        size = rows * self.columns
        codes = np.frombuffer(data, np.uint8, size)
        return codes, np.frombuffer(data, "<f4", rows, _up(size, SCALE_ALIGNMENT))


class Int4:
    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.groups = -(-columns // GROUP)

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

    def pack(self, codes: npt.NDArray[np.int8]) -> Array:
        grouped = (codes + np.int8(8)).view(np.uint8).reshape(-1, self.groups, GROUP)
        return _bytes(grouped[:, :, : GROUP // 2] | grouped[:, :, GROUP // 2 :] << np.uint8(4))

    def unpack(self, data: Array) -> npt.NDArray[np.int8]:
        grouped = data.reshape(-1, self.groups, GROUP // 2)
        nibbles = np.concatenate([grouped & np.uint8(15), grouped >> np.uint8(4)], axis=2)
        codes: npt.NDArray[np.int8] = nibbles.view(np.int8).reshape(-1, self.groups * GROUP) - np.int8(8)
        return codes

    def split(self, rows: int, data: memoryview) -> tuple[Array, Array]:
        """Codes (still packed) and scales as views of the bytes of a tensor."""
        count = rows * self.groups
        size = count * GROUP // 2
        scales = np.frombuffer(data, "<f2", count, _up(size, SCALE_ALIGNMENT))
        return np.frombuffer(data, np.uint8, size), scales.reshape(rows, self.groups)


def codes_and_scales(layout: str, shape: tuple[int, int], data: memoryview) -> tuple[Array, Array]:
    """A packed matrix as kernels take it, no copy: int8 [rows, columns] and float32 [rows], or pairs of int4 as
    uint8 [rows, 16 per group] and float16 [rows, groups]."""
    rows, columns = shape
    codes, scales = quantised_as(layout, columns).split(rows, data)
    return codes.view(np.int8 if layout == "int8" else np.uint8).reshape(rows, -1), scales


def quantised_as(layout: str, columns: int) -> Int8 | Int4:
    assert layout in ("int8", "int4"), layout
    return Int8(columns) if layout == "int8" else Int4(columns)


class _ScaledPacker:
    """Codes go out as they come, scales are kept to the end: 1/8 of the nibbles of int4, far less of int8."""

    def __init__(self, layout: Int8 | Int4) -> None:
        self._layout = layout
        self._scales: list[Array] = []
        self._written = 0

    def rows(self, values: Float32) -> Iterator[Array]:
        quantised = self._layout.quantise(values)
        self._scales.append(quantised.scales)
        data = self._layout.pack(quantised.codes)
        self._written += data.size
        yield data

    def finish(self) -> Iterator[Array]:
        yield np.zeros(-self._written % SCALE_ALIGNMENT, np.uint8)
        yield from (_bytes(scales) for scales in self._scales)


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
