"""The loading queue: who goes first, what is shared, and that every byte is right whatever dies on the way."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from pool_builders import CHUNK, content, counted_reads, eventually, make_pool, python_process, write_partition

from dovetail.errors import CheckpointError, DamagedCheckpoint, DovetailError, OutOfMemory
from dovetail.store.host_pool.lease import Lease
from dovetail.store.host_pool.pool import HostPool
from dovetail.store.loading.loader import Loader, LoaderConfig, PartitionSource, Tier
from dovetail.store.loading.transfer import TierThreads, Transfer

CONFIG = LoaderConfig(readers=3, range_bytes=CHUNK)


class GatedSource:
    """Reads a range when the test lets it."""

    origin = "gated"

    def __init__(self) -> None:
        self.gates: dict[int, threading.Event] = {}
        self.order: list[tuple[str, int]] = []
        self.changed = threading.Condition()

    def open(self, *ranges: int) -> None:
        for index in ranges:
            self.gate(index).set()

    def gate(self, index: int) -> threading.Event:
        return self.gates.setdefault(index, threading.Event())

    def read_into(self, lease: Lease, begin: int, end: int) -> None:
        with self.changed:
            self.order.append((lease.key, begin // CHUNK))
            self.changed.notify_all()
        assert self.gate(begin // CHUNK).wait(timeout=60)
        data = content(lease.key, lease.size_bytes)[begin:end]
        for piece in lease.pieces(begin, end):
            piece[:] = data[: len(piece)]

    def wait_for(self, reads: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.order) >= reads, timeout=60)

    def close(self) -> None:
        pass


def make_transfer(pool: HostPool, key: str, source: GatedSource, priority: int = 0, chunks: int = 4) -> Transfer:
    return Transfer(pool.reserve(key, chunks * CHUNK), source, priority=priority, range_bytes=CHUNK)


def test_a_load_comes_from_disk_once(tmp_path: Path) -> None:
    source = write_partition(tmp_path, "a", 3 * CHUNK + 7)
    with make_pool() as pool:
        loader = Loader(pool, CONFIG)
        tiers = []
        for _ in range(2):
            with loader.load(source) as ticket:
                assert ticket.wait()
                assert bytes(ticket.lease.view()) == content("a", source.size_bytes)
                tiers.append(ticket.tier)
        loader.close()
    assert tiers == [Tier.DISK, Tier.HOST]


def test_ranges_come_from_the_front(tmp_path: Path) -> None:
    source = write_partition(tmp_path, "a", 7 * CHUNK + 9)
    with make_pool() as pool:
        loader = Loader(pool, CONFIG)
        with loader.load(source) as ticket:
            ranges = list(ticket.arrivals(2 * CHUNK))
            data = b"".join(bytes(ticket.lease.view()[begin:end]) for begin, end in ranges)
        loader.close()
    assert data == content("a", source.size_bytes)
    assert all(end - begin >= 2 * CHUNK for begin, end in ranges[:-1])


def test_the_first_layers_are_there_before_the_last() -> None:
    with make_pool() as pool:
        tier, gated = TierThreads("reader", 3), GatedSource()
        transfer = make_transfer(pool, "a", gated)
        waiter = pool.reserve("a", 4 * CHUNK)
        tier.submit(transfer)
        gated.open(1)  # out of order: the prefix does not move
        gated.wait_for(4)
        assert waiter.arrived_bytes == 0
        gated.open(0)
        waiter.wait(2 * CHUNK, timeout_s=60)
        assert waiter.arrived_bytes == 2 * CHUNK
        gated.open(2, 3)
        waiter.wait(timeout_s=60)
        assert bytes(waiter.view()) == content("a", 4 * CHUNK)
        tier.close()
        waiter.close()
        transfer.lease.close()


def test_an_urgent_load_overtakes_at_the_next_range() -> None:
    with make_pool() as pool:
        tier, gated = TierThreads("reader", 1), GatedSource()
        slow, urgent = make_transfer(pool, "slow", gated), make_transfer(pool, "urgent", gated, priority=-1, chunks=2)
        tier.submit(slow)
        gated.wait_for(1)
        tier.submit(urgent)
        gated.open(0, 1, 2, 3)
        assert slow.lease.wait(timeout_s=60)
        tier.close()
        assert [key for key, _ in gated.order[:4]] == ["slow", "urgent", "urgent", "slow"]
        slow.lease.close()
        urgent.lease.close()


def test_a_cancelled_load_ends_after_the_range_that_is_under_way() -> None:
    ended: list[DovetailError | None] = []
    with make_pool() as pool:
        tier, gated = TierThreads("reader", 1), GatedSource()
        lease = pool.reserve("a", 4 * CHUNK)
        transfer = Transfer(lease, gated, priority=0, range_bytes=CHUNK, on_end=ended.append)
        tier.submit(transfer)
        gated.wait_for(1)
        tier.cancel(transfer)
        assert ended == []  # a thread still writes into its memory
        gated.open(0)
        tier.close()
        assert gated.order == [("a", 0)]
        assert "cancelled" in str(ended[0])
        lease.close()
        assert pool.stats().used_bytes == 0


def test_a_closed_ticket_frees_its_room(tmp_path: Path) -> None:
    sources = [write_partition(tmp_path, key, 8 * CHUNK) for key in "abc"]
    with make_pool(8) as pool:
        loader = Loader(pool, CONFIG)
        first = loader.load(sources[0])
        assert first.wait()
        waiting = [loader.load(source) for source in sources[1:]]
        assert not waiting[0].wait(timeout_s=0.1)
        waiting[0].close()
        with pytest.raises(CheckpointError, match="cancelled"):
            waiting[0].wait()
        first.close()
        assert waiting[1].wait()
        waiting[1].close()
        loader.close()
        assert pool.stats().pinned_bytes == 0


def test_a_large_load_is_not_starved_by_small_ones(tmp_path: Path) -> None:
    sources = [write_partition(tmp_path, key, size * CHUNK) for key, size in (("a", 4), ("wide", 8), ("small", 1))]
    with make_pool(8) as pool:
        loader = Loader(pool, CONFIG)
        held, wide, small = (loader.load(source) for source in sources)
        assert held.wait()
        assert not small.wait(timeout_s=0.2)  # there would be room for it
        again = loader.load(sources[0])  # needs none
        assert again.wait()
        for ticket in (again, held):
            ticket.close()
        assert wide.wait()
        wide.close()
        assert small.wait()
        small.close()
        loader.close()


def test_room_that_does_not_come_is_an_error(tmp_path: Path) -> None:
    sources = [write_partition(tmp_path, key, 8 * CHUNK) for key in "ab"]
    with make_pool(8) as pool:
        loader = Loader(pool, CONFIG)
        with loader.load(sources[0]) as held:
            assert held.wait()
            with pytest.raises(OutOfMemory, match="/b: no room in the host pool"):
                loader.load(sources[1], wait_s=0.1).wait()
        too_large = write_partition(tmp_path, "c", 9 * CHUNK)
        with pytest.raises(OutOfMemory, match="do not fit"):
            loader.load(too_large).wait()
        loader.close()


def test_closing_the_loader_ends_every_wait(tmp_path: Path) -> None:
    sources = [write_partition(tmp_path, key, 8 * CHUNK) for key in "ab"]
    with make_pool(8) as pool:
        loader = Loader(pool, CONFIG)
        held = loader.load(sources[0])
        assert held.wait()
        waiting = loader.load(sources[1])
        loader.close()
        with pytest.raises(CheckpointError, match="the loader is closed"):
            waiting.wait(timeout_s=60)
        assert bytes(held.lease.view()) == content("a", 8 * CHUNK)
        held.close()


def test_several_partitions_come_together(tmp_path: Path) -> None:
    sources = [write_partition(tmp_path, key, 3 * CHUNK) for key in "abcd"]
    with make_pool(8) as pool:
        loader = Loader(pool, CONFIG)

        def load_two(pair: tuple[int, int]) -> None:
            tickets = loader.load_all([sources[at] for at in pair])
            for ticket in tickets:
                ticket.wait()
                assert bytes(ticket.lease.view()) == content(ticket.source.key, 3 * CHUNK)
            for ticket in tickets:
                ticket.close()

        with ThreadPoolExecutor(6) as threads:  # each wants two of four, and two fit at a time
            list(threads.map(load_two, [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 3)] * 2))
        loader.close()


def test_a_flipped_bit_is_named(tmp_path: Path) -> None:
    source = write_partition(tmp_path, "a", 5 * CHUNK + 3, digest_bytes=2 * CHUNK)
    with make_pool() as pool:
        loader = Loader(pool, CONFIG)
        with loader.load(source) as ticket:
            assert ticket.wait()
        eventually(lambda: pool.evict("a"))  # its reader may hold it for a moment longer
        data = bytearray(source.path.read_bytes())
        data[3 * CHUNK] ^= 1
        source.path.write_bytes(data)
        with (
            pytest.raises(DamagedCheckpoint, match=rf"/a: bytes {2 * CHUNK:,} to {4 * CHUNK:,} do not match"),
            loader.load(source) as ticket,
        ):
            ticket.wait()
        loader.close()
        assert pool.stats().used_bytes == 0


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_file_fails_every_waiter_and_holds_nothing(tmp_path: Path, damage: str) -> None:
    source = write_partition(tmp_path, "a", 4 * CHUNK)
    source.path.unlink() if damage == "missing" else os.truncate(source.path, CHUNK)
    with make_pool() as pool:
        loader = Loader(pool, CONFIG)
        tickets = [loader.load(source) for _ in range(4)]
        for ticket in tickets:
            with pytest.raises(DamagedCheckpoint, match="/a: "):
                ticket.wait(timeout_s=60)
            ticket.close()
        loader.close()
        assert pool.stats().used_bytes == 0


LOAD_MANY = """
import random, sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
sys.path.insert(0, ".")
from pool_builders import content
from dovetail.store.loading.loader import Loader, LoaderConfig, PartitionSource
from dovetail.store.host_pool.pool import HostPool

pool = HostPool(int(sys.argv[1]))
folder, seed, chunk = Path(sys.argv[2]), int(sys.argv[3]), pool.chunk_bytes
loader = Loader(pool, LoaderConfig(readers=2, range_bytes=chunk))
names = sorted(path.name for path in folder.iterdir())
random.Random(seed).shuffle(names)

def load(name):
    source = PartitionSource(name, folder / name, (folder / name).stat().st_size)
    with loader.load(source) as ticket:
        ticket.wait()
        view = ticket.lease.view()
    return bytes(view) == content(name, source.size_bytes)

with ThreadPoolExecutor(16) as threads:
    right = list(threads.map(load, names))
loader.close()
print(sum(right), pool.stats().capacity_bytes >= pool.stats().used_bytes, flush=True)
"""


def test_64_loads_of_16_models_by_four_processes_in_a_third_of_their_size(tmp_path: Path) -> None:
    """Every load checked byte for byte; the budget is asserted in the pool at each change, and seen from outside."""
    sizes = [(3 + at % 5) * CHUNK + at for at in range(16)]
    for at, size in enumerate(sizes):
        write_partition(tmp_path, f"model-{at}", size)
    budget = sum(sizes) // 3
    with make_pool(budget // CHUNK) as pool:
        limit = budget + (2 << 20)  # and head and table
        processes = [python_process(LOAD_MANY, pool, str(tmp_path), str(seed)) for seed in range(4)]
        running = [process.__enter__() for process in processes]
        try:
            for process in running:
                assert process.stdout is not None
                assert process.stdout.readline() == "16 True\n"
                assert pool.stats().resident_bytes <= limit
                assert process.wait(timeout=60) == 0
        finally:
            for process in processes:
                process.__exit__(None, None, None)
        stats = pool.stats()
        assert (stats.pinned_bytes, stats.loading_keys) == (0, ())


def test_64_loads_at_once_in_one_process(tmp_path: Path) -> None:
    sources = [write_partition(tmp_path, f"model-{at}", (3 + at % 5) * CHUNK + at) for at in range(16)]
    budget = sum(source.size_bytes for source in sources) // 3
    with make_pool(budget // CHUNK) as pool:
        loader = Loader(pool, CONFIG)

        def load(source: PartitionSource) -> bool:
            with loader.load(source) as ticket:
                assert ticket.wait(timeout_s=120)
                return bytes(ticket.lease.view()) == content(source.key, source.size_bytes)

        with ThreadPoolExecutor(64) as threads:
            assert all(threads.map(load, sources * 4))
        loader.close()
        assert pool.stats().pinned_bytes == 0


STOPS_IN_THE_MIDDLE = """
import sys, threading
from dovetail.store.host_pool.pool import HostPool
from dovetail.store.loading.reader import PartitionFile
from dovetail.store.loading.transfer import TierThreads, Transfer
from pathlib import Path

class Stuck(PartitionFile):
    def read_into(self, lease, begin, end):
        if begin >= size // 2:
            print("half", flush=True)
            threading.Event().wait()
        super().read_into(lease, begin, end)

size = int(sys.argv[3])
pool = HostPool(int(sys.argv[1]))
source = Stuck(Path(sys.argv[2]), size)
TierThreads("reader", 1).submit(
    Transfer(pool.reserve("a", size), source, priority=0, range_bytes=pool.chunk_bytes)
)
sys.stdin.read()
"""


def test_when_a_loading_process_is_killed_another_goes_on(tmp_path: Path) -> None:
    source = write_partition(tmp_path, "a", 6 * CHUNK)
    with make_pool() as pool, counted_reads() as reads:
        loader = Loader(pool, CONFIG)
        with python_process(STOPS_IN_THE_MIDDLE, pool, str(source.path), str(source.size_bytes)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "half\n"
            ticket = loader.load(source)
            assert ticket.wait(3 * CHUNK, timeout_s=60)  # what the other has loaded is shared
            assert not ticket.wait(timeout_s=0.2)
            os.kill(process.pid, signal.SIGKILL)
            assert ticket.wait(timeout_s=60)
        assert bytes(ticket.lease.view()) == content("a", source.size_bytes)
        assert ticket.tier is Tier.DISK
        ticket.close()
        loader.close()
        assert pool.stats().pinned_bytes == 0
        assert sum(reads) == 3 * CHUNK  # the rest alone


KEEPS_LOADING = """
import os, random, sys, threading
from pathlib import Path
from pool_builders import content
from dovetail.store.loading.loader import Loader, LoaderConfig, PartitionSource
from dovetail.store.host_pool.pool import HostPool

pool = HostPool(int(sys.argv[1]))
loader = Loader(pool, LoaderConfig(readers=2, range_bytes=pool.chunk_bytes))
wanted = {path.name: (path, content(path.name, path.stat().st_size)) for path in Path(sys.argv[2]).iterdir()}

def load_forever(seed):
    chance = random.Random(seed)
    for count in range(1_000_000):
        name = chance.choice(sorted(wanted))
        path, data = wanted[name]
        ticket = loader.load(PartitionSource(name, path, len(data)), priority=chance.randint(-1, 1))
        if chance.random() < 0.8:  # or it is cancelled at once
            ticket.wait(chance.randint(0, len(data)))
        if chance.random() < 0.8:
            ticket.wait()
            view = ticket.lease.view()
            ticket.close()
            if view != data:
                os.write(1, b"wrong\\n")
            del view
        ticket.close()
        if count % 10 == 9:
            os.write(1, b"right\\n")  # whole, whichever thread it is

for thread in range(4):
    threading.Thread(target=load_forever, args=(f"{sys.argv[3]}-{thread}",), daemon=True).start()
sys.stdin.read()
"""


def test_processes_that_are_killed_while_they_load_spoil_nothing(tmp_path: Path) -> None:
    """Each is killed in the middle of its work, some of them while others wait for what it loads."""
    sizes = [(3 + at % 5) * CHUNK + at for at in range(16)]
    for at, size in enumerate(sizes):
        write_partition(tmp_path, f"model-{at}", size)
    with make_pool(sum(sizes) // 3 // CHUNK) as pool, ExitStack() as stack:
        running = [stack.enter_context(python_process(KEEPS_LOADING, pool, str(tmp_path), str(at))) for at in range(4)]
        for process in running:
            assert process.stdout is not None
            assert [process.stdout.readline() for _ in range(5)] == ["right\n"] * 5
        for process in running[:3]:
            os.kill(process.pid, signal.SIGKILL)
        loader = Loader(pool, CONFIG)
        for at, size in enumerate(sizes):  # while the fourth goes on
            with loader.load(PartitionSource(f"model-{at}", tmp_path / f"model-{at}", size)) as ticket:
                assert ticket.wait(timeout_s=60)
                assert bytes(ticket.lease.view()) == content(f"model-{at}", size)
        loader.close()
        assert running[3].poll() is None
        os.kill(running[3].pid, signal.SIGKILL)
        for process in running:
            process.wait()
            assert process.stdout is not None
            assert "wrong" not in process.stdout.read()
        stats = pool.stats()
        assert (stats.pinned_bytes, stats.loading_keys) == (0, ())
        assert stats.used_bytes <= stats.capacity_bytes


def test_threads_leave_when_there_is_nothing_to_read_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.store.loading.transfer.IDLE_S", 0.05)

    def readers() -> int:
        return sum(thread.name.startswith("disk-reader") for thread in threading.enumerate())

    with make_pool(8) as pool:
        loader = Loader(pool, CONFIG)
        for key in ("a", "b"):
            source = write_partition(tmp_path, key, 3 * CHUNK)
            with loader.load(source) as ticket:
                ticket.wait()
                assert bytes(ticket.lease.view()) == content(key, 3 * CHUNK)
            eventually(lambda: readers() == 0)
        loader.close()
