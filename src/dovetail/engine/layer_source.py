"""Weights of which some layers are read from the disk with every iteration: what an executor asks of whoever reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

from dovetail.engine.preemption import IsHere, PreemptionPoint
from dovetail.engine.weights import Weights
from dovetail.errors import UnsupportedModel

INFINITY = float("inf")


class LayerSource(Protocol):
    @property
    def layers(self) -> tuple[int, ...]:
        """That are read; the others stay."""

    @property
    def speed(self) -> float | None:
        """Bytes per second at which they were read so far."""

    def wait(self, layer: int, timeout_s: float = INFINITY) -> bool:
        """Until one of them is here, in the order of their use; False if the time was up. Raises if it cannot be
        read."""

    def release(self, layer: int) -> None:
        """It has been used."""

    def close(self) -> None: ...


@runtime_checkable
class StreamedCheckpoint(Protocol):
    @property
    def reader(self) -> LayerSource:
        """The executor's to close."""

    def is_in_slot(self, name: str) -> bool:
        """Whether the tensor is there only while its layer is used."""


def source_of(checkpoint: object, weights: Weights) -> LayerSource | None:
    """None where all layers stay. What is read anew cannot be converted once."""
    if not isinstance(checkpoint, StreamedCheckpoint):
        return None
    for name in weights.names():
        if checkpoint.is_in_slot(name) and not weights.is_used_as_stored(name):
            raise UnsupportedModel(
                f"{name} is not stored as it is computed with here, so that it cannot be read with every iteration: "
                "pull the model again"
            )
    return checkpoint.reader


class LayerWalk:
    """An iteration in steps of one layer each, which waits for those that are read. Others compute between two of them,
    where they may, and while it waits."""

    def __init__(self, source: LayerSource, num_layers: int) -> None:
        self._source = source
        self._read = frozenset(source.layers)
        self._num_layers = num_layers

    def run(self, step: Callable[[], object], preemption: PreemptionPoint | None) -> None:
        """`step` computes the next layer."""
        for layer in range(self._num_layers):
            is_here: IsHere = partial(self._source.wait, layer) if layer in self._read else _stays
            if preemption is None:
                is_here(INFINITY)
            else:
                preemption.halt(is_here)
            step()
            if layer in self._read:
                self._source.release(layer)


def _stays(timeout_s: float) -> bool:
    return True
