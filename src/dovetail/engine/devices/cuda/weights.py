"""A model's tensors on a GPU: one arena, filled in the order of use while the model may already run (L3).

    host: pool or file ──copy stream──▶ | embed, layer 0 | layer 1 | … | final norm, head |
                                                       ▲ event   ▲ event               ▲ event

Whoever computes a layer makes its stream wait for the event of that layer, not for the end. Host memory that is pinned
(the registered pool) is read by the device itself; any other goes through a ring of pinned buffers. Quantised matrices
travel as they are stored, in cells for CPUs, and are laid out row by row when they have arrived. Matrices of streamed
layers do not stay (`streamed`): behind the tensors that do lie the slots that they are copied into.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dovetail.engine.devices.cuda.arena import CudaArena
from dovetail.engine.devices.cuda.coded import CodedMatrix, CodedRows, can_keep, lay_out
from dovetail.engine.devices.cuda.copier import HostCopier
from dovetail.engine.devices.cuda.fp8 import Fp8Matrix, Rounded, round_rows
from dovetail.engine.devices.cuda.in_place import HostMatrix
from dovetail.engine.devices.cuda.places import CodedPlace, Fp8Place, Place, Room, aligned
from dovetail.engine.devices.cuda.streamed import LayerStream, SlotCopy, StreamedLayer, host_matrix
from dovetail.engine.dtypes import TORCH_DTYPES
from dovetail.engine.weights import from_read_only_memory
from dovetail.layouts import BY_ROWS, to_cells, unpack
from dovetail.modelspec import is_fp8_matrix
from dovetail.node.ports import Checkpoint, HostTensor
from dovetail.policy.streaming import SLOTS

HostSources = list[list[Tensor]]  # a tensor's bytes in host memory, by piece, in parts


@runtime_checkable
class PooledCheckpoint(Protocol):
    """A checkpoint in the host pool, of which the last bytes may still be on their way."""

    def wait(self, name: str | None = None) -> None: ...

    def chunks(self, name: str) -> Sequence[memoryview] | None:
        """A tensor's bytes where the pool keeps them, none of them across two chunks; None = it has to be put together
        from `pieces`."""


class DeviceWeights:
    """Owns the device memory of one model's tensors until close()."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        copier: HostCopier,
        *,
        in_fp8: bool = False,  # matrices of layers, unless they are quantised already
        streamed: Collection[int] = (),  # layers that are copied anew with every iteration
        slot_stream: torch.cuda.Stream | None = None,  # that copies them
        in_place: bool = False,  # they are not: kernels read them in host memory. Experts are read so in any case
    ) -> None:
        self.spec = checkpoint.spec
        self.dtype = dtype
        self._in_fp8 = in_fp8
        self._streamed = frozenset(streamed)
        self._sources: dict[str, HostSources] = {}  # of what is streamed
        self._raw: dict[str, list[Place]] = {}  # where it lies as it is stored, in its slot
        self._in_place = in_place
        self._in_host: dict[str, HostMatrix] = {}  # what kernels read in host memory
        self._device, self._copier = device, copier
        self._places: dict[str, Place | Fp8Place | tuple[CodedPlace, ...]] = {}
        self._shapes = dict(self.spec.tensors())
        self.num_bytes = self._plan(checkpoint)
        self._arena = CudaArena(self.num_bytes, device)
        self._bytes: Tensor | None = None
        self._slots: LayerStream | None = None
        self._events: list[torch.cuda.Event] = []  # of the layers; none once all have arrived
        self._is_here = False
        with ExitStack() as undo:
            undo.callback(self.close)
            self._arena.resize(self.num_bytes)
            self._bytes = self._arena.tensor(torch.uint8, (self.num_bytes,))
            self._slots = self._make_slots(slot_stream)
            self.load(checkpoint)
            undo.pop_all()

    def load(self, checkpoint: Checkpoint) -> None:
        """Copy all tensors, in the forms that they were planned in; returns when the last copy is queued."""
        self._events, self._is_here = [], False
        self._arena.resize(self.num_bytes)
        self._load(checkpoint)

    def arrived_share(self) -> float:
        """Of the layers; by any thread."""
        events = self._events
        return sum(event.query() for event in events) / len(events) if events else 1.0

    def let_go(self) -> None:
        """Until the next `load` nothing is kept; addresses stay."""
        self._arena.in_use = (self._copied(),)
        self._arena.lend()
        self._events, self._is_here = [], False

    @property
    def committed_bytes(self) -> int:
        return self._arena.committed_bytes

    def has(self, name: str) -> bool:
        return name in self._places or name in self._in_host

    def get(self, name: str) -> Tensor:
        """A view; its bytes are there once its layer is."""
        place = self._places[name]
        assert isinstance(place, Place), f"{name} is quantised"
        return self._at(place)

    def find(self, name: str) -> Tensor | None:
        return self.get(name) if self.has(name) else None

    def matrix(self, name: str) -> Tensor | CodedMatrix | Fp8Matrix | HostMatrix:
        """The same of what may be quantised, or not on the device."""
        if name in self._in_host:
            return self._in_host[name]
        places = self._places[name]
        if isinstance(places, Place):
            return self._at(places)
        if isinstance(places, Fp8Place):
            return Fp8Matrix(self._at(places.values), self._at(places.scales))
        pieces = (
            CodedRows(one.layout, one.coding.columns, self._at(one.codes), tuple(map(self._at, one.scales)))
            for one in places
        )
        return CodedMatrix(self._shapes[name], tuple(pieces))

    def _at(self, place: Place) -> Tensor:
        assert self._bytes is not None, "the weights are closed"
        return self._bytes[place.offset : place.end].view(place.dtype).view(place.shape)

    def wait_for_layer(self, layer: int) -> None:
        """Make the current stream wait until this layer has arrived; the number of layers = what follows the last."""
        if self._events:
            torch.cuda.current_stream().wait_event(self._events[layer])

    def begin(self) -> None:
        """An iteration, on the current stream."""
        if self._slots is not None:
            self._slots.begin()

    def acquire(self, layer: int) -> None:
        """Make the current stream wait until this layer can be computed with."""
        self.wait_for_layer(layer)
        if self._slots is not None:
            self._slots.acquire(layer)

    def release(self, layer: int) -> None:
        """The current stream has been asked for all that this iteration computes with it."""
        if self._slots is not None:
            self._slots.release(layer)

    @property
    def reads_host(self) -> bool:
        """With every iteration, for as long as it is open."""
        return self._slots is not None or bool(self._in_host)

    def has_arrived(self) -> bool:
        """All that stays is on the device; of that, host memory is no longer read."""
        if len(self._events) > self.spec.num_layers and self._events[-1].query():
            self._events, self._is_here = [], True
        return self._is_here

    def close(self, *events: torch.cuda.Event) -> None:
        """The memory goes back when the device is past these and has copied what this model has queued; loads of
        others are not waited for."""
        if self._slots is not None:
            self._slots.close()
        self._slots, self._sources, self._in_host = None, {}, {}
        if self._bytes is not None:
            self._arena.in_use = (*events, self._copied())
        self._events = []
        self._bytes = None
        self._arena.close()

    def wait(self) -> None:
        """Until all of it has arrived."""
        self._copied().synchronize()

    def _copied(self) -> torch.cuda.Event:
        if self._is_here or len(self._events) > self.spec.num_layers:
            return self._events[-1] if self._events else torch.cuda.Event()
        event = torch.cuda.Event()  # loading has ended early
        event.record(self._copier.stream)
        return event

    def _plan(self, checkpoint: Checkpoint) -> int:
        """Returns the bytes that all of it takes."""
        room, by_layer = Room(), dict[int, list[str]]()
        for name in self._shapes:
            layer = _layer_of(name)
            found = None
            if self._can_stay_in_host(name, checkpoint):
                (sources,) = self._pinned_sources(name, checkpoint)
                found = host_matrix(sources, _kept_type(name, checkpoint, self.dtype), self._shapes[name], self._device)
            if found is not None:
                self._in_host[name] = found
            elif layer in self._streamed and _is_matrix(name, self._shapes[name]):
                by_layer.setdefault(layer, []).append(name)
            else:
                self._places[name] = self._take(name, room, checkpoint)
        return self._plan_slots(by_layer, room.num_bytes, checkpoint) if by_layer else room.num_bytes

    def _take(self, name: str, room: Room, checkpoint: Checkpoint) -> Place | Fp8Place | tuple[CodedPlace, ...]:
        pieces, shape = checkpoint.pieces(name), self._shapes[name]
        if _stays_coded(name, pieces):
            return tuple(room.take_coded(piece) for piece in pieces)
        if self._in_fp8 and is_fp8_matrix(name, shape):
            return room.take_fp8(shape)
        return room.take(_kept_type(name, checkpoint, self.dtype), shape)

    def _plan_slots(self, by_layer: dict[int, list[str]], begin: int, checkpoint: Checkpoint) -> int:
        """Slots for matrices as they are stored, and room for one layer's in the form that kernels read."""
        for name in (name for names in by_layer.values() for name in names):
            self._sources[name] = self._pinned_sources(name, checkpoint)
        slot_bytes = work_bytes = 0
        for names in by_layer.values():  # of any of them
            slot, work = self._plan_layer(names, checkpoint, 0, 0)
            slot_bytes, work_bytes = max(slot_bytes, slot), max(work_bytes, work)
        slots = [begin := aligned(begin), aligned(begin + slot_bytes)]
        work_begin = aligned(slots[1] + slot_bytes)
        for at, names in enumerate(by_layer.values()):
            self._plan_layer(names, checkpoint, slots[at % SLOTS], work_begin)
        return work_begin + work_bytes

    def _plan_layer(self, names: Sequence[str], checkpoint: Checkpoint, slot_at: int, work_at: int) -> tuple[int, int]:
        """Returns what it takes of either."""
        slot, work = Room(slot_at), Room(work_at)
        for name in names:
            if self._is_unpacked(name, checkpoint):
                sizes = [sum(map(len, sources)) for sources in self._sources[name]]
                self._raw[name] = [slot.take(torch.uint8, (size,)) for size in sizes]
                self._places[name] = self._take(name, work, checkpoint)
            else:
                place = self._take(name, slot, checkpoint)
                assert isinstance(place, Place)
                self._places[name], self._raw[name] = place, [place]
        return slot.num_bytes - slot_at, work.num_bytes - work_at

    def _can_stay_in_host(self, name: str, checkpoint: Checkpoint) -> bool:
        """Kernels read only part of it, or there is to be no room for slots."""
        if not self._streamed or self._is_unpacked(name, checkpoint):
            return False
        if name == "embed.weight":
            return not self.spec.tied_embeddings
        is_streamed = _layer_of(name) in self._streamed and _is_matrix(name, self._shapes[name])
        return is_streamed and (self._in_place or ".experts." in name)

    def _is_unpacked(self, name: str, checkpoint: Checkpoint) -> bool:
        return (self._in_fp8 and is_fp8_matrix(name, self._shapes[name])) or _stays_coded(name, checkpoint.pieces(name))

    def _pinned_sources(self, name: str, checkpoint: Checkpoint) -> HostSources:
        """In the pool, or a copy of our own where the device cannot read what the checkpoint has."""
        if isinstance(checkpoint, PooledCheckpoint):
            checkpoint.wait(name)
        pieces = checkpoint.pieces(name)
        with from_read_only_memory():
            if _stays_coded(name, pieces):
                found = [_coded_bytes(checkpoint, name, piece) for piece in pieces]
            else:
                found = [_host_bytes(checkpoint, name, _kept_type(name, checkpoint, self.dtype))]
            return [[self._copier.pinned(source) for source in sources] for sources in found]

    def _make_slots(self, stream: torch.cuda.Stream | None) -> LayerStream | None:
        if not self._sources:
            return None
        assert stream is not None, "somebody has to copy what is streamed"
        names = sorted(self._sources, key=_layer_of)
        layers = {layer: self._streamed_layer(list(own)) for layer, own in groupby(names, _layer_of)}
        return LayerStream(stream, layers, torch.zeros(16, dtype=torch.uint8, device=self._device))

    def _streamed_layer(self, names: Sequence[str]) -> StreamedLayer:
        copies, unpacks = list[SlotCopy](), list[Callable[[], None]]()
        for name in names:
            raw = [self._at(place).view(-1).view(torch.uint8) for place in self._raw[name]]
            for target, sources in zip(raw, self._sources[name], strict=True):
                parts = target.split([len(source) for source in sources])
                copies += [SlotCopy(*pair) for pair in zip(parts, sources, strict=True)]
            place = self._places[name]
            if isinstance(place, Fp8Place):
                into = self._at(place.values), self._at(place.scales)
                unpacks.append(partial(_round, *into, raw[0].view(self.dtype)))
            elif not isinstance(place, Place):
                unpacks += [partial(self._lay_out, *pair) for pair in zip(place, raw, strict=True)]
        is_read_in_slot = any(isinstance(self._places[name], Place) for name in names)
        return StreamedLayer(tuple(copies), tuple(unpacks), is_read_in_slot)

    def _load(self, checkpoint: Checkpoint) -> None:
        last_layer = 0
        with from_read_only_memory():
            for name in self._shapes:
                layer = _arrives_with(name, self.spec.num_layers)
                while last_layer < layer:
                    self._record()
                    last_layer += 1
                if name not in self._sources and name not in self._in_host:
                    self._copy(name, checkpoint)
        self._record()
        assert len(self._events) == self.spec.num_layers + 1

    def _record(self) -> None:
        event = torch.cuda.Event()
        event.record(self._copier.stream)
        self._events.append(event)

    def _copy(self, name: str, checkpoint: Checkpoint) -> None:
        place = self._places[name]
        if isinstance(checkpoint, PooledCheckpoint):
            checkpoint.wait(name)
        if isinstance(place, Place):
            self._copier.copy_all(
                self._at(place).reshape(-1).view(torch.uint8), _host_bytes(checkpoint, name, place.dtype), name
            )
            return
        if isinstance(place, Fp8Place):
            self._copy_rounded(place, _host_bytes(checkpoint, name, self.dtype), name)
            return
        pieces = checkpoint.pieces(name)
        for piece, own in zip(pieces, place, strict=True):
            self._copy_coded(own, _coded_bytes(checkpoint, name, piece), name)

    def _copy_coded(self, place: CodedPlace, sources: Sequence[Tensor], name: str) -> None:
        """Through memory of the copying stream, which is that stream's to use again."""
        with torch.cuda.stream(self._copier.stream):
            cells = torch.empty(sum(map(len, sources)), dtype=torch.uint8, device=self._device)
            self._copier.copy_all(cells, sources, name)
            self._lay_out(place, cells)

    def _copy_rounded(self, place: Fp8Place, sources: Sequence[Tensor], name: str) -> None:
        with torch.cuda.stream(self._copier.stream):
            wide = torch.empty(sum(map(len, sources)), dtype=torch.uint8, device=self._device)
            self._copier.copy_all(wide, sources, name)
            _round(self._at(place.values), self._at(place.scales), wide.view(self.dtype))

    def _lay_out(self, place: CodedPlace, cells: Tensor) -> None:
        lay_out(cells, place.coding, self._at(place.codes), [self._at(scale) for scale in place.scales])


def _kept_type(name: str, checkpoint: Checkpoint, dtype: torch.dtype) -> torch.dtype:
    """Norms stay as they are stored, kernels widen them; what is multiplied is in the compute type."""
    if "norm." not in name:
        return dtype
    stored = {TORCH_DTYPES[piece.dtype] for piece in checkpoint.pieces(name)}
    return stored.pop() if len(stored) == 1 else torch.float32


def _arrives_with(name: str, num_layers: int) -> int:
    """The layer whose event it is there with."""
    if name in ("embed.weight", "positions.weight"):
        return 0
    return _layer_of(name) if name.startswith("layers.") else num_layers


def _round(values: Tensor, scales: Tensor, wide: Tensor) -> None:
    columns = values.shape[-1]
    round_rows(wide.view(-1, columns), Rounded(values.view(-1, columns), scales.view(-1)))


def _layer_of(name: str) -> int:
    """-1 = of none."""
    return int(name.split(".")[1]) if name.startswith("layers.") else -1


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Large enough to be worth a copy with every iteration."""
    return len(shape) > 1 and "norm." not in name


def _stays_coded(name: str, pieces: Sequence[HostTensor]) -> bool:
    """Tokens are looked up in one piece."""
    if name == "embed.weight" and len(pieces) > 1:
        return False
    return all(can_keep(BY_ROWS.get(piece.layout, piece.layout)) for piece in pieces)


def _chunks(checkpoint: Checkpoint, name: str) -> list[Tensor] | None:
    """A tensor's bytes where the host pool has them."""
    chunks = checkpoint.chunks(name) if isinstance(checkpoint, PooledCheckpoint) else None
    return None if chunks is None else [torch.frombuffer(chunk, dtype=torch.uint8) for chunk in chunks]


def _coded_bytes(checkpoint: Checkpoint, name: str, piece: HostTensor) -> list[Tensor]:
    """In cells: as they lie in the pool, if they do and are all of the tensor."""
    is_whole = len(checkpoint.pieces(name)) == 1 and piece.layout not in BY_ROWS
    return (_chunks(checkpoint, name) if is_whole else None) or [_in_cells(piece)]


def _in_cells(piece: HostTensor) -> Tensor:
    """Its bytes; those of earlier releases, which are row by row, in cells."""
    rows = math.prod(piece.shape[:-1])
    data = to_cells(piece.layout, (rows, piece.shape[-1]), piece.data) if piece.layout in BY_ROWS else piece.data
    return torch.frombuffer(data, dtype=torch.uint8)


def _host_bytes(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> list[Tensor]:
    """The bytes of a tensor in the type that the device keeps it in: as they lie, or converted on the host."""
    pieces = checkpoint.pieces(name)
    as_stored = all(piece.layout == "plain" and TORCH_DTYPES[piece.dtype] == dtype for piece in pieces)
    chunks = _chunks(checkpoint, name) if as_stored else None
    return chunks or [_converted(piece, dtype) for piece in pieces]


def _converted(piece: HostTensor, dtype: torch.dtype) -> Tensor:
    if piece.layout != "plain":
        values = torch.from_numpy(unpack(piece.layout, piece.dtype, piece.shape, piece.data))
    else:
        values = torch.frombuffer(piece.data, dtype=TORCH_DTYPES[piece.dtype], count=math.prod(piece.shape))
    return values.to(dtype).reshape(-1).view(torch.uint8)
