"""Codes and scales of quantised weights, on numpy alone: what numbers they stand for, and how they are cut and packed.

value = scale · code, or scale · (code + offset) + minimum. A scale is that of a row, or of a row and a group of its
columns. Names say how: bits of a code, `g` for scales in one float16 or `k` for GGUF's K types, whose scales are a
float16 of 256 columns times an int8 of the group, then the columns of a group, and `min` where groups have a minimum:

    int8-g32      q8_0, q5_0, iq4_nl; what we quantise to 8 bits ourselves
    int8-g32-min  q5_1
    int8-k32-min  q5_K: the minimum is minus a float16 times an int8
    int8-k16      q6_K, q3_K
    int4-g32      q4_0, the ternary types; what we quantise to 4 bits ourselves
    int4-g32-min  q4_1    codes of 0 to 15 are kept as -8 to 7: offset 8
    int4-k32-min  q4_K    the same
    fp4-e32       MXFP4: a code is the four bits of a float (sign, two of exponent, one of fraction), a scale the
                  exponent of a power of two
    int8-cells    a float32 per row: of earlier releases

Where bytes lie is told in `layouts`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int8]

GROUP = 32  # to a multiple of which columns are padded
NEST = 256  # columns that share the float16 part of a nested scale
ROW_COLUMNS = 64  # to a multiple of which those of int8-cells are padded
_HALF, _BYTE, _FLOAT, _EXPONENT = np.dtype("<f2"), np.dtype("i1"), np.dtype("<f4"), np.dtype("u1")
# Twice what the four bits of fp4 stand for, which is whole
_FP4_TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


class Form(NamedTuple):
    """What a layout's name says."""

    bits: int = 8
    group: int = 32  # columns; 0 = the whole row
    nested: bool = False
    minimum: bool = False
    floats: bool = False  # codes are small floats, scales powers of two


FORMS = {
    "int8-g32": Form(),
    "int8-g32-min": Form(minimum=True),
    "int8-k32-min": Form(nested=True, minimum=True),
    "int8-k16": Form(group=16, nested=True),
    "int4-g32": Form(bits=4),
    "int4-g32-min": Form(bits=4, minimum=True),
    "int4-k32-min": Form(bits=4, nested=True, minimum=True),
    "fp4-e32": Form(bits=4, floats=True),
    "int8-cells": Form(group=0),
    "int4-cells": Form(bits=4),  # an earlier name
}
CODINGS = tuple(FORMS)


class Quantised(NamedTuple):
    codes: Codes  # [rows, padded columns]
    scales: tuple[Array, ...]  # each [rows, n]: `Coding.parts` says which

    def rows(self, own: slice) -> Quantised:
        return Quantised(self.codes[own], tuple(part[own] for part in self.scales))


class Part(NamedTuple):
    """One of the arrays of scales."""

    dtype: np.dtype[Any]
    count: int  # type: ignore[assignment]  # per row
    columns: int  # that share one


class Coding:
    """A layout's codes for rows of so many columns."""

    def __init__(self, layout: str, columns: int) -> None:
        self.form = form = FORMS[layout]
        self.columns = columns
        self.padded = _up(columns, GROUP if form.group else ROW_COLUMNS)
        self.row_bytes = self.padded * form.bits // 8
        self.offset = 8 if form.bits == 4 and form.minimum else 0
        self.parts = _parts(form, columns, self.padded)
        self.scale_bytes = sum(part.dtype.itemsize * part.count for part in self.parts)  # of a row

    @property
    def unit(self) -> int:
        """Columns at whose multiples rows may be cut."""
        return NEST if self.form.nested else self.form.group or 1

    def quantise(self, values: Float32) -> Quantised:
        """To the nearest codes; only of the two layouts that we quantise to ourselves."""
        assert self.form in (FORMS["int8-g32"], FORMS["int4-g32"]), "codes of this layout come from others"
        grouped = np.pad(values, ((0, 0), (0, self.padded - self.columns))).reshape(len(values), -1, GROUP)
        codes, scales = _nearest_8(grouped) if self.form.bits == 8 else _nearest_4(grouped)
        return Quantised(codes.reshape(len(values), -1), (scales,))

    def dequantise(self, quantised: Quantised) -> Float32:
        """In float32, in the order in which GGUF's own package computes."""
        form, rows = self.form, len(quantised.codes)
        codes = _FP4_TWICE[quantised.codes & 15] if form.floats else quantised.codes
        grouped = codes.reshape(rows, -1, form.group or self.padded).astype(np.float32, copy=False)
        factors = self._factors(quantised.scales)
        values = factors[0] * (grouped + np.float32(self.offset) if self.offset else grouped)
        if form.minimum:
            values = values + factors[1]
        return np.ascontiguousarray(values.reshape(rows, -1)[:, : self.columns])

    def _factors(self, scales: tuple[Array, ...]) -> list[Float32]:
        """Scale and, where there is one, minimum of each row and group: [rows, groups, 1]."""
        if self.form.floats:
            return [_half_powers(scales[0])[:, :, None]]
        wide = [part.astype(np.float32) for part in scales]
        if self.form.nested:
            kinds, groups = len(wide) // 2, wide[-1].shape[1]
            spread = [np.repeat(part, NEST // self.form.group, axis=1)[:, :groups] for part in wide[:kinds]]
            wide = [part * step for part, step in zip(spread, wide[kinds:], strict=True)]
            wide[1:] = [-minimum for minimum in wide[1:]]
        return [part[:, :, None] for part in wide]

    def part(self, whole: Quantised, rows: slice, columns: slice) -> Quantised | None:
        """None where columns are cut within a group."""
        if columns.start % self.unit or (columns.stop % self.unit and columns.stop != self.columns):
            return None
        end = self.padded if columns.stop == self.columns else columns.stop
        scales = [
            scale[rows, columns.start // part.columns : math.ceil(end / part.columns)]
            for scale, part in zip(whole.scales, self.parts, strict=True)
        ]
        return Quantised(whole.codes[rows, columns.start : end], tuple(scales))

    def pack(self, codes: Codes) -> Array:
        """Bytes of rows [rows, row_bytes], not in cells yet."""
        if self.form.bits == 8:
            return np.pad(codes, ((0, 0), (0, self.padded - codes.shape[1]))).view(np.uint8)
        grouped = np.ascontiguousarray(codes).view(np.uint8).reshape(len(codes), -1, GROUP)
        low, high = grouped[:, :, : GROUP // 2], grouped[:, :, GROUP // 2 :]
        return np.ascontiguousarray((low & np.uint8(15)) | (high << np.uint8(4))).reshape(len(codes), -1)

    def unpack(self, packed: Array) -> Codes:
        if self.form.bits == 8:
            return packed.view(np.int8)
        grouped = packed.reshape(len(packed), -1, GROUP // 2)
        high = grouped.view(np.int8) >> np.int8(4)
        low = (grouped << np.uint8(4)).view(np.int8) >> np.int8(4)
        codes: Codes = np.concatenate([low, high], axis=2).reshape(len(packed), -1)
        return codes

    def join_scales(self, scales: tuple[Array, ...]) -> Array:
        """Bytes of rows [rows, scale_bytes]."""
        typed = [np.ascontiguousarray(scale, part.dtype) for scale, part in zip(scales, self.parts, strict=True)]
        return np.concatenate([scale.view(np.uint8).reshape(len(scale), -1) for scale in typed], axis=1)

    def split_scales(self, rows: Array) -> tuple[Array, ...]:
        """The same, back."""
        found, start = [], 0
        for part in self.parts:
            width = part.dtype.itemsize * part.count
            found.append(np.ascontiguousarray(rows[:, start : start + width]).view(part.dtype))
            start += width
        return tuple(found)


def _parts(form: Form, columns: int, padded: int) -> tuple[Part, ...]:
    kinds = 2 if form.minimum else 1
    if not form.group:
        return (Part(_FLOAT, 1, padded),)
    groups = padded // form.group
    if form.floats:
        return (Part(_EXPONENT, groups, form.group),)
    if not form.nested:
        return (Part(_HALF, groups, form.group),) * kinds
    nested = Part(_HALF, _up(columns, NEST) // NEST, NEST)
    return (nested,) * kinds + (Part(_BYTE, groups, form.group),) * kinds


def _half_powers(exponents: Array) -> Float32:
    """Half of 2^(exponent - 127), since codes count twice; the two smallest are subnormal."""
    wide = exponents.astype(np.uint32)
    bits = np.where(wide < 2, np.uint32(1 << 21) << wide, (wide - np.uint32(1)) << np.uint32(23))
    return bits.astype(np.uint32).view(np.float32)


def _nearest_8(grouped: Float32) -> tuple[Codes, Array]:
    """Symmetric. The scale is rounded to float16 before the codes are chosen, so that these are the nearest under the
    scale that is stored; a group of zeros has scale 0."""
    scales = _halves(np.abs(grouped).max(axis=2, initial=0.0) / 127)
    wide = scales.astype(np.float32)[:, :, None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(wide != 0, grouped / wide, 0.0)
    codes: Codes = np.rint(np.clip(np.nan_to_num(ratio, nan=0.0), -127, 127)).astype(np.int8)
    return codes, scales


def _nearest_4(grouped: Float32) -> tuple[Codes, Array]:
    """As llama.cpp makes q4_0: the largest number has code -8, ties go up. A scale of the smallest squared error was no
    better (docs/design/kernels.md)."""
    at = np.abs(np.nan_to_num(grouped)).argmax(axis=2)[:, :, None]
    scales = np.take_along_axis(grouped, at, axis=2)[:, :, 0] / np.float32(-8)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(scales != 0, np.float32(1) / scales, np.float32(0))[:, :, None]
        shifted = np.nan_to_num(grouped * inverse) + np.float32(8.5)
    codes: Codes = (np.clip(np.trunc(shifted), 0, 15) - 8).astype(np.int8)
    return codes, _halves(scales)


def _halves(values: Array) -> Array:
    most = np.finfo(np.float16).max
    return np.clip(values, -most, most).astype(_HALF)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
