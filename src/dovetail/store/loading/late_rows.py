"""Rows of an embedding that downloads after the rest of its model: the reader asks for what it needs next."""

from __future__ import annotations

import time
from collections.abc import Iterable

from dovetail.errors import CheckpointError
from dovetail.store.format.manifest import TensorEntry
from dovetail.store.host_pool.lease import Lease

_LOOK_S = 0.02
_GRACE_S = 10.0  # a download that ended may be started again, and go on in the same place


class LateRows:
    """Of one table in the pool. Whoever uses it holds a view of the partition, which keeps its chunks."""

    def __init__(self, lease: Lease, entry: TensorEntry, late: range) -> None:
        self._pool = lease.pool
        self._key = lease.key
        self._chunks = lease.chunks
        self._offset = entry.offset
        self._row_bytes = entry.size // entry.shape[0]
        self._late = late
        self._missing = {index for index in late if not lease.has_chunk(index)}
        self._lost_s = 0.0  # since when nobody brings them; 0 = somebody does

    @property
    def is_complete(self) -> bool:
        words = self._pool.words
        self._missing = {index for index in self._missing if not words.is_here(self._chunks[index])}
        return not self._missing

    def lacks(self, rows: Iterable[int]) -> bool:
        """Whether one of them is still to come; the download is asked to bring those next."""
        words = self._pool.words
        wanted = {index for row in rows for index in self._chunks_of(row)} & self._missing
        lacking = [index for index in wanted if not words.is_here(self._chunks[index])]
        for index in lacking:
            words.ask(self._chunks[index])
        return bool(lacking)

    def wait(self) -> None:
        """For a moment. Raises where the download has ended without them."""
        first = self._chunks[0]
        self._pool.words.wait_for_progress(first, self._pool.words.progress(first), _LOOK_S)
        if not self._pool.is_abandoned(self._key):
            self._lost_s = 0.0
        elif not self._lost_s:
            self._lost_s = time.monotonic()
        elif time.monotonic() - self._lost_s > _GRACE_S:
            raise CheckpointError(f"{self._key}: its download ended before all of it was here")

    def _chunks_of(self, row: int) -> range:
        begin, size = self._offset + row * self._row_bytes, self._pool.chunk_bytes
        return range(begin // size, (begin + self._row_bytes - 1) // size + 1)
