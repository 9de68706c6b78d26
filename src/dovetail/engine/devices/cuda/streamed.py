"""Layers whose matrices stay in host memory: every iteration copies them into slots of device memory, in turns, while
the layers before them are computed (C1). In a graph the copies are nodes beside the kernels.

    copies    | layer 0 | layer 1 | layer 2 | layer 3 | ...       bound by the link
    compute             | 0 |     | 1 |     | 2 |     | 3 |

Host memory stays as it is for as long as the model is open: whoever has the weights holds the lease.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dovetail.engine.devices.cuda.arena import bytes_at
from dovetail.engine.devices.cuda.in_place import HostMatrix
from dovetail.engine.layer_slots import LayerSlots


@dataclass(frozen=True)
class SlotCopy:
    target: Tensor  # bytes in the slot
    source: Tensor  # as many in host memory that the device reads by itself


@dataclass(frozen=True)
class StreamedLayer:
    copies: tuple[SlotCopy, ...]
    unpacks: tuple[Callable[[], None], ...]  # make what kernels read of what is stored, where that differs
    is_read_in_slot: bool  # some of it needs no unpacking


class LayerStream:
    def __init__(self, stream: torch.cuda.Stream, layers: Mapping[int, StreamedLayer], fence: Tensor) -> None:
        """`fence`: a few bytes of nobody's."""
        self._stream, self._layers, self._fence = stream, layers, fence
        self._slots = LayerSlots(sorted(layers))
        self._copied: dict[int, torch.cuda.Event] = {}

    def begin(self) -> None:
        """An iteration, on the current stream."""
        self._copied.clear()
        for layer in self._slots.begin():
            self._copy(layer)

    def acquire(self, layer: int) -> None:
        if layer not in self._slots:
            return
        self._slots.acquire(layer)
        torch.cuda.current_stream().wait_event(self._copied.pop(layer))
        for unpack in self._layers[layer].unpacks:
            unpack()
        # Kernels may read weights before those ahead of them are done (`launch`), but none is launched ahead of this.
        self._fence.zero_()
        if not self._layers[layer].is_read_in_slot:
            self._free(layer)

    def release(self, layer: int) -> None:
        if layer in self._slots and self._layers[layer].is_read_in_slot:
            self._free(layer)

    def close(self) -> None:
        """Nothing is copied any longer."""
        self._stream.synchronize()

    def _free(self, layer: int) -> None:
        following = self._slots.release(layer)
        if following is not None:
            self._copy(following)

    def _copy(self, layer: int) -> None:
        """When the current stream is past all that was asked of it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for copy in self._layers[layer].copies:
                copy.target.copy_(copy.source, non_blocking=True)
        self._copied[layer] = self._stream.record_event()


def host_matrix(
    sources: Sequence[Tensor], dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> HostMatrix | None:
    """Of bytes that the device can read; None: they lie in several places."""
    first, size = sources[0].data_ptr(), sum(map(len, sources))
    if any(a.data_ptr() + len(a) != b.data_ptr() for a, b in pairwise(sources)):
        return None
    return HostMatrix(bytes_at(first, size, device).view(dtype).view(shape), tuple(sources))
