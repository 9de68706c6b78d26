"""GGUF's blocks as codes of ours, where a layout says the same: nothing is rounded, bits only move.

Each reader takes rows of blocks [rows, blocks, bytes] and gives codes [rows, columns] and scales as `codings` has them.
Where GGUF packs six bits into bytes, they become bytes; codes of 5 and 6 bits become bytes too. Scales may be negative
(those of q4_0 mostly are: its largest number has code -8).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from dovetail.codings import Quantised

Kind = gguf.GGMLQuantizationType
Array = npt.NDArray[Any]

# Values of the codes of iq4_nl, as the format defines them
_NONLINEAR = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    np.int8,
)


def layout_of(kind: Kind) -> str | None:
    """The layout that holds blocks of this type to the bit; None if there is none."""
    found = _READERS.get(kind)
    return None if found is None else found[0]


def read_blocks(data: Array, kind: Kind) -> Quantised:
    """Of rows of blocks [rows, bytes]."""
    blocks = np.ascontiguousarray(data).reshape(len(data), -1, gguf.GGML_QUANT_SIZES[kind][1])
    return _READERS[kind][1](blocks)


def _q8_0(blocks: Array) -> Quantised:
    return Quantised(_rows(blocks[:, :, 2:].view(np.int8)), (_halves(blocks, 0),))


def _q5_0(blocks: Array) -> Quantised:
    return Quantised(_rows(_five_bits(blocks[:, :, 2:6], blocks[:, :, 6:]) - np.int8(16)), (_halves(blocks, 0),))


def _q5_1(blocks: Array) -> Quantised:
    codes = _five_bits(blocks[:, :, 4:8], blocks[:, :, 8:])
    return Quantised(_rows(codes), (_halves(blocks, 0), _halves(blocks, 2)))


def _q4_0(blocks: Array) -> Quantised:
    return Quantised(_rows(_nibbles(blocks[:, :, 2:]) - np.int8(8)), (_halves(blocks, 0),))


def _q4_1(blocks: Array) -> Quantised:
    return Quantised(_rows(_nibbles(blocks[:, :, 4:]) - np.int8(8)), (_halves(blocks, 0), _halves(blocks, 2)))


def _iq4_nl(blocks: Array) -> Quantised:
    return Quantised(_rows(_NONLINEAR[_nibbles(blocks[:, :, 2:])]), (_halves(blocks, 0),))


def _mxfp4(blocks: Array) -> Quantised:
    return Quantised(_rows(_nibbles(blocks[:, :, 1:])), (np.ascontiguousarray(blocks[:, :, 0]),))


def _q4_k(blocks: Array) -> Quantised:
    """Pairs of groups of 32 share 32 bytes: the first one the lower halves, the second one the upper."""
    codes = _pairs_of_groups(blocks[:, :, 16:])
    return Quantised(_rows(codes - np.int8(8)), _six_bit_scales(blocks))


def _q5_k(blocks: Array) -> Quantised:
    """As q4_k; bit n of byte j is the fifth bit of element j of group n."""
    fifth = np.unpackbits(blocks[:, :, 16:48, None], axis=3, bitorder="little").swapaxes(2, 3).astype(np.int8)
    codes = _pairs_of_groups(blocks[:, :, 48:]).reshape(fifth.shape) | fifth << np.int8(4)
    return Quantised(_rows(codes), _six_bit_scales(blocks))


def _q6_k(blocks: Array) -> Quantised:
    """Of 128 elements, 64 bytes have the lower four bits (two rounds of 32, lower halves first), 32 bytes the upper two
    (of four rounds of 32)."""
    shape = blocks.shape[:2]
    low = blocks[:, :, :128].reshape(*shape, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(2, 1) & np.uint8(15)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    high = blocks[:, :, 128:192].reshape(*shape, 2, 1, 32) >> shifts & np.uint8(3)
    codes = low.reshape(*shape, 2, 4, 32) | high << np.uint8(4)
    steps = _rows(blocks[:, :, 192:208].view(np.int8))
    return Quantised(_rows(codes.view(np.int8) - np.int8(32)), (_halves(blocks, 208), steps))


def _q3_k(blocks: Array) -> Quantised:
    """Two bits in four rounds of 32 for every 128 elements; the third one is a bit of 32 bytes, and -4 where it is not
    set."""
    shape = blocks.shape[:2]
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    low = (blocks[:, :, 32:96].reshape(*shape, 2, 1, 32) >> shifts & np.uint8(3)).reshape(*shape, 8, 32)
    third = np.unpackbits(blocks[:, :, :32, None], axis=3, bitorder="little").swapaxes(2, 3)
    codes = low.view(np.int8) - ((third ^ np.uint8(1)) << np.uint8(2)).view(np.int8)
    packed = blocks[:, :, 96:108]
    lower = np.concatenate([packed[:, :, :8] & np.uint8(15), packed[:, :, :8] >> np.uint8(4)], axis=2)
    rounds = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
    upper = (packed[:, :, None, 8:] >> rounds & np.uint8(3)).reshape(*shape, 16)
    steps = (lower | upper << np.uint8(4)).view(np.int8) - np.int8(32)
    return Quantised(_rows(codes), (_halves(blocks, 108), _rows(steps)))


def _ternary(kind: Kind) -> Callable[[Array], Quantised]:
    """256 columns share a float16, codes are -1, 0 and 1: the same scale for eight groups."""

    def read(blocks: Array) -> Quantised:
        scales = _halves(blocks, blocks.shape[2] - 2)
        ones = blocks.copy()
        ones[:, :, -2:] = np.array([1.0], "<f2").view(np.uint8)  # with a scale of one, values are codes
        codes = gguf.quants.dequantize(ones.reshape(len(blocks), -1), kind).astype(np.int8)
        return Quantised(codes.reshape(len(blocks), -1), (np.repeat(scales, 8, axis=1),))

    return read


_READERS: dict[Kind, tuple[str, Callable[[Array], Quantised]]] = {
    Kind.Q8_0: ("int8-g32", _q8_0),
    Kind.Q5_0: ("int8-g32", _q5_0),
    Kind.Q5_1: ("int8-g32-min", _q5_1),
    Kind.Q4_0: ("int4-g32", _q4_0),
    Kind.Q4_1: ("int4-g32-min", _q4_1),
    Kind.IQ4_NL: ("int8-g32", _iq4_nl),
    Kind.MXFP4: ("fp4-e32", _mxfp4),
    Kind.Q3_K: ("int8-k16", _q3_k),
    Kind.Q4_K: ("int4-k32-min", _q4_k),
    Kind.Q5_K: ("int8-k32-min", _q5_k),
    Kind.Q6_K: ("int8-k16", _q6_k),
    Kind.TQ1_0: ("int4-g32", _ternary(Kind.TQ1_0)),
    Kind.TQ2_0: ("int4-g32", _ternary(Kind.TQ2_0)),
}


def _rows(blocks: Array) -> Array:
    return np.ascontiguousarray(blocks).reshape(len(blocks), -1)


def _halves(blocks: Array, at: int) -> Array:
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")[:, :, 0]


def _nibbles(data: Array) -> Array:
    """Lower halves, then upper ones."""
    return np.concatenate([data & np.uint8(15), data >> np.uint8(4)], axis=2).view(np.int8)


def _five_bits(fifth: Array, data: Array) -> Array:
    codes: Array = _nibbles(data) | np.unpackbits(fifth, axis=2, bitorder="little").view(np.int8) << np.int8(4)
    return codes


def _pairs_of_groups(data: Array) -> Array:
    pairs = data.reshape(*data.shape[:2], 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(2, 1) & np.uint8(15)
    return pairs.view(np.int8)


def _six_bit_scales(blocks: Array) -> tuple[Array, ...]:
    """Eight scales and eight minimums in twelve bytes: of the first four each a byte's lower six bits; the others have
    their lower four in the last bytes and their upper two in the upper bits of the first ones."""
    first, second, last = (blocks[:, :, start : start + 4] for start in (4, 8, 12))
    low, top = np.uint8(63), np.uint8(48)
    scales = np.concatenate([first & low, (last & np.uint8(15)) | (first >> np.uint8(2) & top)], axis=2)
    minimums = np.concatenate([second & low, (last >> np.uint8(4)) | (second >> np.uint8(2) & top)], axis=2)
    parts = [_rows(part.view(np.int8)) for part in (scales, minimums)]
    return _halves(blocks, 0), _halves(blocks, 2), *parts
