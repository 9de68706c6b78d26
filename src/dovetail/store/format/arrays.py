"""Between HostTensor bytes and numpy arrays, and between float types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from dovetail.layouts import NUMPY, narrow, unpack
from dovetail.modelspec import ModelSpec, rotary_order
from dovetail.node.ports import HostTensor

Array = npt.NDArray[Any]


class LazyPieces(Sequence[HostTensor]):
    """Pieces of a tensor that are made when they are asked for, one at a time."""

    def __init__(self, makers: Sequence[Callable[[], HostTensor]]) -> None:
        self._makers = makers

    def __len__(self) -> int:
        return len(self._makers)

    @overload
    def __getitem__(self, index: int) -> HostTensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[HostTensor]: ...
    def __getitem__(self, index: int | slice) -> HostTensor | Sequence[HostTensor]:
        return LazyPieces(self._makers[index]) if isinstance(index, slice) else self._makers[index]()


def as_array(tensor: HostTensor) -> Array:
    """A view of a plain tensor; bfloat16 comes as the uint16 of its bits."""
    assert tensor.layout == "plain", tensor.layout
    return np.frombuffer(tensor.data, NUMPY[tensor.dtype]).reshape(tensor.shape)


def from_array(array: Array, dtype: str | None = None) -> HostTensor:
    """`dtype` only for bfloat16 bits in uint16; otherwise it follows from the array."""
    array = np.ascontiguousarray(array)
    name = dtype or next(key for key, value in NUMPY.items() if value == array.dtype)
    data = memoryview(array.reshape(-1).view(np.uint8).data) if array.size else memoryview(b"")
    return HostTensor(name, array.shape, data)


def reordered(tensor: HostTensor, rows: Array) -> HostTensor:
    """A plain tensor with its rows in another order."""
    return from_array(as_array(tensor)[rows], tensor.dtype)


def rows_in_file(spec: ModelSpec, first: int, count: int) -> Array | None:
    """Of a piece of q, k and v that begins at row `first` of the three: for each canonical row the piece's row as
    transformers keeps it. None = the same."""
    order = rotary_order(spec)
    turning = min(max(spec.q_size + spec.kv_size - first, 0), count)
    if order is None or turning == 0:
        return None
    rows = np.arange(count)
    rows[:turning] = rows[:turning].reshape(-1, spec.head_dim)[:, list(order)].reshape(-1)
    return rows


def to_float32(tensor: HostTensor) -> npt.NDArray[np.float32]:
    return unpack(tensor.layout, tensor.dtype, tensor.shape, tensor.data)


def convert(tensor: HostTensor, dtype: str) -> HostTensor:
    """The same values in `dtype`, plain, rounded to nearest even; no copy where it is already that."""
    if tensor.dtype == dtype and tensor.layout == "plain":
        return tensor
    return from_array(narrow(to_float32(tensor), dtype), dtype)
