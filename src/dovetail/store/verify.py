"""Reads a store again and compares it with the checksums: names and marks what is damaged, mends nothing."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from dovetail.errors import CheckpointError
from dovetail.store.files import read_bytes
from dovetail.store.format.manifest import (
    DAMAGED,
    Manifest,
    Partition,
    blob_path,
    is_stored,
    open_blob,
    read_manifest,
    store_root,
)

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class Damage(msgspec.Struct, frozen=True):
    models: tuple[str, ...]  # whose weights these are
    file: str
    reason: str
    chunk: int | None = None  # its number in the file
    tensors: tuple[str, ...] = ()  # that have bytes in it

    @property
    def told(self) -> str:
        return self.reason if self.reason.startswith(self.file) else f"{self.file}: {self.reason}"


class Verified(msgspec.Struct, frozen=True):
    models: tuple[str, ...]
    bytes: int  # of blobs, each read once
    damage: tuple[Damage, ...]
    unchecked: tuple[str, ...] = ()  # models of the first form, which has no checksums


def verify(folders: Sequence[Path], progress: Progress | None = None, threads: int = 4) -> Verified:
    """`folders` of models of one store. Every blob is read once, however many models name it, and from disk."""
    damage: list[Damage] = []
    manifests: dict[Path, Manifest] = {}
    for folder in folders:
        if is_stored(folder):
            try:
                manifests[folder] = read_manifest(folder)
            except CheckpointError as error:
                damage.append(Damage((folder.name,), str(folder / "manifest.json"), str(error)))
    for folder, manifest in manifests.items():
        damage.extend(_check_files(folder, manifest))
    blobs = _blobs(manifests)
    counter = _Counter(sum(blob.partition.size for blob in blobs), progress)
    for blob in blobs:
        damage.extend(_check_blob(blob, manifests, counter, threads))
    old = tuple(folder.name for folder in folders if not is_stored(folder))
    return Verified(tuple(folder.name for folder in folders), counter.total, tuple(damage), old)


def mark(folders: Sequence[Path], found: Verified) -> None:
    """Keeps the finding in each model's folder, so that the next pull of the same source fetches it anew and no server
    starts with it. A store that cannot be written to keeps nothing."""
    reasons: dict[str, str] = {}
    for damage in found.damage:
        for name in damage.models:
            reasons.setdefault(name, damage.told)
    for folder in folders:
        with suppress(OSError):
            if folder.name in reasons:
                (folder / DAMAGED).write_text(reasons[folder.name])
            else:
                (folder / DAMAGED).unlink(missing_ok=True)


class _Blob(NamedTuple):
    path: Path
    partition: Partition
    named_by: tuple[tuple[Path, int], ...]  # (folder, which of its partitions)

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted({folder.name for folder, _ in self.named_by}))


class _Counter:
    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self._done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self.total)


def _blobs(manifests: dict[Path, Manifest]) -> list[_Blob]:
    found: dict[str, _Blob] = {}
    for folder, manifest in manifests.items():
        for number, partition in enumerate(manifest.partitions):
            path = blob_path(store_root(folder), partition.digest)
            known = found.get(partition.digest, _Blob(path, partition, ()))
            found[partition.digest] = known._replace(named_by=(*known.named_by, (folder, number)))
    return list(found.values())


def _check_files(folder: Path, manifest: Manifest) -> Iterator[Damage]:
    for name, digest in manifest.files.items():
        try:
            if hashlib.sha256(read_bytes(folder / name)).hexdigest() != digest:
                yield Damage((folder.name,), str(folder / name), "its checksum does not match")
        except CheckpointError as error:
            yield Damage((folder.name,), str(folder / name), str(error))


def _check_blob(blob: _Blob, manifests: dict[Path, Manifest], counter: _Counter, threads: int) -> Iterator[Damage]:
    try:
        descriptor = open_blob(blob.path, blob.partition)
    except CheckpointError as error:
        counter.add(blob.partition.size)
        yield Damage(blob.models, str(blob.path), str(error))
        return
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # what the disk holds, not what memory remembers
        with ThreadPoolExecutor(threads) as pool:
            numbers = range(len(blob.partition.chunks))
            reasons = pool.map(lambda number: _check_chunk(descriptor, blob.partition, number, counter), numbers)
            for number, reason in enumerate(reasons):
                if reason:
                    tensors = _tensors_in(blob, manifests, number)
                    yield Damage(blob.models, str(blob.path), reason, number, tensors)
    finally:
        os.close(descriptor)


def _check_chunk(descriptor: int, partition: Partition, number: int, counter: _Counter) -> str:
    """What is wrong with it; empty where nothing is."""
    begin = number * partition.chunk_bytes
    size = min(partition.chunk_bytes, partition.size - begin)
    try:
        data = os.pread(descriptor, size, begin)
    except OSError as error:
        counter.add(size)
        return f"cannot be read: {error.strerror}"
    counter.add(size)
    if hashlib.sha256(data).hexdigest() != partition.chunks[number]:
        return f"chunk {number} (bytes {begin} to {begin + size}) does not match its checksum"
    return ""


def _tensors_in(blob: _Blob, manifests: dict[Path, Manifest], number: int) -> tuple[str, ...]:
    begin = number * blob.partition.chunk_bytes
    end = begin + blob.partition.chunk_bytes
    folder, which = blob.named_by[0]
    return tuple(
        entry.name
        for entry in manifests[folder].tensors
        if entry.partition == which and entry.offset < end and entry.offset + entry.size > begin
    )
