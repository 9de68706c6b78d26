"""Codes and scales of every quantised layout, as others might write them."""

from __future__ import annotations

import numpy as np

from dovetail.codings import Quantised
from dovetail.layouts import coding_of


def random_codes(layout: str, rows: int, columns: int, seed: int = 0) -> Quantised:
    """Every code that may come, the lowest one too; scales of both signs; zeros where columns were added."""
    coding, generator = coding_of(layout, columns), np.random.default_rng(seed)
    lowest, highest = (-8, 7) if coding.form.bits == 4 else (-128, 127)
    codes = generator.integers(lowest, highest, (rows, columns), np.int8, endpoint=True)
    scales = [
        generator.integers(-63, 64, (rows, part.count), np.int8)
        if part.dtype.kind == "i"
        else generator.standard_normal((rows, part.count)).astype(part.dtype)
        for part in coding.parts
    ]
    return Quantised(np.pad(codes, ((0, 0), (0, coding.padded - columns))), tuple(scales))
