"""Writes a safetensors file piece by piece: the package that does so wants all of it in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import msgspec

from dovetail.modelspec import DTYPE_BYTES

_ALIGNMENT = 64


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], data: Iterable[bytes | memoryview]
) -> None:
    """`tensors`: type and shape of each, in the order in which their bytes come out of `data`, in whatever pieces."""
    header = {}
    total = 0
    for name, (dtype, shape) in tensors.items():
        size = DTYPE_BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype.upper(), "shape": shape, "data_offsets": (total, total + size)}
        total += size
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    building = path.with_suffix(".building")
    with building.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        written = sum(file.write(piece) for piece in data)
    assert written == total, f"{path}: {written} bytes were given for {total}"
    building.rename(path)
