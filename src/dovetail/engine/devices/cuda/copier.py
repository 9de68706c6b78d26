"""Copies of host memory to a GPU: out of the host pool, which is registered with the driver so that the device reads it
by itself, or of any other memory, through a ring of pinned buffers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from dovetail.engine.gpu_load import PinnedRange
from dovetail.errors import OutOfMemory

RING_BUFFERS, RING_BYTES = 4, 16 << 20
REST_S = 0.002  # between two chunks that are registered ahead, each of which takes as long
log = logging.getLogger("dovetail.worker")


class RegisteredPool:
    """The range of host memory that models are kept in. Its chunks are registered with the driver once, and stay so:
    registering walks every page, and holds whoever calls the driver meanwhile. So chunks that models are expected in
    are registered ahead, one at a time with rests; others when they are first copied from. Whoever owns the range gives
    none of its pages back meanwhile."""

    def __init__(self, address: int, size_bytes: int, chunk_bytes: int) -> None:
        self._begin, self._end = address, address + size_bytes
        self._chunk_bytes = chunk_bytes
        self._pinned: dict[int, PinnedRange] = {}
        self._registering = threading.Lock()
        self._expected = 0  # chunks, from the first on: the pool takes them in this order
        self._ahead: threading.Thread | None = None

    def register(self, address: int) -> None:
        """The chunk that this address is in, unless it is registered or not the pool's."""
        chunk = (address - self._begin) // self._chunk_bytes
        if self._begin <= address < self._end and chunk not in self._pinned:
            self._register(chunk)

    def expect(self, num_bytes: int) -> None:
        """Models of so many bytes may come."""
        wanted = min(-(-num_bytes // self._chunk_bytes), -(-(self._end - self._begin) // self._chunk_bytes))
        self._expected = max(self._expected, wanted)
        if self._ahead is None or not self._ahead.is_alive():
            self._ahead = threading.Thread(target=self._register_expected, daemon=True, name="registrar")
            self._ahead.start()

    @property
    def registered_bytes(self) -> int:
        return len(self._pinned) * self._chunk_bytes

    def _register_expected(self) -> None:
        rest = threading.Event()  # never set
        chunk = 0
        try:
            while chunk < self._expected:
                if chunk not in self._pinned:
                    self._register(chunk)
                    rest.wait(REST_S)
                chunk += 1
        except OutOfMemory as error:  # whoever copies from the next one meets it again
            log.warning("host memory is registered with the GPU as far as %d bytes: %s", self.registered_bytes, error)

    def _register(self, chunk: int) -> None:
        with self._registering:
            if chunk not in self._pinned:
                begin = self._begin + chunk * self._chunk_bytes
                self._pinned[chunk] = PinnedRange(begin, min(self._chunk_bytes, self._end - begin))


class HostCopier:
    """Copies host memory to the device on a stream of its own. One per device: its ring of pinned buffers is shared."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool: RegisteredPool | None = None
        # Made here: allocating pinned memory holds whoever calls the driver for tens of milliseconds.
        self._ring = [
            (torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
            for _ in range(RING_BUFFERS)
        ]
        self._next = 0

    def pinned(self, source: Tensor) -> Tensor:
        """The same bytes where the device reads them by itself."""
        if self.pool is not None:
            self.pool.register(source.data_ptr())
        return source if source.is_pinned() else source.pin_memory()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """target and source are bytes [n]. A pinned source must stay as it is until the stream is done with it."""
        if self.pool is not None:
            self.pool.register(source.data_ptr())
        with torch.cuda.stream(self.stream):
            if source.is_pinned():
                target.copy_(source, non_blocking=True)
            else:
                self._copy_by_ring(target, source)

    def copy_all(self, target: Tensor, sources: Iterable[Tensor], name: str) -> None:
        """Of the tensor of this name, one behind the other."""
        at = 0
        for source in sources:
            self.copy(target[at : at + len(source)], source)
            at += len(source)
        assert at == len(target), f"{name}: {at} bytes came, {len(target)} were expected"

    def _copy_by_ring(self, target: Tensor, source: Tensor) -> None:
        for start in range(0, len(source), RING_BYTES):
            buffer, event = self._buffer()
            event.synchronize()
            part = source[start : start + RING_BYTES]
            buffer[: len(part)].copy_(part)
            target[start : start + RING_BYTES].copy_(buffer[: len(part)], non_blocking=True)
            event.record(self.stream)

    def _buffer(self) -> tuple[Tensor, torch.cuda.Event]:
        self._next = (self._next + 1) % len(self._ring)
        return self._ring[self._next]
