r"""Moving one partition into its lease, range by range, by the threads of a tier (L3).

    transfers, by priority --> threads of the tier --> ranges land in the pool --> the prefix advances, waiters wake

A thread takes the next range of the most urgent transfer, so that an urgent load overtakes at the next range, and a
cancelled one ends there. Knows neither what is loaded nor why.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable
from typing import Protocol

from dovetail.errors import CheckpointError, DamagedCheckpoint, DovetailError
from dovetail.store.host_pool.lease import Lease


class RangeSource(Protocol):
    """Where bytes come from. Called by several threads at once."""

    @property
    def origin(self) -> str:
        """For error messages: a file or an address."""

    def read_into(self, lease: Lease, begin: int, end: int) -> None: ...

    def close(self) -> None: ...


class Transfer:
    """One lease being filled from one source. It goes on where the lease's progress stands."""

    def __init__(
        self,
        lease: Lease,
        source: RangeSource,
        *,
        priority: int,
        range_bytes: int,
        digests: tuple[str, ...] | None = None,
        on_end: Callable[[DovetailError | None], None] = lambda error: None,
    ) -> None:
        self.lease = lease
        self.priority = priority
        self.is_cancelled = False
        self._source = source
        self._range_bytes = range_bytes
        self._digests = digests
        self._on_end = on_end  # no thread touches the lease any more; with what went wrong
        self._error: DovetailError | None = None
        self._next = lease.arrived_bytes // range_bytes  # index of the range to start next
        self._count = -(-lease.size_bytes // range_bytes)
        self._landed: set[int] = set()  # behind a gap
        self._arrived = self._next  # every range before this one is in
        self._in_flight = 0

    # Called under the lock of the tier

    @property
    def has_work(self) -> bool:
        return self._next < self._count and self._error is None and not self.is_cancelled

    @property
    def is_over(self) -> bool:
        return not self.has_work and self._in_flight == 0

    def take(self) -> int:
        self._in_flight += 1
        self._next += 1
        return self._next - 1

    def cancel(self) -> None:
        self.is_cancelled = True

    def put(self, index: int, error: DovetailError | None) -> None:
        """A taken range is done, well or not."""
        self._in_flight -= 1
        if error is not None:
            self._error = self._error or error
            return
        self._landed.add(index)
        while self._arrived in self._landed:
            self._landed.remove(self._arrived)
            self._arrived += 1
        self.lease.advance(min(self._arrived * self._range_bytes, self.lease.size_bytes))

    # Called without it

    def bounds(self, index: int) -> tuple[int, int]:
        begin = index * self._range_bytes
        return begin, min(begin + self._range_bytes, self.lease.size_bytes)

    def move(self, index: int) -> None:
        begin, end = self.bounds(index)
        self._source.read_into(self.lease, begin, end)
        if self._digests is not None:
            self._verify(begin, end, self._digests[index])

    def finish(self) -> None:
        self._source.close()
        error = self._error
        if self.is_cancelled and self._arrived < self._count:
            error = CheckpointError(f"{self._source.origin}: loading was cancelled")
        if error is None:
            self.lease.advance(self.lease.size_bytes)  # an empty one has no range that would say so
            self.lease.commit()
        else:
            self.lease.abandon()
        self._on_end(error)

    def _verify(self, begin: int, end: int, wanted: str) -> None:
        checksum = hashlib.sha256()
        for piece in self.lease.pieces(begin, end):
            checksum.update(piece)  # lets other threads run meanwhile
        if checksum.hexdigest() != wanted:
            origin = self._source.origin
            raise DamagedCheckpoint(f"{origin}: bytes {begin:,} to {end:,} do not match their checksum")


IDLE_S = 5.0  # a thread without work stays for so long, and its buffer with it


class TierThreads:
    """The threads that read from one tier, and the order in which they do. They come with the first transfer and go
    when there has been none for a while."""

    def __init__(self, name: str, num_threads: int) -> None:
        self.name = name
        self._num_threads = num_threads
        self._changed = threading.Condition()
        self._transfers: list[tuple[int, int, Transfer]] = []  # most urgent first: (priority, serial, transfer)
        self._serials = itertools.count()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, transfer: Transfer) -> None:
        with self._changed:
            assert not self._is_closed, f"{self.name} is closed"
            self._transfers.append((transfer.priority, next(self._serials), transfer))
            self._transfers.sort(key=lambda item: item[:2])
            self._start_threads()
            self._changed.notify_all()
        self._end_if_over(transfer)

    def cancel(self, transfer: Transfer) -> None:
        """Ranges that are under way still arrive; then it is over."""
        with self._changed:
            transfer.cancel()
        self._end_if_over(transfer)

    def close(self) -> None:
        """Cancels what is left, and returns when no thread touches any lease."""
        with self._changed:
            self._is_closed = True
            transfers = [transfer for _, _, transfer in self._transfers]
            self._changed.notify_all()
        for transfer in transfers:
            self.cancel(transfer)
        for thread in list(self._threads):
            thread.join()

    def _start_threads(self) -> None:
        while len(self._threads) < self._num_threads:
            name = f"{self.name}-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            transfer, index = taken
            # Whatever breaks a thread in the middle, its range is given back, or others would wait for it for ever.
            error: DovetailError | None = CheckpointError("a reading thread failed")
            try:
                transfer.move(index)
                error = None
            except DovetailError as caught:
                error = caught
            finally:
                with self._changed:
                    transfer.put(index, error)
                self._end_if_over(transfer)

    def _take(self) -> tuple[Transfer, int] | None:
        with self._changed:
            while True:
                for _, _, transfer in self._transfers:
                    if transfer.has_work:
                        return transfer, transfer.take()
                if self._is_closed:
                    return None
                if not self._changed.wait(IDLE_S) and not any(one.has_work for _, _, one in self._transfers):
                    self._threads.remove(threading.current_thread())
                    return None

    def _end_if_over(self, transfer: Transfer) -> None:
        with self._changed:
            mine = [item for item in self._transfers if item[2] is transfer and transfer.is_over]
            for item in mine:  # one of those who see the end finishes it
                self._transfers.remove(item)
        if mine:
            transfer.finish()
