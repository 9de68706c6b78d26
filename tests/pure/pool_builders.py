"""Builders for the tests of the store's tiers: small pools, files and other processes."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dovetail.store.host_pool.lease import Lease
from dovetail.store.host_pool.pool import HostPool
from dovetail.store.loading.loader import PartitionSource
from dovetail.store.loading.reader import PartitionFile

CHUNK = 16 << 10


@contextmanager
def make_pool(num_chunks: int = 8, chunk_bytes: int = CHUNK) -> Iterator[HostPool]:
    pool = HostPool.create(num_chunks * chunk_bytes, chunk_bytes)
    try:
        yield pool
    finally:
        pool.close()


def content(key: str, size_bytes: int) -> bytes:
    """Bytes that no other key has."""
    return random.Random(key).randbytes(size_bytes)


def fill(lease: Lease) -> None:
    """What a loader does, without a file."""
    data = content(lease.key, lease.size_bytes)
    at = 0
    for piece in lease.pieces(0, lease.size_bytes):
        piece[:] = data[at : at + len(piece)]
        at += len(piece)
    lease.advance(lease.size_bytes)
    lease.commit()


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """How many bytes each read of a disk had."""
    sizes: list[int] = []
    read_into = PartitionFile.read_into

    def counted(self: PartitionFile, lease: Lease, begin: int, end: int) -> None:
        read_into(self, lease, begin, end)
        sizes.append(end - begin)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartitionFile, "read_into", counted)
        yield sizes


def write_partition(folder: Path, key: str, size_bytes: int, digest_bytes: int = 0) -> PartitionSource:
    """A file of `content`; with `digest_bytes`, checksums of pieces of that size."""
    data = content(key, size_bytes)
    path = folder / key
    path.write_bytes(data)
    digests = None
    if digest_bytes:
        pieces = (data[at : at + digest_bytes] for at in range(0, size_bytes, digest_bytes))
        digests = tuple(hashlib.sha256(piece).hexdigest() for piece in pieces)
    return PartitionSource(key, path, size_bytes, digests, digest_bytes)


@contextmanager
def python_process(code: str, pool: HostPool, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs `code` in a process that inherits the pool: its descriptor is the first argument. Killed at the end."""
    command = [sys.executable, "-c", code, str(pool.file), *arguments]
    folder = str(Path(__file__).parent)
    process = subprocess.Popen(
        command,
        pass_fds=[pool.file],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def eventually(condition: Callable[[], object]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")
