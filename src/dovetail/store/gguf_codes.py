"""GGUF's blocks as codes of ours, where both say the same: nothing is rounded, bits only move.

Q4_0          32 columns share a float16. A byte has the code + 8 of column j in its lower and of j + 16 in its upper
              half: the layout int4, but that scale and codes of a block lie side by side.
TQ1_0, TQ2_0  256 columns share a float16, codes are -1, 0 and 1: int4 with the same scale for eight groups.

Scales may be negative (those of Q4_0 mostly are: its largest number has code -8). Others have no such form: Q8_0 has a
scale for 32 columns where int8 has one for a row, Q4_1 adds an offset, the K types scale by more than a float16 holds.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from dovetail.layouts import GROUP

Kind = gguf.GGMLQuantizationType
Array = npt.NDArray[Any]
_TERNARY = frozenset({Kind.TQ1_0, Kind.TQ2_0})
INT4_KINDS = frozenset({Kind.Q4_0}) | _TERNARY


def int4_codes(data: Array, kind: Kind) -> tuple[Array, Array]:
    """Of rows of blocks [rows, bytes]: bytes [rows, groups · 16], each code + 8, and float16 scales [rows, groups]."""
    blocks = np.ascontiguousarray(data).reshape(len(data), -1, gguf.GGML_QUANT_SIZES[kind][1])
    if kind in _TERNARY:
        return _ternary(blocks, kind)
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0]
    return np.ascontiguousarray(blocks[:, :, 2:]).reshape(len(data), -1), scales


def _ternary(blocks: Array, kind: Kind) -> tuple[Array, Array]:
    rows = len(blocks)
    scales = np.ascontiguousarray(blocks[:, :, -2:]).view("<f2")[:, :, 0]
    ones = blocks.copy()
    ones[:, :, -2:] = np.array([1.0], "<f2").view(np.uint8)  # with a scale of one, values are codes
    codes = gguf.quants.dequantize(ones.reshape(rows, -1), kind).reshape(rows, -1, 2, GROUP // 2)
    biased = (codes + 8).astype(np.uint8)
    packed = biased[:, :, 0] | biased[:, :, 1] << 4
    return packed.reshape(rows, -1), np.repeat(scales, gguf.GGML_QUANT_SIZES[kind][0] // GROUP, axis=1)
