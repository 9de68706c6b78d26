"""Whether the kernels multiply quantised weights rightly on this very processor: a small example with a known answer.

A level may meet a processor, or a compiler, that its release was never tried on. Models whose layout fails here are
unpacked to floats instead: slower, and right.
"""

from __future__ import annotations

import logging
from functools import cache

import numpy as np

from dovetail.layouts import Int4, Quantised, codes_and_scales, coding_of, pack_codes, unpack
from dovetail.native import select

log = logging.getLogger("dovetail.engine")

_ROWS, _COLUMNS = 83, 352  # no multiples of any tile
_TOKENS = (1, 3, 8, 37)  # one by one, few, a tile, tiles and a rest
_TOLERANCE = 0.02  # rounding activations costs a third of it


@cache
def trusted_layouts(level: str, layouts: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `layouts` that the level multiplies rightly. Takes some milliseconds, once."""
    wrong = [layout for layout in layouts if not _is_right(level, layout)]
    if wrong:
        log.warning("%s kernels give wrong products of %s here: unpacked instead", level, " and ".join(wrong))
    return tuple(layout for layout in layouts if layout not in wrong)


def _is_right(level: str, layout: str) -> bool:
    kernels = select(level).kernels
    assert kernels is not None, "torch's level has no codes to multiply"
    random = np.random.default_rng(0)
    data = memoryview(pack_codes(layout, (_ROWS, _COLUMNS), _example(layout, random)))
    weight = unpack(layout, "f32", (_ROWS, _COLUMNS), data).astype(np.float64)
    codes, scales = codes_and_scales(layout, (_ROWS, _COLUMNS), data)
    for tokens in _TOKENS:
        x = random.standard_normal((tokens, _COLUMNS), np.float32)
        x[:, ::29] *= 60  # as activations are
        out = np.full((tokens, _ROWS), np.nan, np.float32)
        kernels.linear_quantised(level, 1, x, codes, scales, out)
        wanted = x.astype(np.float64) @ weight.T
        if not np.linalg.norm(out - wanted) <= _TOLERANCE * np.linalg.norm(wanted):
            return False
    return True


def _example(layout: str, random: np.random.Generator) -> Quantised:
    """Every code that may come, the lowest one too, which quantising here never makes; scales of both signs."""
    coding = coding_of(layout, _COLUMNS)
    lowest, highest = (-8, 7) if isinstance(coding, Int4) else (-127, 127)
    codes = random.integers(lowest, highest, (_ROWS, _COLUMNS), np.int8, endpoint=True)
    scales = random.standard_normal((_ROWS, coding.groups), np.float32)
    return Quantised(codes, scales.astype(coding.scale_type))
