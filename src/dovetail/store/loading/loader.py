r"""The node's one loading queue: disk -> host pool (L3).

    load() --> waiting, by priority --> admitted: chunks reserved --> reading threads fill them --> ready
                     \__ what the pool holds already goes past the queue

A load is admitted when the pool has room for all of it, in order of priority and then of arrival: a large one is not
starved by small ones that fit. Bytes can be used from the front while the rest arrives (`Ticket.wait`,
`Ticket.arrivals`); a device's copies are driven by whoever iterates. Knows nothing of tensors.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from dovetail.errors import CheckpointError, DovetailError, OutOfMemory
from dovetail.store.host_pool.lease import Arrival, Lease
from dovetail.store.host_pool.pool import CHUNK_BYTES, HostPool
from dovetail.store.loading.reader import DirectIo, PartitionFile
from dovetail.store.loading.staging import Staging
from dovetail.store.loading.transfer import TierThreads, Transfer

_PATIENCE_S = 0.05  # how long a waiter sleeps before it looks whether its load has failed


class Tier(StrEnum):
    """Where a partition comes from."""

    HOST = "host"
    DISK = "disk"


class PartitionSource(msgspec.Struct, frozen=True):
    """A partition and where it lies on disk. One that is still on its way there is in the pool."""

    key: str  # its digest: what has the same key has the same bytes
    path: Path
    size_bytes: int
    digests: tuple[str, ...] | None = None  # SHA-256 of each `digest_bytes`; None = not verified while loading
    digest_bytes: int = 0


class LoaderConfig(msgspec.Struct, frozen=True):
    direct_io: DirectIo = "auto"
    staging: Staging = "auto"  # whether direct reads go through a small buffer; auto = by the kind of disk
    readers: int = 12  # threads that read the disk
    range_bytes: int = CHUNK_BYTES  # of one read


class Ticket:
    """One partition on its way. `close` it when its bytes are no longer needed; before they are all here, that cancels
    the load."""

    def __init__(self, loader: Loader, source: PartitionSource, priority: int) -> None:
        self.source = source
        self.priority = priority
        self.tier: Tier | None = None  # known once admitted
        self._loader = loader
        self._lease: Lease | None = None
        self._error: DovetailError | None = None
        self._admitted = threading.Event()
        self._is_filling = False  # threads may touch the lease
        self._transfer: Transfer | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def lease(self) -> Lease:
        assert self._lease is not None, f"{self.source.key}: not admitted yet"
        return self._lease

    @property
    def arrived_bytes(self) -> int:
        """How much of it is in memory, from the front."""
        return 0 if self._lease is None else self._lease.arrived_bytes

    def wait(self, upto_bytes: int | None = None, timeout_s: float = float("inf")) -> bool:
        """Until the first `upto_bytes` are in memory (None: all); False if the time was up. Raises what went wrong."""
        deadline = time.monotonic() + timeout_s
        while not self._admitted.wait(min(_PATIENCE_S, max(0.0, deadline - time.monotonic()))):
            self._check()
            if time.monotonic() >= deadline:
                return False
        while True:
            self._check()
            left_s = max(0.0, deadline - time.monotonic())
            arrival = self.lease.wait(upto_bytes, min(_PATIENCE_S, left_s))
            if arrival is Arrival.HERE:
                return True
            if arrival is Arrival.ABANDONED and not self._is_filling and self._error is None and self.lease.claim():
                self._loader.start(self)  # whoever loaded it is gone: go on where that one stopped
            elif arrival is Arrival.LATE and time.monotonic() >= deadline:
                self._check()
                return False

    def arrivals(self, step_bytes: int) -> Iterator[tuple[int, int]]:
        """Ranges as they come in, from the front, each at least `step_bytes` but for the last: the queue to the next
        tier. Copies made by the caller overlap with the reads that follow."""
        begin, size = 0, self.source.size_bytes
        while begin < size:
            self.wait(min(begin + step_bytes, size))
            end = self.lease.arrived_bytes
            yield begin, end
            begin = end

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            transfer = self._transfer
            if not self._is_filling and self._lease is not None:
                self._lease.close()
        if transfer is not None:  # the lease goes when the last thread has left it
            self._loader.cancel(transfer)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # For the loader

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def admit(self, lease: Lease) -> None:
        with self._lock:
            self._lease = lease
            if self._is_closed:
                lease.close()

    def announce(self) -> None:
        self._admitted.set()

    def fail(self, error: DovetailError) -> None:
        self._error = error
        self._admitted.set()

    def begin_filling(self) -> bool:
        with self._lock:
            self._is_filling = not self._is_closed
            return self._is_filling

    def attach(self, transfer: Transfer) -> None:
        with self._lock:
            self._transfer = transfer

    def end_filling(self, error: DovetailError | None) -> None:
        """No thread touches the lease any more."""
        self._error = error
        with self._lock:
            self._transfer = None
            self._is_filling = False
            if self._is_closed:
                self.lease.close()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise CheckpointError(f"{self.source.path}: loading was cancelled")


class Loader:
    """One per node. `load` returns at once; threads do the rest."""

    def __init__(self, pool: HostPool, config: LoaderConfig | None = None) -> None:
        self.pool = pool
        self._config = config = config or LoaderConfig()
        self._disk = TierThreads("disk-reader", config.readers)
        self._lock = threading.Lock()
        self._waiting: list[_Group] = []
        self._serials = itertools.count()
        self._is_closed = False
        self._admitter: threading.Thread | None = None
        self._arrived = threading.Event()  # something is waiting, or it is time to go

    def load(self, source: PartitionSource, priority: int = 0, wait_s: float = float("inf")) -> Ticket:
        return self.load_all([source], priority, wait_s)[0]

    def load_all(
        self, sources: Sequence[PartitionSource], priority: int = 0, wait_s: float = float("inf")
    ) -> list[Ticket]:
        """All of them or none. Lower priorities go first; `wait_s` limits the wait for room in the pool."""
        tickets = [Ticket(self, source, priority) for source in sources]
        group = _Group((priority, next(self._serials)), tickets, time.monotonic() + wait_s)
        if group.keys <= self.pool.keys() and self._admit(group):
            return tickets  # at once, without waking another thread
        with self._lock:
            assert not self._is_closed, "the loader is closed"
            self._waiting.append(group)
            self._waiting.sort(key=lambda group: group.order)
            if self._admitter is None:
                self._admitter = threading.Thread(target=self._admit_forever, name="load-queue", daemon=True)
                self._admitter.start()
        self._wake()
        return tickets

    def close(self) -> None:
        """Cancels what is under way."""
        with self._lock:
            self._is_closed = True
        self._wake()
        if self._admitter is not None:
            self._admitter.join()
        self._disk.close()

    # For tickets

    def start(self, ticket: Ticket) -> None:
        """Fill the ticket's lease, which is the loader's."""
        if not ticket.begin_filling():
            return
        source, lease = ticket.source, ticket.lease
        ticket.tier = Tier.DISK
        try:
            config = self._config
            reader = PartitionFile(source.path, source.size_bytes, config.direct_io, config.staging)
        except DovetailError as error:
            lease.abandon()
            ticket.end_filling(error)
            return
        transfer = Transfer(
            lease,
            reader,
            priority=ticket.priority,
            range_bytes=source.digest_bytes if source.digests is not None else self._config.range_bytes,
            digests=source.digests,
            on_end=ticket.end_filling,
        )
        ticket.attach(transfer)
        self._disk.submit(transfer)
        if ticket.is_closed:  # meanwhile
            self.cancel(transfer)

    def cancel(self, transfer: Transfer) -> None:
        self._disk.cancel(transfer)

    # Inside

    def _wake(self) -> None:
        self._arrived.set()
        self.pool.words.wake_room()

    def _admit_forever(self) -> None:
        try:
            self._admit_while_open()
        finally:  # also where it breaks: nobody may wait for a queue that does not move
            with self._lock:
                self._is_closed = True
                waiting, self._waiting = self._waiting, []
            for group in waiting:
                group.fail(CheckpointError("loading was cancelled: the loader is closed"))

    def _admit_while_open(self) -> None:
        while not self._is_closed:
            self._arrived.clear()
            room = self.pool.words.room_event()
            with self._lock:
                self._waiting = [group for group in self._waiting if not group.is_over()]
                waiting = list(self._waiting)
            if not waiting:
                self._arrived.wait()
            elif not [group for group in self._admissible(waiting) if self._admit(group)]:
                self.pool.words.wait_for_room(room, float("inf"))

    def _admissible(self, waiting: list[_Group]) -> list[_Group]:
        """The first, and those that need no room."""
        held = self.pool.keys()
        return waiting[:1] + [group for group in waiting[1:] if group.keys <= held]

    def _admit(self, group: _Group) -> bool:
        try:
            leases = self.pool.try_reserve([(t.source.key, t.source.size_bytes) for t in group.tickets])
        except DovetailError as error:
            group.fail(error)
            leases = []
        if leases is None:
            return False
        with self._lock:
            if group in self._waiting:
                self._waiting.remove(group)
        for ticket, lease in zip(group.tickets, leases, strict=False):
            ticket.admit(lease)
            ticket.tier = Tier.HOST
            if lease.is_loader:
                self.start(ticket)
            ticket.announce()
        return True


class _Group(msgspec.Struct, frozen=True, eq=False):
    """Tickets that are admitted together."""

    order: tuple[int, int]  # priority, arrival
    tickets: list[Ticket]
    deadline: float

    @property
    def keys(self) -> set[str]:
        return {ticket.source.key for ticket in self.tickets}

    def is_over(self) -> bool:
        """Nobody waits for it any more, or it has waited for too long."""
        if time.monotonic() >= self.deadline:
            path = self.tickets[0].source.path
            self.fail(OutOfMemory(f"{path}: no room in the host pool: models in use hold it"))
            return True
        return all(ticket.is_closed for ticket in self.tickets)

    def fail(self, error: DovetailError) -> None:
        for ticket in self.tickets:
            ticket.fail(error)
