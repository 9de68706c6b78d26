"""A model's tensors on a GPU: one arena, filled in the order of use while the model may already run (L3).

    host: pool or file ──copy stream──▶ | embed, layer 0 | layer 1 | … | final norm, head |
                                                       ▲ event   ▲ event               ▲ event

Whoever computes a layer makes its stream wait for the event of that layer, not for the end. Host memory that is pinned
(the registered pool) is read by the device itself; any other goes through a ring of pinned buffers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dovetail.engine.devices.cuda.arena import CudaArena
from dovetail.engine.dtypes import TORCH_DTYPES
from dovetail.engine.gpu_load import PinnedRange
from dovetail.engine.weights import from_read_only_memory
from dovetail.layouts import unpack
from dovetail.node.ports import Checkpoint, HostTensor

ALIGNMENT = 256
RING_BUFFERS, RING_BYTES = 4, 16 << 20


@dataclass(frozen=True)
class _Place:
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@runtime_checkable
class PooledCheckpoint(Protocol):
    """A checkpoint in the host pool, of which the last bytes may still be on their way."""

    def wait(self, name: str | None = None) -> None: ...

    def chunks(self, name: str) -> Sequence[memoryview] | None:
        """A tensor's bytes where the pool keeps them, none of them across two chunks; None = it has to be put together
        from `pieces`."""


class RegisteredPool:
    """The range of host memory that models are kept in. Its chunks are registered with the driver when they are first
    copied from, and stay so: registering walks every page. Whoever owns it gives none of its pages back meanwhile."""

    def __init__(self, address: int, size_bytes: int, chunk_bytes: int) -> None:
        self._begin, self._end = address, address + size_bytes
        self._chunk_bytes = chunk_bytes
        self._pinned: dict[int, PinnedRange] = {}

    def register(self, address: int) -> None:
        """The chunk that this address is in, unless it is registered or not the pool's."""
        chunk = (address - self._begin) // self._chunk_bytes
        if self._begin <= address < self._end and chunk not in self._pinned:
            begin = self._begin + chunk * self._chunk_bytes
            self._pinned[chunk] = PinnedRange(begin, min(self._chunk_bytes, self._end - begin))


class HostCopier:
    """Copies host memory to the device on a stream of its own. One per device: its ring of pinned buffers is shared."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool: RegisteredPool | None = None
        self._ring: list[tuple[Tensor, torch.cuda.Event]] = []
        self._next = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """target and source are bytes [n]. A pinned source must stay as it is until the stream is done with it."""
        if self.pool is not None:
            self.pool.register(source.data_ptr())
        with torch.cuda.stream(self.stream):
            if source.is_pinned():
                target.copy_(source, non_blocking=True)
            else:
                self._copy_by_ring(target, source)

    def _copy_by_ring(self, target: Tensor, source: Tensor) -> None:
        for start in range(0, len(source), RING_BYTES):
            buffer, event = self._buffer()
            event.synchronize()
            part = source[start : start + RING_BYTES]
            buffer[: len(part)].copy_(part)
            target[start : start + RING_BYTES].copy_(buffer[: len(part)], non_blocking=True)
            event.record(self.stream)

    def _buffer(self) -> tuple[Tensor, torch.cuda.Event]:
        if len(self._ring) < RING_BUFFERS:
            self._ring.append((torch.empty(RING_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()))
        self._next = (self._next + 1) % len(self._ring)
        return self._ring[self._next]


class DeviceWeights:
    """Owns the device memory of one model's tensors until close()."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, copier: HostCopier) -> None:
        self.spec = checkpoint.spec
        self._dtype = dtype
        self._copier = copier
        self._places = self._plan(checkpoint)
        self.num_bytes = max(place.offset + _num_bytes(place) for place in self._places.values())
        self._arena = CudaArena(self.num_bytes, device)
        self._bytes: Tensor | None = None
        self._events: list[torch.cuda.Event] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            self._arena.resize(self.num_bytes)
            self._bytes = self._arena.tensor(torch.uint8, (self.num_bytes,))
            self._load(checkpoint)
            undo.pop_all()

    @property
    def committed_bytes(self) -> int:
        return self._arena.committed_bytes

    def has(self, name: str) -> bool:
        return name in self._places

    def get(self, name: str) -> Tensor:
        """A view; its bytes are there once its layer is."""
        assert self._bytes is not None, "the weights are closed"
        place = self._places[name]
        return self._bytes[place.offset : place.offset + _num_bytes(place)].view(place.dtype).view(place.shape)

    def find(self, name: str) -> Tensor | None:
        return self.get(name) if self.has(name) else None

    def wait_for_layer(self, layer: int) -> None:
        """Make the current stream wait until this layer has arrived; the number of layers = what follows the last."""
        if self._events:
            torch.cuda.current_stream().wait_event(self._events[layer])

    def has_arrived(self) -> bool:
        """All of it is on the device: nobody reads the host's memory any longer."""
        if self._events and self._events[-1].query():
            self._events = []
        return not self._events

    def close(self) -> None:
        self._copier.stream.synchronize()
        self._events = []
        self._bytes = None
        self._arena.close()

    def _plan(self, checkpoint: Checkpoint) -> dict[str, _Place]:
        places: dict[str, _Place] = {}
        offset = 0
        for name, shape in self.spec.tensors():
            place = _Place(self._kept(name, checkpoint), shape, offset)
            places[name] = place
            offset = -(-(offset + _num_bytes(place)) // ALIGNMENT) * ALIGNMENT
        return places

    def _kept(self, name: str, checkpoint: Checkpoint) -> torch.dtype:
        """Norms stay as they are stored, kernels widen them; what is multiplied is in the compute type."""
        if "norm." not in name:
            return self._dtype
        stored = {TORCH_DTYPES[piece.dtype] for piece in checkpoint.pieces(name)}
        return stored.pop() if len(stored) == 1 else torch.float32

    def _load(self, checkpoint: Checkpoint) -> None:
        last_layer = 0
        with from_read_only_memory():
            for name in self._places:
                layer = int(name.split(".")[1]) if name.startswith("layers.") else self._after(name)
                while last_layer < layer:
                    self._record()
                    last_layer += 1
                self._copy(name, checkpoint)
        self._record()
        assert len(self._events) == self.spec.num_layers + 1

    def _after(self, name: str) -> int:
        return 0 if name in ("embed.weight", "positions.weight") else self.spec.num_layers

    def _record(self) -> None:
        event = torch.cuda.Event()
        event.record(self._copier.stream)
        self._events.append(event)

    def _copy(self, name: str, checkpoint: Checkpoint) -> None:
        target = self.get(name).reshape(-1).view(torch.uint8)
        at = 0
        for source in _host_bytes(checkpoint, name, self._places[name].dtype):
            self._copier.copy(target[at : at + len(source)], source)
            at += len(source)
        assert at == len(target), f"{name}: {at} bytes came, {len(target)} were expected"


def _num_bytes(place: _Place) -> int:
    return math.prod(place.shape) * place.dtype.itemsize


def _host_bytes(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
    """The bytes of a tensor in the type that the device keeps it in: as they lie, or converted on the host."""
    if isinstance(checkpoint, PooledCheckpoint):
        checkpoint.wait(name)
    pieces = checkpoint.pieces(name)
    as_stored = all(piece.layout == "plain" and TORCH_DTYPES[piece.dtype] == dtype for piece in pieces)
    chunks = checkpoint.chunks(name) if as_stored and isinstance(checkpoint, PooledCheckpoint) else None
    if chunks is not None:
        yield from (torch.frombuffer(chunk, dtype=torch.uint8) for chunk in chunks)
    else:
        yield from (_converted(piece, dtype) for piece in pieces)


def _converted(piece: HostTensor, dtype: torch.dtype) -> Tensor:
    if piece.layout != "plain":
        values = torch.from_numpy(unpack(piece.layout, piece.dtype, piece.shape, piece.data))
    else:
        values = torch.frombuffer(piece.data, dtype=TORCH_DTYPES[piece.dtype], count=math.prod(piece.shape))
    return values.to(dtype).reshape(-1).view(torch.uint8)
