"""LoRA adapters as the CPU's kernels take them: both matrices of each part in memory of their own, the second
transposed. Other devices pack them in a form of their own.

Made once per adapter, by any thread; an executor of the model binds them and computes rows with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dovetail.engine.dtypes import TORCH_DTYPES
from dovetail.engine.weights import from_read_only_memory
from dovetail.node.ports import AdapterWeights, HostTensor


class PackedAdapter(Protocol):
    """An adapter in the form that a device computes with, counted before it is in that device's memory."""

    @property
    def num_bytes(self) -> int:
        """That it takes of the node's memory."""

    def place(self) -> None:
        """Into the device's memory; by any thread. Raises OutOfMemory if there is none left."""

    def close(self) -> None:
        """Its memory is free; no executor has it any longer."""


@dataclass(frozen=True, eq=False)
class Part:
    tensor: str  # of the model
    row: int
    first: Tensor  # [rank, columns]
    second: Tensor  # [rank, rows]

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() * each.itemsize for each in (self.first, self.second))


@dataclass(frozen=True, eq=False)
class AdapterMatrices:
    scaling: float
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def place(self) -> None:
        """The cores read it where it is."""

    def close(self) -> None:
        """It goes with its last reference."""


def read_matrices(weights: AdapterWeights) -> AdapterMatrices:
    """Copies: what they are read from may go."""
    parts = []
    with from_read_only_memory():
        for tensor, row, first, second in weights.parts():
            parts.append(Part(tensor, row, _tensor(first).clone(), _tensor(second).t().contiguous()))
    return AdapterMatrices(weights.scaling, tuple(parts))


def _tensor(stored: HostTensor) -> Tensor:
    assert stored.layout == "plain"
    assert stored.dtype in TORCH_DTYPES, "checked when it was opened"
    return torch.frombuffer(stored.data, dtype=TORCH_DTYPES[stored.dtype]).view(stored.shape)
