"""Which layer is in which of a few slots of device memory (C1). Pure: copies and waits are their owner's.

    slot 0   | copy 0 | use 0 |  copy 4  | use 4 | ...       layers 0, 2, 4, ... of one iteration
    slot 1        | copy 2 |    use 2    |  copy 6  | ...

A slot is copied into when the layer that was in it has been used, and used when its copy has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dovetail.policy.streaming import SLOTS


class LayerSlots:
    def __init__(self, layers: Sequence[int], num_slots: int = SLOTS) -> None:
        """`layers` in the order of their use."""
        assert all(a < b for a, b in pairwise(layers)), "layers are used in their order"
        self._places = {layer: at for at, layer in enumerate(layers)}
        self._layers = tuple(layers)
        self._num_slots = num_slots
        self._held: list[int | None] = [None] * num_slots
        self._used = len(layers)  # how many of this iteration were used

    def __contains__(self, layer: int) -> bool:
        return layer in self._places

    def slot_of(self, layer: int) -> int:
        return self._places[layer] % self._num_slots

    def begin(self) -> list[int]:
        """An iteration begins, however far the last one came; these are copied first."""
        first = list(self._layers[: self._num_slots])
        self._held = [*first, *[None] * (self._num_slots - len(first))]
        self._used = 0
        return first

    def acquire(self, layer: int) -> None:
        """The layer is used now."""
        assert self._layers[self._used : self._used + 1] == (layer,), f"layer {layer} out of turn"
        assert self._held[self.slot_of(layer)] == layer, f"layer {layer} is in no slot"

    def release(self, layer: int) -> int | None:
        """It has been used. Returns the layer that is to be copied over it."""
        self.acquire(layer)
        self._used += 1
        at = self._places[layer] + self._num_slots
        following = self._layers[at] if at < len(self._layers) else None
        self._held[self.slot_of(layer)] = following
        return following
