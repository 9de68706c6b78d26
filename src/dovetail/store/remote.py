"""Models in the store's own format that lie in an object store, under the same names as on disk: read into the host
pool and written to disk at the same time, and served while they arrive (L3).

    s3://bucket/prefix/models/<name>/manifest.json   and the files beside it, small, first
    s3://bucket/prefix/blobs/<aa>/<digest>           by ranges, each checked before it counts

Nothing is registered before everything is on disk. The lock of the source is held meanwhile, so that one download
serves all who ask, and `gc` leaves its files alone.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

import msgspec

from dovetail.errors import DamagedCheckpoint, DovetailError, SourceError
from dovetail.store.blob_writer import BlobWriter
from dovetail.store.format import (
    MANIFEST,
    TEMPLATE,
    TOKENIZER,
    Manifest,
    Partition,
    blob_path,
    is_stored,
    mark_in_use,
    parse_manifest,
    read_manifest,
)
from dovetail.store.loader import Loader, PartitionSource, Ticket
from dovetail.store.object_store import Bucket, Patience, is_object_address
from dovetail.store.place import Place, source_key
from dovetail.store.pooled import PooledModel, open_pooled, source_of
from dovetail.store.publish import digests_of, publish
from dovetail.store.tokenizer_files import TokenFields

_SMALL_BYTES = 256 << 20  # more than any manifest or tokenizer has


class RemoteModel(PooledModel):
    """Usable as far as it has arrived; `publish` makes it part of the store on disk. Closed before, it leaves none."""

    def __init__(self, found: _Found, place: Place, tickets: list[Ticket], undo: ExitStack) -> None:
        super().__init__(place.folder(found.name), found.manifest, tickets)
        self._found = found
        self._place = place
        self._undo = undo

    def tokenizer(self) -> tuple[TokenFields, str]:
        files = self._found.files
        template = files[TEMPLATE].decode() if TEMPLATE in files else None
        return msgspec.structs.replace(self.manifest.tokens, chat_template=template), files[TOKENIZER].decode()

    def publish(self) -> None:
        """Waits until every byte is on disk, then registers the model."""
        fetched = []
        for ticket, partition in zip(self.tickets, self.manifest.partitions, strict=True):
            ticket.wait()
            if ticket.source.remote is not None:
                _put_on_disk(ticket)
                fetched.append((ticket.source.path, partition))
        publish(self._place, self._found.name, self.manifest, self._found.files, fetched)
        for buffer, partition in zip(self._buffers, self.manifest.partitions, strict=True):
            mark_in_use(buffer, blob_path(self._place.root, partition.digest), partition)
        self._undo.close()

    def close(self) -> None:
        super().close()
        for ticket in self.tickets:
            if ticket.writer is not None:
                with suppress(DovetailError):  # it was stopped, or had failed before
                    ticket.writer.wait()
        self._undo.close()

    def __enter__(self) -> RemoteModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_remote(
    url: str,
    place: Place,
    loader: Loader,
    *,
    patience: Patience | None = None,
    priority: int = 0,
    room_wait_s: float = float("inf"),
) -> PooledModel:
    """The model at `url` (…/models/<name>), in the pool or on its way there. One that is in the store on disk already
    comes from there; otherwise what is returned is a RemoteModel."""
    root, name = _split(url)
    folder = place.folder(name)
    with ExitStack() as undo:
        undo.enter_context(place.lock(f"source-{source_key(url)}"))
        found = _look(Bucket(root, patience), name)
        if is_stored(folder) and read_manifest(folder).partitions == found.manifest.partitions:
            return open_pooled(folder, loader, priority=priority, room_wait_s=room_wait_s)
        staging = place.staging / f"fetch-{source_key(url)}"
        staging.mkdir(exist_ok=True)
        undo.callback(_remove_if_empty, staging)
        sources = [_source(found, place, partition, staging) for partition in found.manifest.partitions]
        tickets = loader.load_all(sources, priority, room_wait_s)
        with ExitStack() as unload:
            for ticket in tickets:
                unload.callback(ticket.close)
            for ticket in tickets:
                ticket.wait(0)  # for its place in the pool
            unload.pop_all()
        return RemoteModel(found, place, tickets, undo.pop_all())


class _Found(msgspec.Struct, frozen=True):
    """What lies in the bucket."""

    bucket: Bucket
    name: str
    manifest: Manifest
    files: dict[str, bytes]


def _look(bucket: Bucket, name: str) -> _Found:
    place = f"models/{name}"
    manifest = parse_manifest(bucket.read_all(f"{place}/{MANIFEST}", _SMALL_BYTES), f"{bucket.url}/{place}/{MANIFEST}")
    files = {file: bucket.read_all(f"{place}/{file}", _SMALL_BYTES) for file in manifest.files}
    for file, digest in digests_of(files).items():
        if digest != manifest.files[file]:
            raise DamagedCheckpoint(f"{bucket.url}/{place}/{file}: does not match its checksum")
    return _Found(bucket, name, manifest, files)


def _source(found: _Found, place: Place, partition: Partition, staging: Path) -> PartitionSource:
    on_disk = blob_path(place.root, partition.digest)
    if on_disk.exists():
        return source_of(on_disk, partition)
    path = blob_path(Path(), partition.digest).as_posix()
    return PartitionSource(
        key=partition.digest,
        path=staging / partition.digest,
        size_bytes=partition.size,
        digests=partition.chunks,
        digest_bytes=partition.chunk_bytes,
        remote=found.bucket.blob(path, partition.size),
    )


def _put_on_disk(ticket: Ticket) -> None:
    """What did not come by way of a writer was in the pool, or another process brought it there."""
    source, writer = ticket.source, ticket.writer
    if writer is None and not source.path.exists():
        writer = BlobWriter(source.path, ticket.lease.pool.reserve(source.key, source.size_bytes))
        writer.end(None)
    if writer is not None:
        writer.wait()


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _split(url: str) -> tuple[str, str]:
    root, found, name = url.rstrip("/").rpartition("/models/")
    if not (is_object_address(url) and found and name and "/" not in name):
        raise SourceError(f"{url}: expected s3://bucket/prefix/models/name, a model in the form of the store")
    return root, name
