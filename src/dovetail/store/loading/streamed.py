"""Models of the store that are larger than their node: some layers stay in memory, the matrices of the others are read
from the disk with every iteration (C1).

    file    | embed | layer 0 | layer 1 | layer 2 | layer 3 | norm, head |
    kept    | embed |           layer 1             layer 3   norm, head |    read once, when the model is opened
    slots             layer 0             layer 2                             see `layer_reader`

Tensors are views of either; whoever computes waits for a layer before its views are read. Small tensors stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from dovetail.errors import UnsupportedModel
from dovetail.node.ports import HostTensor
from dovetail.store.checking import check_weights
from dovetail.store.format.manifest import (
    PAGE_BYTES,
    Manifest,
    StoredModel,
    TensorEntry,
    partition_files,
    read_manifest,
)
from dovetail.store.loading.layer_reader import (
    DiskThreads,
    Fill,
    LayerReader,
    Range,
    anonymous,
    lock_shared,
    measure_speed,
    read_all,
)
from dovetail.store.loading.loader import LoaderConfig
from dovetail.store.loading.reader import PartitionFile


class _Kept(NamedTuple):
    range: Range
    memory: memoryview


class StreamedModel(StoredModel):
    """A node.ports.Checkpoint. `reader` is whoever computes with it to close; tensors stay until they are let go."""

    def __init__(self, folder: Path, streamed: Sequence[int], num_slots: int, config: LoaderConfig) -> None:
        manifest = read_manifest(folder)
        super().__init__(folder, manifest=manifest)  # mapped: small tensors come from there
        if len(manifest.partitions) != 1:
            raise UnsupportedModel(f"{folder}: cut for several devices, and larger than this node: pull it whole")
        ((path, partition),) = partition_files(folder, manifest)
        ranges = {layer: _range_of(layer, manifest) for layer in streamed}
        with ExitStack() as undo:
            file = PartitionFile(path, partition.size, config.direct_io, config.staging)
            lock_shared(file)
            threads = DiskThreads(file, config.readers)
            undo.callback(threads.close)
            kept = [_Kept(span, anonymous(span.end - span.begin)) for span in _between(ranges.values(), partition.size)]
            read_all(threads, [Fill(*one) for one in kept])
            self.reader = LayerReader(threads, ranges, min(num_slots, len(ranges)))
            self._kept = [*kept, *(_Kept(*self.reader.memory_of(layer)) for layer in ranges)]
            read = [entry for entry in manifest.tensors if _layer_of(entry.name) in ranges]
            self._in_slots = {entry.name for entry in read if _leaves(entry)}
            self._small = {entry.name for entry in read} - self._in_slots
            self.reader.start()
            undo.pop_all()

    def is_in_slot(self, name: str) -> bool:
        """Whether the tensor is there only while its layer is used."""
        return name in self._in_slots

    def _view(self, entry: TensorEntry) -> HostTensor:
        if entry.name in self._small:
            return HostTensor(entry.dtype, entry.shape, memoryview(bytes(super()._view(entry).data)), entry.layout)
        span, memory = next(one for one in self._kept if one.range.begin <= entry.offset < one.range.end)
        begin = entry.offset - span.begin
        return HostTensor(entry.dtype, entry.shape, memory[begin : begin + entry.size].toreadonly(), entry.layout)


def open_streamed(
    folder: Path, streamed: Sequence[int], num_slots: int, config: LoaderConfig, *, verify: bool = False
) -> StreamedModel:
    if verify:
        check_weights(folder, read_manifest(folder))
    return StreamedModel(folder, streamed, num_slots, config)


def disk_speed(folder: Path, config: LoaderConfig) -> float | None:
    """Bytes per second at which the model's layers come from its disk, measured."""
    path, partition = partition_files(folder)[0]
    return measure_speed(path, partition.size, config.direct_io, config.readers)


def _layer_of(name: str) -> int | None:
    return int(name.split(".")[1]) if name.startswith("layers.") else None


def _leaves(entry: TensorEntry) -> bool:
    """A tensor of a streamed layer leaves with it unless it is small."""
    return len(entry.shape) > 1 and "norm." not in entry.name


def _range_of(layer: int, manifest: Manifest) -> Range:
    """Whole pages: the group after a layer begins on a page."""
    own = [entry for entry in manifest.tensors if _layer_of(entry.name) == layer]
    begin, end = min(entry.offset for entry in own), max(entry.offset + entry.size for entry in own)
    return Range(begin, -(-end // PAGE_BYTES) * PAGE_BYTES)


def _between(ranges: Iterable[Range], size: int) -> Iterator[Range]:
    """What of the file is in none of these."""
    at = 0
    for begin, end in sorted(ranges):
        if begin > at:
            yield Range(at, begin)
        at = end
    if at < size:
        yield Range(at, size)
