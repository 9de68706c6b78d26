"""A model's tensors in the compute type, however they are kept.

resident  a copy of our own in memory, fused where that saves calls
mapped    used in place where the checkpoint has them (a mapped file): no copy, pages shared and reclaimable

Where layers are read with every iteration (`layer_source`), their tensors are in place too: each time in the same slot.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dovetail.codings import Array
from dovetail.engine.dtypes import TORCH_DTYPES
from dovetail.layouts import BY_ROWS, to_cells, unpack
from dovetail.native import Ops
from dovetail.node.ports import Checkpoint, HostTensor

Kind = Literal["resident", "mapped"]


@contextmanager
def from_read_only_memory() -> Iterator[None]:
    """A mapped checkpoint is read-only, and so are its pages: a stray write faults instead of going unnoticed. torch
    warns of such buffers; silenced once for the whole of a model, since doing it takes longer than making a tensor."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        yield


class Linear:
    """One matrix product, or several side by side where the pieces of a fused matrix lie apart."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor] | None, ops: Ops) -> None:
        self._pieces = list(zip(weights, biases or repeat(None, len(weights)), strict=True))
        self._linear = ops.linear

    def __call__(self, x: Tensor) -> Tensor:
        if len(self._pieces) == 1:
            return self._linear(x, *self._pieces[0])
        return torch.cat([self._linear(x, weight, bias) for weight, bias in self._pieces], dim=-1)


class QuantisedMatrix(NamedTuple):
    """As it is stored: kernels multiply the codes."""

    data: Array  # all bytes
    layout: str
    rows: int
    columns: int


class Weights:
    """Reads each tensor once, when the model is built."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        kind: Kind,
        ops: Ops,
        readable: Collection[torch.dtype] = (),
        readable_layouts: Collection[str] = (),
    ) -> None:
        """`readable`: types that the kernels take for matrices besides `dtype`, and `readable_layouts` besides plain;
        stored so, they are kept so."""
        self.kind = kind
        self.num_bytes = 0  # of all tensors handed out
        self.copied_bytes = 0  # of those that are not in place
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._readable = frozenset(readable)
        self._readable_layouts = frozenset(readable_layouts)
        self._norm_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._ops = ops
        self._shapes = dict(checkpoint.spec.tensors())

    def has(self, name: str) -> bool:
        return name in self._shapes

    def is_in_place(self, name: str) -> bool:
        """Whether it is used where the checkpoint has it, so that making it a tensor reads nothing."""
        pieces = self._checkpoint.pieces(name)
        return self.kind == "mapped" and [(piece.layout, TORCH_DTYPES[piece.dtype]) for piece in pieces] == [
            ("plain", self._matrix_dtype(name))
        ]

    def names(self) -> Iterator[str]:
        return iter(self._shapes)

    def is_used_as_stored(self, name: str) -> bool:
        """The same of a matrix, in one piece or several, as floats or codes."""
        pieces = self._checkpoint.pieces(name)
        if all(piece.layout in self._readable_layouts for piece in pieces):
            return self.kind == "mapped"
        dtype = self._matrix_dtype(name)
        return self.kind == "mapped" and all(
            piece.layout == "plain" and TORCH_DTYPES[piece.dtype] == dtype for piece in pieces
        )

    def tensor(self, name: str) -> Tensor:
        """The whole tensor in the compute type, or as stored if that can be read as well."""
        return self._whole(name, self._matrix_dtype(name))

    def norm(self, name: str) -> Tensor:
        """Norm weights stay in float32: they are small, and Gemma's multiply before rounding."""
        return self._whole(name, self._norm_dtype)

    def linear(self, name: str) -> Linear:
        weights = self.parts(f"{name}.weight")
        biases = self.parts(f"{name}.bias") if self.has(f"{name}.bias") else None
        if biases is not None and len(biases) != len(weights):
            sizes = [len(weight) for weight in weights]
            biases = list(torch.cat(biases).split(sizes))
        return Linear(weights, biases, self._ops)

    def experts(self, name: str) -> list[Linear]:
        """One Linear per expert of a stacked [experts, out, in] tensor."""
        count, _, columns = self._shapes[f"{name}.weight"]
        parts = [part.reshape(-1, columns) for part in self.parts(f"{name}.weight")]
        if len(parts) == 1:
            parts = list(parts[0].chunk(count))
        each = len(parts) // count
        biases = self.tensor(f"{name}.bias").chunk(count) if self.has(f"{name}.bias") else None
        return [Linear(parts[i * each : (i + 1) * each], _split(biases, i, each), self._ops) for i in range(count)]

    def _whole(self, name: str, dtype: torch.dtype) -> Tensor:
        pieces = [self._tensor(piece, dtype) for piece in self._checkpoint.pieces(name)]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return whole.reshape(self._shapes[name])

    def parts(self, name: str) -> list[Tensor]:
        """One tensor, or several to be concatenated along the first dimension where they lie apart."""
        dtype = self._matrix_dtype(name)
        if self.kind == "resident":
            return [self._whole(name, dtype)]
        return [self._tensor(piece, dtype) for piece in self._checkpoint.pieces(name)]

    def quantised(self, name: str) -> list[QuantisedMatrix] | None:
        """A matrix as it is stored, in its pieces, or a stack of them with all their rows; None unless the kernels read
        the layouts of all of it. Rows are looked up in one piece."""
        pieces = self._checkpoint.pieces(name)
        if name == "embed.weight" and len(pieces) > 1:
            return None
        if all(BY_ROWS.get(piece.layout, piece.layout) in self._readable_layouts for piece in pieces):
            return [self._quantised(piece) for piece in pieces]
        return None

    def _quantised(self, piece: HostTensor) -> QuantisedMatrix:
        rows, columns = math.prod(piece.shape[:-1]), piece.shape[-1]
        by_rows = piece.layout in BY_ROWS  # by an earlier release
        data = np.frombuffer(to_cells(piece.layout, (rows, columns), piece.data) if by_rows else piece.data, np.uint8)
        self.num_bytes += data.nbytes
        if by_rows or self.kind != "mapped":
            self.copied_bytes += data.nbytes
        own = data if by_rows or self.kind == "mapped" else data.copy()
        return QuantisedMatrix(own, BY_ROWS.get(piece.layout, piece.layout), rows, columns)

    def _matrix_dtype(self, name: str) -> torch.dtype:
        pieces = self._checkpoint.pieces(name)
        stored = {TORCH_DTYPES[piece.dtype] for piece in pieces}
        exact = all(piece.layout in ("plain", "amx-bf16") for piece in pieces)  # the others round when unpacked to bf16
        return stored.pop() if exact and len(stored) == 1 and stored <= self._readable else self._dtype

    def _tensor(self, piece: HostTensor, dtype: torch.dtype) -> Tensor:
        count = math.prod(piece.shape)
        if piece.layout != "plain":
            self.num_bytes += count * dtype.itemsize
            self.copied_bytes += count * dtype.itemsize
            return torch.from_numpy(unpack(piece.layout, piece.dtype, piece.shape, piece.data)).to(dtype)
        stored = torch.frombuffer(piece.data, dtype=TORCH_DTYPES[piece.dtype], count=count).view(piece.shape)
        self.num_bytes += count * dtype.itemsize
        if self.kind == "mapped" and stored.dtype == dtype:
            return stored
        self.copied_bytes += count * dtype.itemsize
        return stored.to(dtype, copy=True)


def _split(biases: tuple[Tensor, ...] | None, expert: int, pieces: int) -> list[Tensor] | None:
    return None if biases is None else list(biases[expert].chunk(pieces))
