"""Models and adapters of the store in the host pool: partitions brought there by the node's loader, tensors as views of
them. The thin place where the format and the tiers meet (L1, L3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from dovetail.store.format.late_chunks import embedding_of, late_chunks
from dovetail.store.format.manifest import (
    Manifest,
    Partition,
    StoredModel,
    StoredTensors,
    files_of,
    is_arriving,
    partition_files,
    read_manifest,
)
from dovetail.store.hf.adapters import StoredAdapter
from dovetail.store.loading.late_rows import LateRows
from dovetail.store.loading.loader import Loader, PartitionSource, Ticket

_LOOK_S = 0.05


class _InPool(StoredTensors):
    """Holds its tickets until `close`; the bytes stay for as long as a tensor upon them does."""

    def __init__(self, folder: Path, manifest: Manifest, tickets: Sequence[Ticket]) -> None:
        super().__init__(folder, [ticket.lease.view() for ticket in tickets], manifest)
        self.tickets = tuple(tickets)

    def wait(self, name: str | None = None) -> None:
        """Until a tensor has arrived (None: all of them). Tensors lie in the order of their use, so that whoever asks
        for them in that order can work while the rest is read."""
        if name is None:
            for ticket in self.tickets:
                ticket.wait()
        else:
            for entry in self._entries[name]:
                self.tickets[entry.partition].wait(entry.offset + entry.size)

    def chunks(self, name: str) -> list[memoryview] | None:
        """A tensor's bytes in the pool's own mapping, one piece per chunk: for copies to a device that has the pool
        registered. None where the tensor is spread over partitions."""
        first, *others = self._entries[name]
        if others:
            return None
        return self.tickets[first.partition].lease.pieces(first.offset, first.offset + first.size)

    def close(self) -> None:
        super().close()
        for ticket in self.tickets:
            ticket.close()


class PooledModel(_InPool, StoredModel):
    """A node.ports.Checkpoint."""

    def late_rows(self) -> LateRows | None:
        """Of an embedding whose rows are still on their way; None where all of it is here."""
        entry, lease = embedding_of(self.manifest), self.tickets[0].lease
        if entry is None or lease.arrived_bytes == lease.size_bytes:
            return None
        late = late_chunks(self.manifest)
        return LateRows(lease, entry, late) if self._has_marks and late else None

    def wait_but_late(self) -> None:
        """Until everything has arrived that a first token needs whatever its prompt is."""
        late = late_chunks(self.manifest)
        if not late or not self._has_marks:
            self.wait()
            return
        ticket = self.tickets[0]
        wanted = [index for index in range(len(self.manifest.partitions[0].chunks)) if index not in late]
        while not all(ticket.lease.has_chunk(index) for index in wanted):
            if ticket.wait(timeout_s=_LOOK_S):
                return

    @property
    def _has_marks(self) -> bool:
        """The pool knows of each chunk of the manifest whether it is in."""
        return self.tickets[0].lease.pool.chunk_bytes == self.manifest.partitions[0].chunk_bytes


class PooledAdapter(_InPool, StoredAdapter):
    """An adapter's tensors, likewise."""


def open_pooled(
    folder: Path,
    loader: Loader,
    *,
    priority: int = 0,
    room_wait_s: float = float("inf"),
    verify: bool = False,
    whole: bool = True,
    manifest: Manifest | None = None,
    on_place: Callable[[Sequence[Ticket]], None] = lambda _: None,
) -> PooledModel:
    """Load a model of the store into the pool, unless it is there. With `whole` false it returns as soon as there is
    room for it: `wait` for a tensor before it is used. `verify` checks every chunk against the manifest as it comes.
    `on_place` is called when there is room: how much has arrived is the tickets' to say."""
    with ExitStack() as undo:
        manifest = manifest or read_manifest(folder)
        model = PooledModel(folder, manifest, _load(folder, manifest, loader, priority, room_wait_s, verify, undo))
        undo.callback(model.close)  # its views too: an error's traceback keeps the model for a while
        on_place(model.tickets)
        if whole:
            model.wait()
        undo.pop_all()
        return model


def open_pooled_adapter(
    folder: Path, loader: Loader, *, priority: int = 0, verify: bool = False, room_wait_s: float = float("inf")
) -> PooledAdapter:
    with ExitStack() as undo:
        manifest = read_manifest(folder)
        tickets = _load(folder, manifest, loader, priority, room_wait_s, verify, undo)
        adapter = PooledAdapter(folder, manifest, tickets)
        undo.callback(adapter.close)
        adapter.wait()
        undo.pop_all()
        return adapter


def pooled_keys(manifest: Manifest) -> frozenset[str]:
    """What the pool calls the model's partitions."""
    return frozenset(partition.digest for partition in manifest.partitions)


def source_of(path: Path, partition: Partition, *, verify: bool = False) -> PartitionSource:
    digests = partition.chunks if verify else None
    return PartitionSource(partition.digest, path, partition.size, digests, partition.chunk_bytes)


def _load(
    folder: Path,
    manifest: Manifest,
    loader: Loader,
    priority: int,
    room_wait_s: float,
    verify: bool,
    undo: ExitStack,
) -> list[Ticket]:
    files = files_of(folder, manifest) if is_arriving(folder) else partition_files(folder, manifest)
    sources = [source_of(path, partition, verify=verify) for path, partition in files]
    tickets = loader.load_all(sources, priority, room_wait_s)
    for ticket in tickets:
        undo.callback(ticket.close)
    for ticket in tickets:
        ticket.wait(0)  # for its place in the pool
    return tickets
