"""A stored model compared with its checksums a piece at a time, for whoever has time between other things; and what is
found damaged put aside, so that nobody serves it and somebody can look at it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dovetail.errors import CheckpointError, DamagedCheckpoint
from dovetail.store.files import read_bytes
from dovetail.store.format.manifest import (
    Manifest,
    Partition,
    blob_path,
    is_arriving,
    open_blob,
    read_manifest,
    store_root,
)
from dovetail.store.loading.reader import cached_share
from dovetail.store.paths import STORE_LOCK, StorePaths

QUARANTINE = "quarantine"


class Finding(NamedTuple):
    problem: str  # empty = this piece is sound
    digest: str = ""  # of the blob that is not; empty = of the files beside the manifest


def check_pieces(folder: Path) -> Iterator[Finding]:
    """A finding per chunk; the first that is a problem is the last. None of a model that is still downloading, whose
    chunks are compared as they come."""
    if is_arriving(folder):
        return
    try:
        manifest = read_manifest(folder)
        check_files(folder, manifest)
    except CheckpointError as error:
        yield Finding(str(error))
        return
    for partition in manifest.partitions:
        path = blob_path(store_root(folder), partition.digest)
        for problem in _check_blob(path, partition):
            yield Finding(problem, partition.digest if problem else "")
            if problem:
                return


def check_files(folder: Path, manifest: Manifest) -> None:
    for name, digest in manifest.files.items():
        if hashlib.sha256(read_bytes(folder / name)).hexdigest() != digest:
            raise DamagedCheckpoint(f"{folder / name}: its checksum does not match: it was altered or is damaged")


def check_weights(folder: Path, manifest: Manifest) -> None:
    """All of them, now. Raises DamagedCheckpoint."""
    for partition in manifest.partitions:
        for problem in _check_blob(blob_path(store_root(folder), partition.digest), partition):
            if problem:
                raise DamagedCheckpoint(problem)


def _check_blob(path: Path, partition: Partition) -> Iterator[str]:
    try:
        descriptor = open_blob(path, partition)
    except CheckpointError as error:
        yield str(error)
        return
    try:
        for number, wanted in enumerate(partition.chunks):
            begin = number * partition.chunk_bytes
            size = min(partition.chunk_bytes, partition.size - begin)
            was_cached = cached_share(descriptor, begin, begin + size) > 0.5
            sound = hashlib.sha256(os.pread(descriptor, size, begin)).hexdigest() == wanted
            if not was_cached:  # what nobody uses shall not push out what somebody does
                os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_DONTNEED)
            yield "" if sound else f"{path}: chunk {number} (from byte {begin} on) does not match its checksum"
    except OSError as error:
        yield f"{path}: cannot be read: {error.strerror}"
    finally:
        os.close(descriptor)


def quarantine(paths: StorePaths, folder: Path, finding: Finding) -> Path:
    """Take the damaged blob, or the model's folder, out of the store's sight; returns where it is now."""
    source = blob_path(paths.root, finding.digest) if finding.digest else folder
    target = paths.root / QUARANTINE / f"{source.name}-{time.time_ns()}"
    with paths.lock(STORE_LOCK):
        target.parent.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # missing: that is what is wrong with it
            source.rename(target)
    return target
