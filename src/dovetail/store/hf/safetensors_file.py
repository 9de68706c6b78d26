"""One safetensors file, mapped read-only: its tensors as views in place.

The eight-byte length and the JSON header are parsed here rather than by the `safetensors` package, because that hands
out torch tensors or numpy copies, and the store knows no torch and wants the file's own pages. A header is checked as
strictly as there: in range, no holes, no overlaps, sizes that agree with shapes.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from dovetail.errors import DamagedCheckpoint, UnsupportedModel
from dovetail.modelspec import DTYPE_BYTES
from dovetail.node.ports import HostTensor
from dovetail.store.files import open_regular

DTYPES = {"F64": "f64", "F32": "f32", "F16": "f16", "BF16": "bf16"}
_OTHER_DTYPES = {"BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "I16", "U16", "I32", "U32", "I64", "U64"}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation


class TensorHeader(NamedTuple):
    dtype: str  # as written in the header
    shape: tuple[int, ...]
    begin: int  # from the start of the data
    end: int


class SafetensorsFile:
    """Keeps the mapping open; views handed out keep it alive even after `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        self._data_start, header = _read_header(path, self._map)
        self.metadata: dict[str, Any] = header.pop("__metadata__", None) or {}
        data_bytes = len(self._map) - self._data_start
        self._entries = {name: _parse_entry(path, name, raw) for name, raw in header.items()}
        _check_layout(path, self._entries, data_bytes)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def check_weights(self, name: str) -> None:
        """Raises UnsupportedModel for a tensor that `tensor` does not hand out."""
        if self._entries[name].dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise UnsupportedModel(
                f"{self.path}: {name}: dtype {self._entries[name].dtype} is not supported for weights ({known} are)"
            )

    def tensor(self, name: str) -> HostTensor:
        self.check_weights(name)
        entry = self._entries[name]
        view = memoryview(self._map)[self._data_start + entry.begin : self._data_start + entry.end]
        return HostTensor(DTYPES[entry.dtype], entry.shape, view)

    def unsigned_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """Of a tensor of codes: a view."""
        entry = self._entries[name]
        if entry.dtype != "U8":
            raise UnsupportedModel(f"{self.path}: {name}: dtype {entry.dtype} is not supported for codes")
        if entry.end - entry.begin != math.prod(entry.shape):
            raise DamagedCheckpoint(f"{self.path}: {name}: not as many bytes as shape {list(entry.shape)} has")
        view = memoryview(self._map)[self._data_start + entry.begin : self._data_start + entry.end]
        return np.frombuffer(view, np.uint8).reshape(entry.shape)

    def release(self) -> None:
        """Lets go of pages that were read; they come back when touched."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        with suppress(BufferError):  # somebody still holds a view: the mapping goes with the last one
            self._map.close()


def _map_file(path: Path) -> mmap.mmap:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path}: missing") from error
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error.strerror}") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise DamagedCheckpoint(f"{path}: empty file") from error


def _read_header(path: Path, data: mmap.mmap) -> tuple[int, dict[str, Any]]:
    if len(data) < 8:
        raise DamagedCheckpoint(f"{path}: truncated: {len(data)} bytes are too few for a safetensors header")
    length = int.from_bytes(data[:8], "little")
    if length > _MAX_HEADER_BYTES:
        raise DamagedCheckpoint(f"{path}: not a safetensors file: a header of {length} bytes is absurd")
    if 8 + length > len(data):
        raise DamagedCheckpoint(f"{path}: truncated: header of {length} bytes in a file of {len(data)}")
    try:
        header = msgspec.json.decode(data[8 : 8 + length])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise DamagedCheckpoint(f"{path}: header is not a JSON object")
    return 8 + length, header


def _parse_entry(path: Path, name: str, raw: Any) -> TensorHeader:
    try:
        dtype, shape, (begin, end) = raw["dtype"], tuple(raw["shape"]), raw["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError) as error:
        raise DamagedCheckpoint(f"{path}: {name}: header entry is not dtype, shape and two data_offsets") from error
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise DamagedCheckpoint(f"{path}: {name}: shape and data_offsets must be whole numbers")
    if not isinstance(dtype, str) or (dtype not in DTYPES and dtype not in _OTHER_DTYPES):
        raise DamagedCheckpoint(f"{path}: {name}: unknown dtype {dtype!r}")
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPE_BYTES[DTYPES[dtype]]:
        raise DamagedCheckpoint(f"{path}: {name}: {end - begin} bytes do not hold {dtype} of shape {list(shape)}")
    return TensorHeader(dtype, shape, begin, end)


def _check_layout(path: Path, entries: dict[str, TensorHeader], data_bytes: int) -> None:
    """Tensors tile the data exactly: what begins is where the one before ended, and the last ends with the file."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.end > data_bytes:
            raise DamagedCheckpoint(f"{path}: truncated: {name} ends at byte {entry.end} of {data_bytes} bytes of data")
        if entry.begin != position or entry.end < entry.begin:
            raise DamagedCheckpoint(f"{path}: {name}: data begins at {entry.begin}, expected {position}")
        position = entry.end
    if position != data_bytes:
        raise DamagedCheckpoint(f"{path}: {data_bytes - position} bytes after the last tensor")
