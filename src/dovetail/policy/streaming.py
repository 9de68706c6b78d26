"""Models that are larger than what they may have of a device's memory (C1): which layers stay on the device, what the
others cost. A layer that does not stay is read from host memory with every iteration, through slots that layers take in
turns, so that an iteration takes the longer of computing and of the link. Knows bytes and seconds, no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dovetail.policy.latency import Curve, LatencyModel, Surface

SLOTS = 2  # one is computed with while the other is filled
KEPT_TOKENS = 2048  # of keys and values that a model's weights leave room for where it may stream


def streamed_layers(num_layers: int, resident: int) -> tuple[int, ...]:
    """Evenly spread, so that those between two of them are computed while the next one is on its way."""
    streamed = num_layers - min(max(resident, 0), num_layers)
    return tuple(at for at in range(num_layers) if (at + 1) * streamed // num_layers > at * streamed // num_layers)


@dataclass(frozen=True)
class StreamedWeights:
    """What a model takes of a device's memory and of its link, by how many of its layers stay."""

    total_bytes: int  # with all of them
    kept: tuple[int, ...]  # bytes of each layer's matrices, as kernels read them
    stored: tuple[int, ...]  # as they come over the link
    is_unpacked: bool = False  # the one is made of the other, in room for one more layer

    @property
    def num_layers(self) -> int:
        return len(self.kept)

    def device_bytes(self, resident: int, *, in_place: bool = False) -> int:
        streamed = streamed_layers(self.num_layers, resident)
        if not streamed:
            return self.total_bytes
        slots = 0 if in_place else SLOTS * max(self.stored[layer] for layer in streamed)
        work = max(self.kept[layer] for layer in streamed) if self.is_unpacked else 0
        return self.total_bytes - sum(self.kept[layer] for layer in streamed) + slots + work

    def link_bytes(self, resident: int) -> int:
        """With every iteration."""
        return sum(self.stored[layer] for layer in streamed_layers(self.num_layers, resident))

    def most_resident(self, room_bytes: int) -> int:
        """How many layers can stay; 0 also where there is not even room for the slots."""
        counts = range(self.num_layers, 0, -1)
        return next((count for count in counts if self.device_bytes(count) <= room_bytes), 0)


class ResidentLayers(NamedTuple):
    """Of a model of which not all layers stay on the device."""

    layers: int  # that do
    in_place: bool = False  # the others have no slots: kernels read them in host memory, a little slower


def residency(
    weights: StreamedWeights, capacity_bytes: int, kv_bytes: int, share: float | None
) -> ResidentLayers | None:
    """None = all layers stay. `share`: of the layers, as the user says; None = all that fit beside this much KV memory.
    Codes are unpacked on the device, so that they cannot be read in place."""
    room = capacity_bytes - min(kv_bytes, capacity_bytes // 2)
    count = weights.most_resident(room) if share is None else round(share * weights.num_layers)
    if count >= weights.num_layers:
        return None
    return ResidentLayers(count, in_place=weights.device_bytes(count) > room and not weights.is_unpacked)


def with_link(latency: LatencyModel, link_s: float) -> LatencyModel:
    """The same model where every iteration waits for so much of the link."""
    prefill = Curve([(tokens, max(seconds, link_s)) for tokens, seconds in latency.prefill.points])
    rows: dict[float, list[tuple[float, float]]] = {}
    for batch, length, seconds in latency.decode.corners():
        rows.setdefault(length, []).append((batch, max(seconds, link_s)))
    return LatencyModel(prefill, Surface([(length, Curve(points)) for length, points in sorted(rows.items())]))
