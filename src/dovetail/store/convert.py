"""Turns a checkpoint of any kind into partition files, in order, some megabytes of rows at a time.

Memory does not grow with the model: a slab of rows in the source's type, the same in float32 and once more packed, and
the scales of the tensor at hand (an eighth of it in int4). The source's pages are let go of as they have been read.

An interrupted conversion leaves its files and a journal of what was safely on disk; the next one with the same
`identity` goes on from there. Bytes are written before the journal that counts them, so the journal never lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from dovetail.codings import CODINGS, FORMS, Array, Quantised
from dovetail.errors import DamagedCheckpoint, UnsupportedModel
from dovetail.layouts import BY_ROWS, NUMPY, Packer, coding_of, packer, unpack, unpack_codes
from dovetail.node.ports import HostTensor
from dovetail.store.files import write_file
from dovetail.store.format.arrange import Arrangement, Cut, Tensor, bounds
from dovetail.store.format.manifest import Partition, TensorEntry
from dovetail.store.format.partition_writer import PartitionWriter

SLAB_BYTES = 16 * 2**20  # of float32
JOURNAL_BYTES = 256 * 2**20  # written between two entries of the journal: what an interruption can cost
RELEASE_BYTES = 32 * 2**20  # written; with what was read for it, at most four times that is mapped at once
JOURNAL = "journal.json"

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class Source(Protocol):
    """Tensors by name: a model's or an adapter's."""

    def pieces(self, name: str) -> Sequence[HostTensor]:
        """As node.ports.Checkpoint.pieces."""

    def release(self) -> None:
        """Lets go of pages that were read; they come back when touched."""


class Journal(msgspec.Struct, frozen=True):
    """How far a conversion has come: everything named here is on disk."""

    identity: str  # of the source's files and of what is made of them
    num_tensors: int = 0  # finished
    positions: tuple[int, ...] = ()  # per partition
    chunks: tuple[tuple[str, ...], ...] = ()


class Conversion:
    """Files `partition-0`… in `folder`, which is this conversion's own."""

    def __init__(self, folder: Path, identity: str, journal_bytes: int = JOURNAL_BYTES) -> None:
        self._folder = folder
        self._identity = identity
        self._journal_bytes = journal_bytes

    def path(self, rank: int) -> Path:
        return self._folder / f"partition-{rank}"

    def resumable_bytes(self) -> int:
        return sum(self._read_journal().positions)

    def run(self, source: Source, arrangement: Arrangement, progress: Progress | None = None) -> list[Partition]:
        journal = self._read_journal()
        fresh = not journal.positions
        count = len(arrangement.sizes)
        positions = journal.positions or (0,) * count
        writers = [
            PartitionWriter(self.path(rank), positions[rank], () if fresh else journal.chunks[rank])
            for rank in range(count)
        ]
        try:
            self._write_tensors(source, arrangement, writers, journal.num_tensors, progress)
            return [writer.finish(size) for writer, size in zip(writers, arrangement.sizes, strict=True)]
        finally:
            for writer in writers:
                writer.close()

    def _write_tensors(
        self,
        source: Source,
        arrangement: Arrangement,
        writers: list[PartitionWriter],
        done: int,
        progress: Progress | None,
    ) -> None:
        total = sum(arrangement.sizes)
        noted = released = sum(writer.position for writer in writers)
        for number, tensor in enumerate(arrangement.tensors[done:], done):
            for _ in write_tensor(source, tensor, writers):
                written = sum(writer.position for writer in writers)
                if progress is not None:
                    progress(written, total)
                if written - released >= RELEASE_BYTES:
                    source.release()
                    released = written
            if written - noted >= self._journal_bytes:
                self._note(number + 1, writers)
                noted = written
        source.release()
        if progress is not None:
            progress(total, total)

    def _note(self, num_tensors: int, writers: list[PartitionWriter]) -> None:
        for writer in writers:
            writer.sync()
        positions = tuple(writer.position for writer in writers)
        chunks = tuple(tuple(writer.chunks) for writer in writers)
        entry = Journal(self._identity, num_tensors, positions, chunks)
        write_file(self._folder / JOURNAL, msgspec.json.encode(entry))

    def _read_journal(self) -> Journal:
        """Empty where there is none, or one of other files."""
        try:
            found = msgspec.json.decode((self._folder / JOURNAL).read_bytes(), type=Journal)
        except (OSError, msgspec.DecodeError):
            return Journal(self._identity)
        return found if found.identity == self._identity else Journal(self._identity)


def write_tensor(source: Source, tensor: Tensor, writers: list[PartitionWriter]) -> Iterator[None]:
    """Yields after every slab."""
    sinks = _Sinks(tensor, writers)
    columns = tensor.shape[-1] if len(tensor.shape) > 1 else 1
    wanted = math.prod(tensor.shape) // columns
    row = 0
    for piece in source.pieces(tensor.name):
        for slab in _slabs(piece, columns):
            if row + len(slab.rows) > wanted:
                raise DamagedCheckpoint(f"{tensor.name}: more rows than shape {list(tensor.shape)} has")
            for rank, own in _routed(tensor.cut, (len(slab.rows), columns), row, len(tensor.shares)):
                sinks.of(rank).take(slab, own)
            row += len(slab.rows)
            yield
    if row != wanted:
        raise DamagedCheckpoint(f"{tensor.name}: {row} rows, shape {list(tensor.shape)} has {wanted}")
    sinks.finish()
    yield


class _Slab(NamedTuple):
    dtype: str
    rows: Array  # [rows, columns]; bfloat16 as bits; codes, padded as their layout pads them
    columns: int
    layout: str = "plain"
    scales: tuple[Array, ...] | None = None  # of codes


class _Share(NamedTuple):
    rows: slice
    columns: slice


def _slabs(piece: HostTensor, columns: int) -> Iterator[_Slab]:
    dtype, layout, scales = piece.dtype, "plain", None
    values: Array
    if piece.layout in (*BY_ROWS, *CODINGS):
        layout = BY_ROWS.get(piece.layout, piece.layout)
        values, scales = unpack_codes(piece.layout, (math.prod(piece.shape) // columns, columns), piece.data)
    elif piece.layout != "plain":
        values, dtype = unpack(piece.layout, piece.dtype, piece.shape, piece.data).reshape(-1, columns), "f32"
    else:
        values = np.frombuffer(piece.data, NUMPY[dtype]).reshape(-1, columns)
    step = max(1, SLAB_BYTES // (4 * columns))
    for start in range(0, len(values), step):
        own = slice(start, start + step)
        some = None if scales is None else tuple(part[own] for part in scales)
        yield _Slab(dtype, values[own], columns, layout, some)


def _routed(cut: Cut, shape: tuple[int, int], first: int, ranks: int) -> Iterator[tuple[int, _Share]]:
    """(rank, its part of rows of this shape), the first of which is row `first` of the whole."""
    every = _Share(slice(0, shape[0]), slice(0, shape[1]))
    if cut.axis == "":
        yield from ((rank, every) for rank in range(ranks))
    elif cut.axis == "columns":
        for rank in range(ranks):
            yield rank, every._replace(columns=slice(*bounds(shape[1], rank, ranks)))
    elif cut.axis == "pieces":
        begin = 0
        for number, size in enumerate(cut.sections):
            start, stop = max(0, begin - first), min(begin + size - first, shape[0])
            if start < stop:
                yield number, every._replace(rows=slice(start, stop))
            begin += size
    else:
        begin = 0
        for size in cut.sections:
            for rank in range(ranks):
                start, stop = (max(0, begin + end - first) for end in bounds(size, rank, ranks))
                if start < min(stop, shape[0]):
                    yield rank, every._replace(rows=slice(start, min(stop, shape[0])))
            begin += size


class _Sinks:
    """The shares of a tensor on their way; pieces one after the other, since they lie in one partition."""

    def __init__(self, tensor: Tensor, writers: list[PartitionWriter]) -> None:
        self._shares, self._writers = tensor.shares, writers
        self._in_turn = tensor.cut.axis == "pieces"
        self._open: dict[int, _Sink] = {}
        if not self._in_turn:
            self._open = {number: self._make(number) for number in range(len(self._shares))}

    def of(self, number: int) -> _Sink:
        if number not in self._open:
            self.finish()
            self._open = {number: self._make(number)}
        return self._open[number]

    def finish(self) -> None:
        for sink in self._open.values():
            sink.finish()
        self._open = {}

    def _make(self, number: int) -> _Sink:
        share = self._shares[number]
        return _Sink(share, self._writers[share.partition])


class _Sink:
    """One share on its way into its partition."""

    def __init__(self, share: TensorEntry, writer: PartitionWriter) -> None:
        self._share = share
        self._writer = writer
        shape = share.shape if len(share.shape) > 1 else (*share.shape, 1)
        self._packer: Packer = packer(share.layout, share.dtype, shape)
        writer.pad_to(share.offset)

    def take(self, slab: _Slab, own: _Share) -> None:
        """Bits stay as they are where the share is kept as the slab comes: floats, NaNs included, and codes."""
        if slab.scales is not None:
            return self._take_codes(slab, Quantised(slab.rows, slab.scales), own)
        rows = slab.rows[own.rows, own.columns]
        if self._share.layout == "plain" and slab.dtype == self._share.dtype:
            self._writer.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8))
            return
        self._write(self._packer.rows(_float32(slab.dtype, rows)))

    def _take_codes(self, slab: _Slab, codes: Quantised, own: _Share) -> None:
        coding = coding_of(slab.layout, slab.columns)
        is_same = coding.form == FORMS.get(self._share.layout)
        part = coding.part(codes, own.rows, own.columns) if is_same else None
        if part is not None:
            return self._write(self._packer.coded_rows(part))
        values = coding.dequantise(codes.rows(own.rows))
        self._write(self._packer.rows(np.ascontiguousarray(values[:, own.columns])))

    def _write(self, packed: Iterator[Array]) -> None:
        try:
            for data in packed:
                self._writer.write(data)
        except OverflowError as error:
            raise UnsupportedModel(f"{self._share.name}: {error}; keep the model in bf16 or f32 (--dtype)") from error

    def finish(self) -> None:
        self._write(self._packer.finish())
        end = self._share.offset + self._share.size
        assert self._writer.position == end, f"{self._share.name}: {self._writer.position} != {end}"


def _float32(dtype: str, rows: Array) -> Array:
    rows = np.ascontiguousarray(rows)
    return unpack("plain", dtype, rows.shape, memoryview(rows.reshape(-1).view(np.uint8).data))
