"""Writes one partition file from front to back and keeps the checksums of its chunks; can go on where it was left."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from dovetail.codings import Array
from dovetail.errors import DamagedCheckpoint
from dovetail.store.format.manifest import CHUNK_BYTES, Partition, partition_digest

_ZEROS = memoryview(bytes(2**16))


class PartitionWriter:
    def __init__(self, path: Path, position: int = 0, chunks: Sequence[str] = ()) -> None:
        """What the file has beyond `position` is dropped; what `chunks` do not cover before it is read once more."""
        self.path = path
        self.position = position
        self.chunks = list(chunks)
        self._file = path.open("r+b" if position else "w+b")
        if os.fstat(self._file.fileno()).st_size < position:
            raise DamagedCheckpoint(f"{path}: shorter than its journal says")
        self._file.truncate(position)
        self._file.seek(len(self.chunks) * CHUNK_BYTES)
        self._hash = hashlib.sha256(self._file.read(position - self._file.tell()))

    def write(self, data: Array) -> None:
        self._put(memoryview(data.data))

    def pad_to(self, offset: int) -> None:
        while self.position < offset:
            self._put(_ZEROS[: offset - self.position])

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self, size: int) -> Partition:
        self.pad_to(size)
        if self.position % CHUNK_BYTES:
            self.chunks.append(self._hash.hexdigest())
        self.sync()
        self._file.close()
        digest = partition_digest(size, CHUNK_BYTES, self.chunks)
        return Partition(digest, size, CHUNK_BYTES, tuple(self.chunks))

    def close(self) -> None:
        self._file.close()

    def _put(self, data: memoryview) -> None:
        self._file.write(data)
        while len(data):
            part = data[: CHUNK_BYTES - self.position % CHUNK_BYTES]
            self._hash.update(part)
            self.position += len(part)
            data = data[len(part) :]
            if self.position % CHUNK_BYTES == 0:
                self.chunks.append(self._hash.hexdigest())
                self._hash = hashlib.sha256()
