"""A partition on its way from host memory to a GPU, in chunks, in the order of use (L3).

    host pool, registered once            side stream                        device memory
    | chunk | chunk | chunk | …  ──copy──▶ c0 c1 ▲ c2 ▲ c3 c4 ▲ …   ──▶     | layer 0 | layer 1 | layer 2 | …
                                                 │    │       │
                                         an event for each layer: whoever computes waits for its own, not for the end

Chunks may come from several threads and out of order; a layer's event is recorded when everything before its end has
been handed to the stream, and the stream keeps the order. Knows bytes and offsets; neither files nor the pool's books.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import torch

from dovetail.engine.dtypes import TORCH_DTYPES
from dovetail.errors import DovetailError, OutOfMemory


class LoadAborted(DovetailError):
    """The rest of a partition is not coming."""


class PinnedRange:
    """Host memory that the device reads by itself. Registering walks every page, so it is done once for the pool's
    whole mapping, never for one load."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self._address: int | None = None
        code = torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0)
        if int(code) != 0:
            reason = torch.cuda.cudart().cudaGetErrorString(code)
            with suppress(RuntimeError):  # CUDA tells the next one who asks, too: not somebody who has no part in it
                torch.zeros(1, device="cuda")
            raise OutOfMemory(f"cannot pin {size_bytes:,} bytes of host memory for the GPU: {reason}")
        self._address = address

    def close(self) -> None:
        if self._address is not None:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._address = None


class DevicePartition:
    """Device memory for one partition, filled while it may already be in use.

    `layer_ends`: ascending offsets; the bytes before the i-th are what layers 0..i need. The last one is the size.
    """

    def __init__(self, layer_ends: Sequence[int], device: torch.device) -> None:
        assert list(layer_ends) == sorted(layer_ends), "layers end in the order of the file"
        self.size_bytes = layer_ends[-1]
        self.memory = torch.empty(self.size_bytes, dtype=torch.uint8, device=device)
        self._layer_ends = tuple(layer_ends)
        self._stream = torch.cuda.Stream(device)
        # The allocator may hand out memory that work queued earlier on this stream still reads.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self.memory.record_stream(self._stream)
        self._events: list[torch.cuda.Event] = []  # of the layers that are on their way
        self._arrived: dict[int, int] = {}  # start -> end of what came ahead of a gap
        self._frontier = 0  # everything before this offset has been handed to the stream
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, offset: int, data: memoryview) -> None:
        """Queue the copy of some bytes; `data` must stay as it is until `finish` has returned."""
        source = torch.frombuffer(data, dtype=torch.uint8)
        with self._changed:
            with torch.cuda.stream(self._stream):
                self.memory[offset : offset + len(source)].copy_(source, non_blocking=True)
            self._arrived[offset] = offset + len(source)
            while (end := self._arrived.pop(self._frontier, None)) is not None:
                self._frontier = end
            self._record_layers()
            self._changed.notify_all()

    def abort(self, reason: BaseException) -> None:
        """Whoever waits for a layer is told that it will not come."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def wait_for_layer(self, layer: int) -> None:
        """Make the current stream wait until this layer is there. The calling thread waits only until the copy is
        queued: the stream does the rest."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._events) > layer or self._failure is not None)
            if len(self._events) <= layer:
                raise LoadAborted(f"layer {layer} did not arrive: {self._failure}") from self._failure
            event = self._events[layer]
        torch.cuda.current_stream(self.memory.device).wait_event(event)

    def num_layers_ready(self) -> int:
        """Layers whose bytes are on the device now."""
        with self._changed:
            return sum(event.query() for event in self._events)

    def finish(self) -> None:
        """Return when every byte is on the device."""
        with self._changed:
            self._changed.wait_for(lambda: self._frontier == self.size_bytes or self._failure is not None)
            if self._frontier != self.size_bytes:
                missing = self.size_bytes - self._frontier
                raise LoadAborted(f"{missing:,} bytes did not arrive: {self._failure}") from self._failure
        self._stream.synchronize()

    def tensor(self, dtype: str, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """A view; its bytes are there once its layer is."""
        kind = TORCH_DTYPES[dtype]
        size = math.prod(shape) * kind.itemsize
        return self.memory[offset : offset + size].view(kind).view(shape)

    def _record_layers(self) -> None:
        while len(self._events) < len(self._layer_ends) and self._layer_ends[len(self._events)] <= self._frontier:
            event = torch.cuda.Event()
            event.record(self._stream)
            self._events.append(event)


def layer_ends(tensors: Sequence[tuple[str, int, int]], size_bytes: int) -> list[int]:
    """Where each layer of a partition ends, from (name, offset, size) of its tensors. What lies before layer 0 (the
    embedding) comes with it; what lies after the last (final norm, output) is one more entry, which ends the file."""
    ends: dict[int, int] = {}
    for name, offset, size in tensors:
        if name.startswith("layers."):
            layer = int(name.split(".")[1])
            ends[layer] = max(ends.get(layer, 0), offset + size)
    return [*accumulate((ends[layer] for layer in sorted(ends)), max), size_bytes]
