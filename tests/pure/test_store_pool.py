"""The host pool: who owns which chunk, whatever happens to those who hold one."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import threading

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_builders import CHUNK, content, fill, make_pool, python_process

from dovetail.errors import DamagedCheckpoint, OutOfMemory
from dovetail.store.host_pool.lease import Arrival, Lease, enumerate_runs
from dovetail.store.host_pool.pool import HostPool
from dovetail.store.host_pool.table import Process, Table, TableSlots


def load(pool: HostPool, key: str, size_bytes: int) -> Lease:
    lease = pool.reserve(key, size_bytes)
    if lease.is_loader:
        fill(lease)
    return lease


def test_a_partition_is_one_piece_wherever_its_chunks_lie() -> None:
    with make_pool(6) as pool:
        holes = [load(pool, key, CHUNK) for key in "abcdef"]
        for at in (0, 2, 3, 5):
            holes[at].close()
        lease = load(pool, "wide", 3 * CHUNK + 100)
        assert len(enumerate_runs(lease.chunks)) == 3
        assert bytes(lease.view()) == content("wide", 3 * CHUNK + 100)
        lease.close()
        for hole in holes:
            hole.close()


def test_chunks_of_a_partition_are_taken_side_by_side_from_the_smallest_gap() -> None:
    with make_pool(9) as pool:
        held = [load(pool, key, CHUNK) for key in "abcdefghi"]
        for at in (0, 2, 3, 5, 6, 7):
            held[at].close()
            assert pool.evict(held[at].key)
        pair = load(pool, "pair", 2 * CHUNK)
        assert pair.chunks == (held[2].chunks[0], held[3].chunks[0])
        pair.close()
        for at in (1, 4, 8):
            held[at].close()


def test_a_partition_in_one_piece_is_mapped_once_for_every_load() -> None:
    """Faulting pages in is what mapping costs; a second load finds them there."""
    with make_pool(4) as pool:
        places = []
        for _ in range(2):
            lease = load(pool, "a", 2 * CHUNK + 100)
            view = lease.view()
            assert bytes(view) == content("a", 2 * CHUNK + 100)
            places.append(ctypes.addressof(lease.view().obj))
            del view
            lease.close()
        assert places[0] == places[1] == pool.read_only_address + pool.chunk_offset(lease.chunks[0])


def test_a_view_cannot_be_written() -> None:
    with make_pool() as pool:
        lease = load(pool, "a", CHUNK)
        view = lease.view()
        with pytest.raises(TypeError, match="read-only"):
            view[0] = 1
        del view
        lease.close()


def test_a_write_past_the_view_faults() -> None:
    code = """
import ctypes, sys
from dovetail.store.host_pool.pool import HostPool
view = HostPool(int(sys.argv[1])).reserve("a", 100).view()
print("mapped", flush=True)
ctypes.memset(ctypes.addressof(view.obj), 1, 1)
"""
    with make_pool() as pool:
        lease = load(pool, "a", 100)
        with python_process(code, pool) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "mapped\n"
            assert process.wait(timeout=60) == -signal.SIGSEGV
        assert bytes(lease.view()) == content("a", 100)
        lease.close()


def test_bytes_stay_until_the_last_view_is_gone() -> None:
    with make_pool(2) as pool:
        lease = load(pool, "a", CHUNK)
        part = lease.view()[100:200]
        lease.close()
        with pytest.raises(OutOfMemory, match="held by models in use"):
            pool.reserve("b", 2 * CHUNK)
        assert bytes(part) == content("a", CHUNK)[100:200]
        del part
        pool.reserve("b", 2 * CHUNK).close()


def test_a_forgotten_lease_is_let_go() -> None:
    with make_pool(2) as pool:
        load(pool, "a", CHUNK)
        half = pool.reserve("b", CHUNK)
        waiter = pool.reserve("b", CHUNK)
        del half
        gc.collect()
        assert waiter.wait(timeout_s=10) == Arrival.ABANDONED
        assert pool.stats().pinned_bytes == CHUNK
        waiter.close()
        assert pool.stats().pinned_bytes == 0


def test_letting_go_in_the_middle_of_a_change_does_not_block() -> None:
    """A finalizer may run anywhere, also where this thread holds the pool's own mutex."""
    with make_pool() as pool:
        lease = load(pool, "a", CHUNK)
        with pool._locked():
            lease.close()
        assert pool.stats().pinned_bytes == 0


def test_the_least_recently_used_goes_first() -> None:
    with make_pool(3) as pool:
        for key in "abca":
            load(pool, key, CHUNK).close()
        load(pool, "d", CHUNK).close()
        assert pool.stats().ready_keys == ("c", "a", "d")


def test_nothing_is_evicted_in_vain() -> None:
    with make_pool(3) as pool:
        held = load(pool, "held", CHUNK)
        load(pool, "idle", CHUNK).close()
        with pytest.raises(OutOfMemory):
            pool.reserve("wide", 3 * CHUNK)
        assert pool.stats().ready_keys == ("held", "idle")
        held.close()


def test_what_cannot_fit_is_refused_at_once() -> None:
    with make_pool(2) as pool, pytest.raises(OutOfMemory, match="do not fit"):
        pool.reserve("a", 2 * CHUNK + 1, wait_s=1000)


def test_several_are_held_together_or_not_at_all() -> None:
    with make_pool(3) as pool:
        held = load(pool, "held", CHUNK)
        assert pool.try_reserve([("a", 2 * CHUNK), ("b", CHUNK)]) is None
        assert pool.stats().used_bytes == CHUNK
        both = pool.reserve_all([("a", CHUNK), ("b", CHUNK), ("held", CHUNK)])
        assert [lease.is_loader for lease in both] == [True, True, False]
        for lease in [held, *both]:
            lease.close()


def test_another_size_under_the_same_key_is_damage() -> None:
    with make_pool() as pool:
        lease = load(pool, "a", 100)
        with pytest.raises(DamagedCheckpoint, match="100 bytes are held, not 200"):
            pool.reserve("a", 200)
        lease.close()


def test_whoever_waits_for_room_gets_it() -> None:
    with make_pool(1) as pool:
        held = load(pool, "a", CHUNK)
        got: list[Lease] = []
        thread = threading.Thread(target=lambda: got.append(pool.reserve("b", CHUNK, wait_s=60)))
        thread.start()
        held.close()
        thread.join(timeout=60)
        assert got[0].is_loader
        got[0].close()


def test_a_waiter_shares_the_load_as_it_arrives() -> None:
    with make_pool() as pool:
        loader, waiter = pool.reserve("a", 3 * CHUNK), pool.reserve("a", 3 * CHUNK)
        assert (loader.is_loader, waiter.is_loader) == (True, False)
        assert waiter.wait(CHUNK, timeout_s=0) == Arrival.LATE
        loader.advance(2 * CHUNK)
        assert waiter.wait(2 * CHUNK, timeout_s=0) == Arrival.HERE
        assert waiter.wait(timeout_s=0) == Arrival.LATE
        fill(loader)
        assert waiter.wait() == Arrival.HERE
        assert bytes(waiter.view()) == content("a", 3 * CHUNK)
        loader.close()
        waiter.close()


def test_a_waiter_takes_over_where_a_killed_loader_stopped() -> None:
    code = """
import sys
from dovetail.store.host_pool.pool import HostPool
lease = HostPool(int(sys.argv[1])).reserve("a", 40_000)
lease.advance(20_000)
print("half", flush=True)
sys.stdin.read()
"""
    with make_pool() as pool:
        with python_process(code, pool) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "half\n"
            waiter = pool.reserve("a", 40_000)
            assert waiter.wait(timeout_s=0.2) == Arrival.LATE  # its loader lives
            os.kill(process.pid, signal.SIGKILL)
            assert waiter.wait(timeout_s=60) == Arrival.ABANDONED
        assert (waiter.claim(), waiter.arrived_bytes) == (True, 20_000)
        fill(waiter)
        waiter.close()
        assert pool.stats().pinned_bytes == 0


def test_the_pins_of_a_killed_process_go_with_it() -> None:
    code = """
import sys
from dovetail.store.host_pool.pool import HostPool
pool = HostPool(int(sys.argv[1]))
views = [pool.reserve("a", 100).view(), pool.reserve("half", 100).view()]
print("held", flush=True)
sys.stdin.read()
"""
    with make_pool(2) as pool:
        load(pool, "a", 100).close()
        with python_process(code, pool) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            assert pool.try_reserve([("b", 2 * CHUNK)]) is None
            os.kill(process.pid, signal.SIGKILL)
            pool.reserve("b", 2 * CHUNK, wait_s=60).close()
        assert pool.stats().used_bytes == 0


def test_a_writer_killed_in_the_middle_leaves_the_table_as_it_was() -> None:
    memory = memoryview(bytearray(8192))
    slots = TableSlots(memory)
    for last_use in (1.0, 2.0):
        slots.write(Table(4, {}, [], last_use))
    for torn in (1, 8, 16, 24, 30):  # the next write goes to the slot of the first, up to some byte
        half = bytearray(memory)
        TableSlots(memoryview(half)).write(Table(4, {}, [0, 1, 2], 3.0))
        start = 0 if half[:4096] != memory[:4096] else 4096
        copy = bytearray(memory)
        copy[start + 24 : start + 24 + torn] = half[start + 24 : start + 24 + torn]  # the payload goes first
        assert TableSlots(memoryview(copy)).read().last_use == 2.0


def test_trim_gives_memory_back() -> None:
    with make_pool(8) as pool:
        held = load(pool, "held", 2 * CHUNK)
        load(pool, "idle", 3 * CHUNK).close()
        assert pool.stats().resident_bytes >= 5 * CHUNK
        assert pool.trim(idle_s=1000) == 0
        assert pool.trim(idle_s=0) == 3 * CHUNK
        assert pool.stats().ready_keys == ("held",)
        assert bytes(held.view()) == content("held", 2 * CHUNK)
        held.close()


def test_trim_to_a_size_keeps_what_was_used_last() -> None:
    with make_pool(8) as pool:
        for key in "abc":
            load(pool, key, 2 * CHUNK).close()
        assert pool.trim(to_bytes=3 * CHUNK) == 3 * CHUNK
        assert pool.stats().ready_keys == ("c",)


def test_trim_leaves_so_much_beside_what_is_in_use() -> None:
    with make_pool(8) as pool:
        held = load(pool, "held", 2 * CHUNK)
        for key in "ab":
            load(pool, key, 2 * CHUNK).close()
        assert pool.trim(unpinned_bytes=4 * CHUNK) == 0
        assert pool.trim(unpinned_bytes=3 * CHUNK) == CHUNK  # of what went with a, one is kept to be used again
        assert pool.stats().ready_keys == ("held", "b")
        assert pool.trim(unpinned_bytes=0) == 3 * CHUNK
        assert pool.stats().ready_keys == ("held",)
        held.close()


def test_chunks_that_have_memory_are_used_first() -> None:
    with make_pool(8) as pool:
        load(pool, "a", 2 * CHUNK).close()
        assert pool.evict("a")
        before = pool.stats().resident_bytes
        load(pool, "b", 2 * CHUNK).close()
        assert pool.stats().resident_bytes == before


def test_a_closed_pool_stays_as_long_as_it_is_looked_at() -> None:
    pool = HostPool.create(2 * CHUNK, CHUNK)
    lease = load(pool, "a", CHUNK)
    view = lease.view()
    pool.close()
    lease.close()
    assert bytes(view) == content("a", CHUNK)
    file = pool.file
    del view
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


class PoolMachine(RuleBasedStateMachine):
    """Allocate, fill, hold, let go, evict and trim, while other processes hold some and are killed."""

    CHUNKS, PAGES = 6, 4096
    KEYS = st.sampled_from("abcdefgh")

    @initialize()
    def start(self) -> None:
        self.pool = HostPool.create(self.CHUNKS * self.PAGES, self.PAGES)
        self.leases: list[Lease] = []
        self.views: list[tuple[str, memoryview]] = []
        self.others: list[tuple[subprocess.Popen[bytes], list[Lease]]] = []

    def size_of(self, key: str) -> int:
        return (ord(key) - ord("a")) * 3000 + 1

    @rule(key=KEYS)
    def reserve(self, key: str) -> None:
        with contextlib.suppress(OutOfMemory):
            self.leases.append(self.pool.reserve(key, self.size_of(key)))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def fill_or_claim(self, data: st.DataObject) -> None:
        lease = self.leases[data.draw(st.integers(0, len(self.leases) - 1))]  # what is drawn itself, stays
        if lease.is_loader or (self.pool.is_abandoned(lease.key) and lease.claim()):
            fill(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), forget=st.booleans())
    def let_go(self, data: st.DataObject, forget: bool) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        if not forget:
            lease.close()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        lease = self.leases[data.draw(st.integers(0, len(self.leases) - 1))]
        if lease.key in self.pool.stats().ready_keys:
            self.views.append((lease.key, lease.view()))

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def look_away(self, data: st.DataObject) -> None:
        self.views.pop(data.draw(st.integers(0, len(self.views) - 1)))

    @rule(key=KEYS)
    def evict(self, key: str) -> None:
        self.pool.evict(key)

    @rule(chunks=st.integers(0, 6), idle=st.booleans())
    def trim(self, chunks: int, idle: bool) -> None:
        if idle:
            self.pool.trim(idle_s=0)
        else:
            self.pool.trim(to_bytes=chunks * self.PAGES)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=2))
    def another_process_holds(self, keys: list[str]) -> None:
        """Its pins and loads are made here in its name; its life and death are real."""
        process = subprocess.Popen(["/bin/sleep", "600"])
        other = HostPool(self.pool.file)
        other.process = Process.of(process.pid)
        leases = []
        with contextlib.suppress(OutOfMemory):
            leases = other.reserve_all([(key, self.size_of(key)) for key in keys])
        for lease in leases:
            lease._close.detach()  # it will be killed, and the dead run no finalizers
        self.others.append((process, leases))

    @precondition(lambda self: self.others)
    @rule()
    def it_dies(self) -> None:
        process, _ = self.others.pop()
        process.kill()
        process.wait()

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "pool"):
            return
        stats = self.pool.stats()  # checks the table: no chunk has two owners
        assert stats.pinned_bytes <= stats.used_bytes <= stats.capacity_bytes
        assert stats.resident_bytes <= stats.capacity_bytes + (1 << 20)  # head and table
        for key, view in self.views:
            assert bytes(view) == content(key, self.size_of(key))

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        while self.others:
            self.it_dies()
        self.leases.clear()
        self.views.clear()
        assert self.pool.stats().pinned_bytes == 0
        assert self.pool.stats().loading_keys == ()
        self.pool.trim(idle_s=0)
        assert self.pool.stats().used_bytes == 0
        self.pool.close()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
