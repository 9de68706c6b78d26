"""Between HostTensor bytes and numpy arrays, and between float types; numpy has no bfloat16, so that one is by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail.node.ports import HostTensor

Array = npt.NDArray[Any]
NUMPY: dict[str, np.dtype[Any]] = {
    "f64": np.dtype("<f8"),
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
}


def as_array(tensor: HostTensor) -> Array:
    """A view; bfloat16 comes as the uint16 of its bits."""
    return np.frombuffer(tensor.data, NUMPY[tensor.dtype]).reshape(tensor.shape)


def from_array(array: Array, dtype: str | None = None) -> HostTensor:
    """`dtype` only for bfloat16 bits in uint16; otherwise it follows from the array."""
    array = np.ascontiguousarray(array)
    name = dtype or next(key for key, value in NUMPY.items() if value == array.dtype)
    data = memoryview(array.reshape(-1).view(np.uint8).data) if array.size else memoryview(b"")
    return HostTensor(name, array.shape, data)


def to_float32(tensor: HostTensor) -> npt.NDArray[np.float32]:
    array = as_array(tensor)
    if tensor.dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def convert(tensor: HostTensor, dtype: str) -> HostTensor:
    """The same values in `dtype`, rounded to nearest even; no copy where the type is already that."""
    if tensor.dtype == dtype:
        return tensor
    if dtype == "bf16":
        return from_array(bfloat16_bits(to_float32(tensor)), "bf16")
    return from_array(to_float32(tensor).astype(NUMPY[dtype]))


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even. A NaN keeps its sign and top bits and is made quiet: rounding up the low half
    of one could otherwise carry into infinity or wrap to zero."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    upper = bits >> 16
    rounded = ((bits + 0x7FFF + (upper & 1)) >> 16).astype(np.uint16)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if is_nan.any():
        rounded[is_nan] = (upper[is_nan] | 0x0040).astype(np.uint16)
    return rounded
