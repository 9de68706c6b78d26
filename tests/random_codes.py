"""Codes and scales of every quantised layout, as others might write them."""

from __future__ import annotations

import numpy as np

from dovetail.codings import Array, Part, Quantised
from dovetail.layouts import coding_of


def random_codes(layout: str, rows: int, columns: int, seed: int = 0) -> Quantised:
    """Every code that may come, the lowest one too; scales of both signs; zeros where columns were added."""
    coding, generator = coding_of(layout, columns), np.random.default_rng(seed)
    lowest, highest = (-8, 7) if coding.form.bits == 4 else (-128, 127)
    codes = generator.integers(lowest, highest, (rows, columns), np.int8, endpoint=True)
    scales = tuple(_scales(part, rows, generator) for part in coding.parts)
    return Quantised(np.pad(codes, ((0, 0), (0, coding.padded - columns))), scales)


def _scales(part: Part, rows: int, generator: np.random.Generator) -> Array:
    shape = (rows, part.count)
    if part.dtype.kind == "u":
        return generator.integers(121, 131, shape, np.uint8)  # exponents of powers of two
    if part.dtype.kind == "i":
        return generator.integers(-63, 64, shape, np.int8)
    return generator.standard_normal(shape).astype(part.dtype)
