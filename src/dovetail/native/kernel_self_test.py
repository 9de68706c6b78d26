"""Whether the native kernels compute rightly on this very processor: small examples with known answers.

A level may meet a processor, or a compiler, that its release was never tried on. `auto` takes no level that fails here;
a model whose layout fails on a level that was asked for by name is unpacked to floats instead: slower, and right.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dovetail.codings import CODINGS, Array, Part, Quantised
from dovetail.layouts import coding_of, pack_codes, packed_bytes, unpack

log = logging.getLogger("dovetail.native")

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

QUANTISED = CODINGS
_FLOATS = {  # stored and computed in: relative error that rounding of operands explains, with some room
    ("f32", "f32"): 1e-5,
    ("bf16", "f32"): 1e-5,
    ("f16", "f32"): 1e-5,
    ("bf16", "bf16"): 1e-2,
    ("f16", "f16"): 4e-3,
}
_TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_TOKENS = (1, 3, 8, 37)  # one by one, few, a tile, tiles and a rest
_ROWS, _COLUMNS = 83, 352  # of codes; no multiples of any tile
_FLOAT_ROWS, _FLOAT_COLUMNS = 37, 1107  # more columns than are summed up in one run, and a rest that fills no vector
_QUANTISED_TOLERANCE = 0.02  # rounding activations costs a third of it


@cache
def failed_parts(level: str) -> tuple[str, ...]:
    """What the level computes wrongly here, by name; nothing if it can be taken."""
    return check_level(importlib.import_module("dovetail.native._kernels"), level)


def check_level(kernels: Any, level: str) -> tuple[str, ...]:
    return tuple(name for name, is_right in _parts(kernels, level) if not is_right(kernels, level))


def trusted_layouts(level: str, layouts: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `layouts` that the level multiplies, and rightly."""
    kernels = importlib.import_module("dovetail.native._kernels")
    layouts = tuple(layout for layout in layouts if _knows(kernels, level, layout))
    wrong = [layout for layout in layouts if layout in failed_parts(level)]
    if wrong:
        log.warning("%s kernels give wrong products of %s here: unpacked instead", level, " and ".join(wrong))
    return tuple(layout for layout in layouts if layout not in wrong)


def _knows(kernels: Any, level: str, layout: str) -> bool:
    """Kernels that were built before a layout came to be compute all others."""
    data = np.zeros(packed_bytes(layout, "f32", (16, 32)), np.uint8)
    try:
        kernels.linear_quantised(level, 1, np.zeros((1, 32), np.float32), data, layout, np.zeros((1, 16), np.float32))
    except ValueError:
        return False
    return True


def _parts(kernels: Any, level: str) -> Iterator[tuple[str, Callable[[Any, str], bool]]]:
    for (stored, precision), tolerance in _FLOATS.items():
        name = stored if stored == precision else f"{stored} in {precision}"
        yield name, lambda k, level, s=stored, p=precision, t=tolerance: _multiplies(k, level, s, p, t)  # type: ignore[misc]
    for layout in (layout for layout in QUANTISED if _knows(kernels, level, layout)):
        yield layout, lambda k, level, layout=layout: _multiplies_codes(k, level, layout)  # type: ignore[misc]
    for stored in _TYPES:
        yield f"attention over {stored}", lambda k, level, s=stored: _attends(k, level, s)  # type: ignore[misc]
    yield "norm", _normalizes
    yield "gate", _gates


def _is_close(out: Floats, wanted: Doubles, tolerance: float) -> bool:
    """False of anything that is not a number."""
    return bool(np.linalg.norm(out - wanted) <= tolerance * np.linalg.norm(wanted))


def _product(x: Floats, weight: Doubles) -> Doubles:
    """In double, and on this thread alone: waking a library's threads would take longer than the check."""
    product: Doubles = np.einsum("tk,rk->tr", x.astype(np.float64), weight)
    return product


def _multiplies(kernels: Any, level: str, stored: str, precision: str, tolerance: float) -> bool:
    """Rightly, and a token alone as among others."""
    random = np.random.default_rng(0)
    weight = torch.from_numpy(random.standard_normal((_FLOAT_ROWS, _FLOAT_COLUMNS), np.float32)).to(_TYPES[stored])
    x = random.standard_normal((max(_TOKENS), _FLOAT_COLUMNS), np.float32)
    wanted = _product(x, weight.double().numpy())
    first: Floats | None = None
    for tokens in _TOKENS:
        out = np.full((tokens, _FLOAT_ROWS), np.nan, np.float32)
        kernels.linear(level, 1, precision, x[:tokens], weight, out)
        first = out[0] if first is None else first
        if not (_is_close(out, wanted[:tokens], tolerance) and np.array_equal(out[0], first)):
            return False
    return True


def _multiplies_codes(kernels: Any, level: str, layout: str) -> bool:
    random = np.random.default_rng(0)
    data = pack_codes(layout, (_ROWS, _COLUMNS), _codes(layout, random)).data
    weight = unpack(layout, "f32", (_ROWS, _COLUMNS), data).astype(np.float64)
    for tokens in _TOKENS:
        x = random.standard_normal((tokens, _COLUMNS), np.float32)
        x[:, ::29] *= 60  # as activations are
        out = np.full((tokens, _ROWS), np.nan, np.float32)
        kernels.linear_quantised(level, 1, x, np.frombuffer(data, np.uint8), layout, out)
        if not _is_close(out, _product(x, weight), _QUANTISED_TOLERANCE):
            return False
    return True


def _codes(layout: str, random: np.random.Generator) -> Quantised:
    """Every code that may come, the lowest one too, which quantising here never makes; scales of both signs."""
    coding = coding_of(layout, _COLUMNS)
    lowest, highest = (-8, 7) if coding.form.bits == 4 else (-128, 127)
    codes = random.integers(lowest, highest, (_ROWS, _COLUMNS), np.int8, endpoint=True)
    return Quantised(codes, tuple(_scales(part, random) for part in coding.parts))


def _scales(part: Part, random: np.random.Generator) -> Array:
    shape = (_ROWS, part.count)
    if part.dtype.kind == "u":
        return random.integers(118, 130, shape, np.uint8)  # exponents of powers of two near 1
    if part.dtype.kind == "i":
        return random.integers(-60, 60, shape, np.int8)
    return random.standard_normal(shape, np.float32).astype(part.dtype)


def _attends(kernels: Any, level: str, stored: str) -> bool:
    """Five tokens of three heads behind 78 keys: more than one chunk, a block table out of order, a masked corner."""
    random, tokens, heads, length, size, d = np.random.default_rng(0), 5, 3, 83, 16, 80
    table = np.array([4, 0, 5, 2, 1, 3], np.int32)
    cache = torch.full((6, 2, size, d), float("nan"), dtype=_TYPES[stored])
    kv = torch.from_numpy(random.standard_normal((2, length, d), np.float32)).to(_TYPES[stored])
    at = np.arange(length)
    cache[table[at // size], :, at % size] = kv.transpose(0, 1)
    q = random.standard_normal((tokens, heads, d), np.float32)
    out = np.full_like(q, np.nan)
    kernels.attend(level, q, cache, table, length - tokens, 0, d**-0.5, 0.0, out)
    k, v = kv.double().numpy()
    scores = np.einsum("thd,kd->thk", q.astype(np.float64), k) * d**-0.5
    scores[np.arange(length) > np.arange(length - tokens, length)[:, None, None] + np.zeros((1, heads, 1))] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("thk,kd->thd", weights / weights.sum(-1, keepdims=True), v)
    return _is_close(out, wanted, 1e-2 if stored == "bf16" else 1e-4)  # tiles round queries to bf16 too


def _normalizes(kernels: Any, level: str) -> bool:
    random = np.random.default_rng(0)
    x, weight = random.standard_normal((2, 83), np.float32)
    out = np.full_like(x, np.nan)
    kernels.norm(level, x, weight, 1e-6, out)
    wide = x.astype(np.float64)
    return _is_close(out, wide / np.sqrt(np.mean(wide * wide) + 1e-6) * weight, 1e-5)


def _gates(kernels: Any, level: str) -> bool:
    random = np.random.default_rng(0)
    gate, up = random.standard_normal((2, 83), np.float32) * np.float32(8)
    out = np.full_like(gate, np.nan)
    kernels.gate(level, 0, gate, up, out)
    wide = gate.astype(np.float64)
    return _is_close(out, wide / (1 + np.exp(-wide)) * up, 1e-5) and kernels.argmax(level, gate) == int(gate.argmax())
