"""Puts the shares of a tensor that was cut for several devices together again. Cutting is `store.format.arrange`.

Rows are cut section by section: with two ranks, q, k, v of a fused matrix become q0 k0 v0 and q1 k1 v1, and the whole
is q0 q1 k0 k1 v0 v1. Columns are cut once. A tensor that is on no axis is whole in each partition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from dovetail.layouts import NUMPY, narrow, unpack
from dovetail.node.ports import HostTensor


class Share(Protocol):
    """What is needed of a format.TensorEntry."""

    @property
    def axis(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def sections(self) -> tuple[int, ...]: ...


def joined_shape(shares: Sequence[Share]) -> tuple[int, ...] | None:
    """Of the whole; None where the shares do not fit together."""
    first = shares[0]
    if any(share.axis != first.axis or len(share.shape) != len(first.shape) for share in shares):
        return None
    if first.axis == "":
        return first.shape if all(share.shape == first.shape for share in shares) else None
    axis = cut_axis(first.axis, len(first.shape))
    if any(len(share.sections) != len(first.sections) for share in shares):
        return None
    whole = list(first.shape)
    whole[axis] = sum(share.shape[axis] for share in shares)
    for share in shares:
        if [size for at, size in enumerate(share.shape) if at != axis] != [
            size for at, size in enumerate(whole) if at != axis
        ]:
            return None
    return tuple(whole)


def cut_axis(axis: str, dimensions: int) -> int:
    """Matrices are cut in their last two dimensions, vectors in their only one."""
    return dimensions - 1 if axis == "columns" or dimensions == 1 else dimensions - 2


def joined(shares: Sequence[Share], tensors: Sequence[HostTensor]) -> list[HostTensor]:
    """Views where plain rows were cut; otherwise one tensor of our own."""
    if shares[0].axis == "rows" and all(tensor.layout == "plain" for tensor in tensors):
        return list(_row_views(shares, tensors))
    dtype = tensors[0].dtype
    values = [unpack(tensor.layout, tensor.dtype, tensor.shape, tensor.data) for tensor in tensors]
    if shares[0].axis == "columns":
        whole = np.concatenate(values, axis=-1)
    else:
        flat = [value.reshape(-1, value.shape[-1]) for value in values]
        whole = np.concatenate([flat[rank][rows] for rank, rows in _order(shares)])
    shape = joined_shape(shares)
    assert shape is not None
    data = narrow(whole.reshape(shape), dtype)
    return [HostTensor(dtype, shape, memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data))]


def _row_views(shares: Sequence[Share], tensors: Sequence[HostTensor]) -> Iterator[HostTensor]:
    for rank, rows in _order(shares):
        tensor = tensors[rank]
        width = tensor.shape[-1:] if len(tensor.shape) > 1 else ()
        bytes_per_row = math.prod(width) * NUMPY[tensor.dtype].itemsize
        view = tensor.data[rows.start * bytes_per_row : rows.stop * bytes_per_row]
        yield HostTensor(tensor.dtype, (rows.stop - rows.start, *width), view)


def _order(shares: Sequence[Share]) -> Iterator[tuple[int, slice]]:
    """(rank, rows of its share) in the order of the whole."""
    sections = [share.sections or (math.prod(share.shape[:-1] or share.shape),) for share in shares]
    starts = [0] * len(shares)
    for number in range(len(sections[0])):
        for rank, sizes in enumerate(sections):
            yield rank, slice(starts[rank], starts[rank] + sizes[number])
            starts[rank] += sizes[number]
