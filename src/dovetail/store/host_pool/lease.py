"""A lease: one partition in the host pool, held for as long as somebody needs it. Filled by one, shared by all.

Its bytes are there from the front: `wait(upto_bytes)` returns as soon as that much has arrived, so that the first
layers can run while the last ones are read.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from contextlib import ExitStack
from enum import StrEnum
from typing import TYPE_CHECKING

from dovetail.store.host_pool.shared_memory import map_read_only, populate, reserve_addresses, unmap

if TYPE_CHECKING:
    from dovetail.store.host_pool.pool import HostPool


class Arrival(StrEnum):
    """How a wait ended."""

    HERE = "here"
    LATE = "late"  # the time was up
    ABANDONED = "abandoned"  # whoever loaded it has died or given up: `claim` it, or give up too


class _Role:
    """What the finalizer has to know; it outlives the lease."""

    def __init__(self, is_loader: bool) -> None:
        self.is_loader = is_loader


class Lease:
    """Made by `HostPool.reserve`. `close` when done; a lease that is forgotten is let go by its finalizer."""

    def __init__(
        self,
        pool: HostPool,
        key: str,
        size_bytes: int,
        chunks: tuple[int, ...],
        *,
        is_loader: bool,
        fresh: frozenset[int],
    ) -> None:
        self.key = key
        self.size_bytes = size_bytes
        self.chunks = chunks
        self._role = _Role(is_loader)
        self.pool = pool
        self._fresh = fresh  # chunks without memory behind them yet
        self._mapping: ctypes.Array[ctypes.c_ubyte] | None = None
        self._close = weakref.finalize(self, _unpin, pool, key, self._role)
        self._close.atexit = False  # a process that ends is noticed by the others

    @property
    def is_loader(self) -> bool:
        """This lease has to fill the entry."""
        return self._role.is_loader

    @property
    def is_closed(self) -> bool:
        return not self._close.alive

    @property
    def arrived_bytes(self) -> int:
        return self.pool.words.progress(self.chunks[0])

    def has_chunk(self, index: int) -> bool:
        """Chunk `index` of the entry is in, whatever lies before it."""
        return self.pool.words.is_here(self.chunks[index])

    # For whoever reads

    def wait(self, upto_bytes: int | None = None, timeout_s: float = float("inf")) -> Arrival:
        """Until the first `upto_bytes` are in (None: all of them)."""
        assert not self.is_closed, f"{self.key}: the lease is closed"
        wanted = self.size_bytes if upto_bytes is None else min(upto_bytes, self.size_bytes)
        deadline = time.monotonic() + timeout_s
        before = -1
        while True:
            arrived = self.arrived_bytes
            if arrived >= wanted:
                return Arrival.HERE
            if arrived == before and not self.is_loader and self.pool.is_abandoned(self.key):
                return Arrival.ABANDONED
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return Arrival.LATE
            self.pool.words.wait_for_progress(self.chunks[0], arrived, left_s)
            before = arrived

    def view(self) -> memoryview:
        """The partition as one piece, read-only, in place. Keeps the bytes where they are until the last slice of it
        (or tensor upon it) is gone, also beyond `close`."""
        assert not self.is_closed, f"{self.key}: the lease is closed"
        if self._mapping is None:
            self._mapping = self._map()
        return memoryview(self._mapping).cast("B")[: self.size_bytes].toreadonly()

    def pieces(self, begin: int, end: int) -> list[memoryview]:
        """Bytes begin..end as they lie in the pool's own mapping, one piece per chunk: for filling them, and for
        copies to a device that has the pool registered."""
        size = self.pool.chunk_bytes
        first, last = begin // size, -(-end // size)
        whole = [self.pool.chunk(self.chunks[at], size) for at in range(first, last)]
        if whole:
            whole[-1] = whole[-1][: end - (last - 1) * size]
            whole[0] = whole[0][begin - first * size :]
        return whole

    def close(self) -> None:
        """Let go. The loader of an unfinished entry leaves what is there to whoever waits for it."""
        self._mapping = None
        self._close()

    # For the loader

    def populate(self, begin: int, end: int) -> None:
        """Back the chunks of these bytes with memory, where they never were."""
        size = self.pool.chunk_bytes
        for chunk in self.chunks[begin // size : -(-end // size)]:
            if chunk in self._fresh:
                populate(self.pool.address + self.pool.chunk_offset(chunk), size)

    def advance(self, done_bytes: int) -> None:
        assert self.is_loader, f"{self.key}: filled by a lease that does not load it"
        self.pool.words.advance(self.chunks[0], done_bytes)

    def mark(self, index: int) -> None:
        """Chunk `index` is in, before others that lie in front of it perhaps."""
        assert self.is_loader, f"{self.key}: filled by a lease that does not load it"
        self.pool.words.mark_here(self.chunks[index])

    def is_asked(self, index: int) -> bool:
        """A reader needs this chunk before the others."""
        return self.pool.words.is_asked(self.chunks[index])

    def commit(self) -> None:
        """Every byte is in: from here on the entry stays until it is evicted."""
        assert self.is_loader, f"{self.key}: committed by a lease that does not load it"
        self.pool.commit(self.key)
        self._role.is_loader = False

    def abandon(self) -> None:
        """Stop loading and leave what is there to whoever waits for it. The lease itself is still held."""
        self._role.is_loader = False
        self.pool.abandon(self.key)

    def claim(self) -> bool:
        """Become the loader after `Arrival.ABANDONED`; False if another waiter was faster."""
        self._role.is_loader = self.pool.claim(self.key)
        return self.is_loader

    def _map(self) -> ctypes.Array[ctypes.c_ubyte]:
        pool = self.pool
        size = len(self.chunks) * pool.chunk_bytes
        runs = enumerate_runs(self.chunks)
        if len(runs) == 1:  # side by side: the mapping that the pool keeps, whose pages earlier loads have faulted in
            pool.pin(self.key)
            place = pool.read_only_address + pool.chunk_offset(self.chunks[0])
            whole: ctypes.Array[ctypes.c_ubyte] = (ctypes.c_ubyte * size).from_address(place)
            weakref.finalize(whole, pool.unpin, self.key).atexit = False
            return whole
        address = reserve_addresses(size)
        with ExitStack() as undo:
            undo.callback(unmap, address, size)
            for at, (first, count) in runs:
                place = address + at * pool.chunk_bytes
                map_read_only(place, pool.file, pool.chunk_offset(first), count * pool.chunk_bytes)
            pool.pin(self.key)
            undo.pop_all()
        array: ctypes.Array[ctypes.c_ubyte] = (ctypes.c_ubyte * size).from_address(address)
        weakref.finalize(array, _unmap_and_unpin, pool, self.key, address, size).atexit = False
        return array


def enumerate_runs(chunks: tuple[int, ...]) -> list[tuple[int, tuple[int, int]]]:
    """(position, (first chunk, count)) of each run of chunks that lie side by side: one mapping each."""
    runs: list[tuple[int, tuple[int, int]]] = []
    for position, chunk in enumerate(chunks):
        if runs and chunk == runs[-1][1][0] + runs[-1][1][1]:
            start, (first, count) = runs[-1]
            runs[-1] = (start, (first, count + 1))
        else:
            runs.append((position, (chunk, 1)))
    return runs


def _unpin(pool: HostPool, key: str, role: _Role) -> None:
    pool.unpin(key, abandons=role.is_loader)


def _unmap_and_unpin(pool: HostPool, key: str, address: int, size: int) -> None:
    unmap(address, size)
    pool.unpin(key)
