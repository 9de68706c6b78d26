"""Inputs that are almost right: bytes and JSON values with a few places changed, the same for the same number."""

from __future__ import annotations

import json
import random
import struct
from functools import cache
from typing import Any

NUMBERS = [0, 1, -1, 2, 3, 7, 8, 16, 31, 64, 255, 256, 4096, 65535, 2**24, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64]
FLOATS = [0.0, -0.0, 0.5, -1.5, 1e-300, 1e300, 3.4e38, float("inf"), float("nan")]
TEXTS = [
    "",
    "a",
    "f32",
    "f64",
    "int8",
    "gguf",
    "llama",
    "\x00",
    "é",
    "\ud800",
    "\U0001f600" * 3,
    "a" * 300,
    "../x",
    "{{",
]


def changed_bytes(draw: random.Random, data: bytes) -> bytes:
    """One to four changes, more often near the front, where the lengths are."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 4))):
        _change_bytes(draw, found)
    return bytes(found)


def _change_bytes(draw: random.Random, data: bytearray) -> None:
    if not data:
        data += draw.randbytes(8)
        return
    reach = len(data) if draw.random() < 0.4 else min(len(data), 2048)
    at = draw.randrange(reach)
    kind = draw.randrange(7)
    if kind == 0:
        data[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        data[at] = draw.randrange(256)
    elif kind == 2:  # a number of four or eight bytes
        width, form = draw.choice(((4, "<I"), (8, "<Q")))
        number = draw.choice(NUMBERS) & (256**width - 1)
        data[at : at + width] = struct.pack(form, number)
    elif kind == 3:
        del data[at:]
    elif kind == 4:
        del data[at : at + draw.randrange(1, 64)]
    elif kind == 5:
        data[at:at] = draw.randbytes(draw.randrange(1, 16))
    else:
        other = draw.randrange(reach)
        data[at : at + 16] = data[other : other + 16]


def changed_value(draw: random.Random, text: bytes, favour: tuple[str, ...] = ()) -> Any:
    """A JSON value with one to three places changed; those below the keys of `favour` mostly."""
    found = json.loads(text)
    everywhere, favoured = _places_of(text, favour)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        place = draw.choice(favoured if favoured and draw.random() < 0.7 else everywhere)
        if not place:
            found = some_value(draw)
            return found
        _change_at(draw, found, place)
    return found


@cache
def _places_of(text: bytes, favour: tuple[str, ...]) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    everywhere = places(json.loads(text))
    return everywhere, [place for place in everywhere if set(favour) & set(place)]


def _change_at(draw: random.Random, value: Any, place: tuple[Any, ...]) -> None:
    for key in place[:-1]:
        if not isinstance(value, dict | list) or (isinstance(value, dict) and key not in value):
            return  # an earlier change took it away
        if isinstance(value, list) and not (isinstance(key, int) and key < len(value)):
            return
        value = value[key]
    key = place[-1]
    is_there = key in value if isinstance(value, dict) else isinstance(value, list) and isinstance(key, int)
    if not is_there or (isinstance(value, list) and key >= len(value)):
        return
    kind = draw.randrange(6)
    if kind == 0:
        del value[key]
    elif kind == 1 and isinstance(value, dict):
        value[draw.choice(TEXTS)] = value.pop(key)
    elif kind == 2 and isinstance(value[key], int | float) and not isinstance(value[key], bool):
        value[key] += draw.choice((1, -1, 0.5, 16, 10**6))
    else:
        value[key] = some_value(draw)


def some_value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return draw.choice((None, True, False))
    if kind <= 2:
        return draw.choice(NUMBERS) * draw.choice((1, 1, -1))
    if kind == 3:
        return draw.choice(FLOATS)
    if kind <= 5:
        return draw.choice(TEXTS)
    if kind == 6:
        return [some_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 7:
        return {draw.choice(TEXTS): some_value(draw, depth + 1) for _ in range(draw.randrange(3))}
    deep: Any = some_value(draw, 3)
    for _ in range(draw.choice((2, 50, 500))):
        deep = [deep]
    return deep


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of everything in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, inner in items for found in places(inner, (*path, key)))]


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()
