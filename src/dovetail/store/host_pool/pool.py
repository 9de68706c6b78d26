r"""The host pool: one piece of anonymous shared memory in chunks of one size, which all processes of a server map (L3).

    | head | words | table | chunk 0 | chunk 1 | chunk 2 | ...            one memfd; nobody's file, no name
                              \_ free, or part of exactly one entry _/

    entry:  absent --reserve--> loading --commit--> ready --evict, when nobody holds it--> absent
                                   \--abandon, or its loader died--> half loaded: a waiter claims it, or it is dropped

Who owns what: chunks belong to entries, entries are held by pins, pins belong to (process, start time). A lease is one
pin; each mapping of its bytes is another, let go when the last view of it is gone. Any process that has the descriptor
may allocate and free; the memory goes back to the system with the last of them, however it ends. Never more chunks
than the budget, because there are no others. Knows bytes and keys, neither files nor tensors.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import msgspec

from dovetail.errors import DamagedCheckpoint, OutOfMemory
from dovetail.machine import memory_bytes
from dovetail.store.host_pool.lease import Lease
from dovetail.store.host_pool.shared_memory import (
    IS_SUPPORTED,
    PAGE,
    advise_huge_pages,
    file_lock,
    map_read_only,
    open_again,
    punch_hole,
    reserve_addresses,
    unmap,
)
from dovetail.store.host_pool.table import PoolEntry, Process, Table, TableSlots
from dovetail.store.host_pool.words import WORDS, PoolWords

CHUNK_BYTES = 16 << 20
_HEAD = struct.Struct("<8sIIQQQ")  # magic, version, room event, chunk bytes, chunks, bytes of the table
_MAGIC, _VERSION, _ROOM_AT = b"dovepool", 1, 12
_HUGE_PAGE = 2 << 20
_TABLE_BYTES, _TABLE_BYTES_PER_CHUNK = 64 << 10, 512  # of one slot; pages that are not written cost nothing


def pool_bytes(configured: int | None) -> int:
    """What `store.host_pool` means here: half of the machine's memory where nothing is said, none where there is no
    such memory."""
    if not IS_SUPPORTED:
        return 0
    return memory_bytes()[0] // 2 if configured is None else configured


class PoolStats(msgspec.Struct, frozen=True):
    capacity_bytes: int
    used_bytes: int  # chunks that belong to an entry
    pinned_bytes: int  # of those, held by somebody
    resident_bytes: int  # memory that the system has given
    ready_keys: tuple[str, ...]  # least recently used first
    loading_keys: tuple[str, ...]


class HostPool:
    """A process's hold on the pool, one per process. Any thread may call its methods; it does not cross a fork."""

    def __init__(self, file: int) -> None:
        """Attach to the pool behind an inherited descriptor, which stays the caller's."""
        self.file = open_again(file)
        self.process = Process.of(os.getpid())
        self._pid = self.process.pid
        self._map = mmap.mmap(self.file, 0)
        magic, version, _, chunk_bytes, num_chunks, table_bytes = _HEAD.unpack(self._map[: _HEAD.size])
        self.chunk_bytes: int = chunk_bytes
        self.num_chunks: int = num_chunks
        assert (magic, version) == (_MAGIC, _VERSION), "not a host pool of this release"
        words, tables, self._data = _layout(self.num_chunks, table_bytes)
        self._memory = memoryview(self._map)
        self._slots = TableSlots(self._memory[tables : tables + 2 * table_bytes])
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.words = PoolWords(self._map, self.address, words, _ROOM_AT)
        # A second mapping for whoever uses the bytes: a stray write faults. Kept for as long as the pool, because
        # faulting its pages in takes longer than all else that a model in memory needs to start.
        self.read_only_address = reserve_addresses(len(self._map))
        map_read_only(self.read_only_address, self.file, 0, len(self._map))
        for address in (self.address, self.read_only_address):
            advise_huge_pages(address + self._data, self.capacity_bytes)
        self._mutex = threading.Lock()
        self._let_go: deque[tuple[str, bool]] = deque()  # by finalizers, which must not wait for the mutex
        self._held = 0  # pins of this object
        self._is_closing = False

    @classmethod
    def create(cls, size_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> HostPool:
        """A new pool of as many whole chunks as fit. Costs nothing until chunks are used."""
        assert chunk_bytes % PAGE == 0, "chunks are whole pages"
        num_chunks = size_bytes // chunk_bytes
        if num_chunks < 1:
            raise OutOfMemory(f"a host pool of {size_bytes:,} bytes is less than one chunk of {chunk_bytes:,}")
        table_bytes = _round_up(_TABLE_BYTES + _TABLE_BYTES_PER_CHUNK * num_chunks, PAGE)
        *_, data = _layout(num_chunks, table_bytes)
        file = os.memfd_create("dovetail-host-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, data + num_chunks * chunk_bytes)
            os.pwrite(file, _HEAD.pack(_MAGIC, _VERSION, 0, chunk_bytes, num_chunks, table_bytes), 0)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)  # a mapping never faults
            pool = cls(file)
        finally:
            os.close(file)
        pool._slots.write(Table(num_chunks, {}, [], time.monotonic()))
        return pool

    @property
    def capacity_bytes(self) -> int:
        return self.num_chunks * self.chunk_bytes

    # Leases

    def reserve(self, key: str, size_bytes: int, wait_s: float = 0.0) -> Lease:
        return self.reserve_all([(key, size_bytes)], wait_s)[0]

    def reserve_all(self, wanted: Sequence[tuple[str, int]], wait_s: float = 0.0) -> list[Lease]:
        """Hold all these partitions or none, so that two who want several cannot wait for each other. What is absent
        is allocated, and its lease says `is_loader`: the caller has to fill it. Raises OutOfMemory if others hold the
        room for longer than `wait_s`."""
        deadline = time.monotonic() + wait_s
        while True:
            room = self.words.room_event()
            leases = self.try_reserve(wanted)
            if leases is not None:
                return leases
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise OutOfMemory(f"the host pool of {self.capacity_bytes:,} bytes is held by models in use")
            self.words.wait_for_room(room, left_s)

    def try_reserve(self, wanted: Sequence[tuple[str, int]]) -> list[Lease] | None:
        """As `reserve_all`, but None where that would wait."""
        needed = {key: self._num_chunks(size) for key, size in dict(wanted).items()}
        if sum(needed.values()) > self.num_chunks:
            size = sum(dict(wanted).values())
            raise OutOfMemory(f"{size:,} bytes do not fit a host pool of {self.capacity_bytes:,}")
        with self._locked() as table:
            for key, size in wanted:
                if key in table.entries and table.entries[key].size_bytes != size:
                    raise DamagedCheckpoint(f"{key}: {table.entries[key].size_bytes:,} bytes are held, not {size:,}")
            absent = sum(count for key, count in needed.items() if key not in table.entries)
            if not _make_room(table, absent, keep=needed):
                return None
            return [self._lease(table, key, size) for key, size in wanted]

    def _lease(self, table: Table, key: str, size_bytes: int) -> Lease:
        is_absent = key not in table.entries
        fresh: frozenset[int] = frozenset()
        if is_absent:
            chunks = table.choose_chunks(self._num_chunks(size_bytes))
            fresh = frozenset(chunks) - frozenset(table.touched)
            table.touched.extend(fresh)
            table.entries[key] = PoolEntry(size_bytes, chunks, self.process, False, [], 0.0)
            for chunk in chunks:
                self.words.clear(chunk)
            self.words.wake_waiters(chunks[0])
        entry = table.entries[key]
        entry.pin(self.process)
        table.last_use = entry.last_use = time.monotonic()
        self._held += 1
        return Lease(self, key, size_bytes, tuple(entry.chunks), is_loader=is_absent, fresh=fresh)

    # What leases do with their entry

    def pin(self, key: str) -> None:
        with self._locked() as table:
            table.entries[key].pin(self.process)
            self._held += 1

    def unpin(self, key: str, *, abandons: bool = False) -> None:
        """Let go of one pin, now or as soon as the mutex is free: finalizers call this from anywhere, perhaps in the
        middle of another method of this object. `abandons`: it was the loader's, and the entry is not finished."""
        self._let_go.append((key, abandons))
        self._settle()

    def commit(self, key: str) -> None:
        with self._locked() as table:
            entry = table.entries[key]
            assert entry.loader == self.process, f"{key}: committed by a process that does not load it"
            assert self.words.progress(entry.chunks[0]) == entry.size_bytes, f"{key}: committed before its last byte"
            entry.loader, entry.is_ready = None, True
            self.words.wake_waiters(entry.chunks[0])

    def abandon(self, key: str) -> None:
        """Stop loading, but keep the pin."""
        with self._locked() as table:
            self._give_up(table.entries[key])

    def claim(self, key: str) -> bool:
        """Become the loader of an entry that has lost its own. It goes on where that one stopped."""
        with self._locked() as table:
            table.forget_dead()
            entry = table.entries[key]
            if entry.is_ready or entry.loader is not None:
                return False
            entry.loader = self.process
            return True

    def is_abandoned(self, key: str) -> bool:
        with self._locked() as table:
            table.forget_dead()
            entry = table.entries[key]
            return not entry.is_ready and entry.loader is None

    def progress_of(self, key: str) -> tuple[int, bool]:
        """How many bytes of it are in, from the front, and whether somebody fills it."""
        with self._locked() as table:
            table.forget_dead()
            entry = table.entries.get(key)
            return (0, False) if entry is None else (self.words.progress(entry.chunks[0]), entry.loader is not None)

    def chunks_here(self, key: str) -> list[bool]:
        """Of each chunk of it whether it is in, also behind a gap; empty where the pool has no such entry."""
        with self._locked() as table:
            entry = table.entries.get(key)
            chunks = [] if entry is None else list(entry.chunks)
        return [self.words.is_here(chunk) for chunk in chunks]

    def chunk(self, index: int, size_bytes: int) -> memoryview:
        """A chunk's first bytes in this pool's own mapping, writable. The mapping never moves, so it can be registered
        with a device once."""
        start = self._data + index * self.chunk_bytes
        return self._memory[start : start + size_bytes]

    def chunk_offset(self, index: int) -> int:
        """In the file, and from `address`."""
        return self._data + index * self.chunk_bytes

    # Room and memory

    def evict(self, key: str) -> bool:
        """Forget an entry; False if somebody holds it."""
        with self._locked() as table:
            table.forget_dead()
            if key in table.entries and key not in table.idle_keys():
                return False
            table.entries.pop(key, None)
            return True

    def trim(
        self, *, idle_s: float | None = None, to_bytes: int | None = None, unpinned_bytes: int | None = None
    ) -> int:
        """Give memory back to the system: what nobody has used for `idle_s`, or until no more than `to_bytes` are
        resident, or `unpinned_bytes` beside what is in use, or as near to that as pins allow. Returns the bytes given
        back."""
        now = time.monotonic()
        with self._locked() as table:
            table.forget_dead()
            if unpinned_bytes is not None:
                pinned = sum(len(entry.chunks) for entry in table.entries.values() if entry.pins)
                to_bytes = pinned * self.chunk_bytes + unpinned_bytes
            if idle_s is not None:
                for key in table.idle_keys():
                    if now - table.entries[key].last_use >= idle_s:
                        del table.entries[key]
            if to_bytes is not None:
                while (table.num_used * self.chunk_bytes) > to_bytes and (idle := table.idle_keys()):
                    del table.entries[idle[0]]
            excess = len(table.touched) - (to_bytes or 0) // self.chunk_bytes
            if idle_s is not None and now - table.last_use >= idle_s:
                excess = len(table.touched)
            elif to_bytes is None:
                excess = 0
            touched = set(table.touched)
            spare = [chunk for chunk in reversed(table.free_chunks()) if chunk in touched][: max(excess, 0)]
            for chunk in spare:
                punch_hole(self.file, self.chunk_offset(chunk), self.chunk_bytes)
            table.touched = sorted(touched - set(spare))
        return len(spare) * self.chunk_bytes

    def keys(self) -> set[str]:
        """Of what is in the pool or on its way."""
        with self._locked() as table:
            return set(table.entries)

    def stats(self) -> PoolStats:
        with self._locked() as table:
            table.forget_dead()
        entries = sorted(table.entries.items(), key=lambda item: item[1].last_use)
        pinned = sum(len(entry.chunks) for entry in table.entries.values() if entry.pins)
        return PoolStats(
            capacity_bytes=self.capacity_bytes,
            used_bytes=table.num_used * self.chunk_bytes,
            pinned_bytes=pinned * self.chunk_bytes,
            resident_bytes=os.fstat(self.file).st_blocks * 512,
            ready_keys=tuple(key for key, entry in entries if entry.is_ready),
            loading_keys=tuple(key for key, entry in entries if not entry.is_ready),
        )

    def close(self) -> None:
        """Leave the pool, at once or when the last lease and view of this process is gone."""
        self._settle()
        with self._mutex:
            self._is_closing = True
            self._close_if_unused()

    # Inside

    @contextmanager
    def _locked(self) -> Iterator[Table]:
        """The table, to change; it is written when the block ends well."""
        assert os.getpid() == self._pid, "a pool does not cross a fork: attach to it anew"
        with self._mutex:
            assert not self._is_closing, "the pool is closed"
            with self._changing() as table:
                yield table
        self._settle()

    @contextmanager
    def _changing(self) -> Iterator[Table]:
        """Under the mutex."""
        with file_lock(self.file):
            table = self._slots.read()
            used, idle = table.num_used, len(table.idle_keys())
            self._unpin_waiting(table)
            yield table
            self._slots.write(table)
            if table.num_used < used or len(table.idle_keys()) > idle:
                self.words.wake_room()

    def _settle(self) -> None:
        """Unpin what finalizers let go. If the mutex is taken, its holder does this after its own work."""
        while self._let_go and self._mutex.acquire(blocking=False):
            try:
                with self._changing():
                    pass
                self._close_if_unused()
            finally:
                self._mutex.release()

    def _unpin_waiting(self, table: Table) -> None:
        while self._let_go:
            key, abandons = self._let_go.popleft()
            entry = table.entries[key]
            if abandons:
                self._give_up(entry)
            entry.unpin(self.process)
            entry.last_use = table.last_use = time.monotonic()
            table.drop_if_useless(key)
            self._held -= 1

    def _give_up(self, entry: PoolEntry) -> None:
        assert entry.loader == self.process, "abandoned by a process that does not load it"
        entry.loader = None
        self.words.wake_waiters(entry.chunks[0])

    def _close_if_unused(self) -> None:
        if self._is_closing and self._held == 0 and not self._map.closed:
            unmap(self.read_only_address, len(self._map))
            self._slots.release()
            self._memory.release()
            with suppress(BufferError):  # a chunk is still being looked at: the mapping goes with it
                self._map.close()
            os.close(self.file)

    def _num_chunks(self, size_bytes: int) -> int:
        return max(1, -(-size_bytes // self.chunk_bytes))


def _make_room(table: Table, num_chunks: int, keep: dict[str, int]) -> bool:
    """Evict the least recently used until so many chunks are free; touches nothing if that cannot be."""
    free = table.num_chunks - table.num_used
    if free < num_chunks:
        table.forget_dead()
        free = table.num_chunks - table.num_used
    victims = []
    for key in table.idle_keys():
        if free >= num_chunks:
            break
        if key not in keep:
            free += len(table.entries[key].chunks)
            victims.append(key)
    if free < num_chunks:
        return False
    for key in victims:
        del table.entries[key]
    return True


def _layout(num_chunks: int, table_bytes: int) -> tuple[int, int, int]:
    """Where the words, the two slots of the table, and the chunks begin."""
    words = _round_up(_HEAD.size, 64)
    tables = _round_up(words + num_chunks * WORDS.size, PAGE)
    return words, tables, _round_up(tables + 2 * table_bytes, _HUGE_PAGE)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
