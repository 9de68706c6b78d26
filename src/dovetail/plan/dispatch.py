"""What runs together, and where: requests of a group become batches by size or waiting time (P6).

Pure state machines, time is an argument: `replay` drives them in virtual time, `runtime` with processes and a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Waiting:
    request: int
    app: str
    arrival_s: float
    start_by_s: float


@dataclass(frozen=True)
class Batch:
    requests: tuple[Waiting, ...]
    formed_s: float

    def __len__(self) -> int:
        return len(self.requests)


class Batcher:
    """Requests that wait for others."""

    def __init__(self, size: int, wait_s: Mapping[str, float]) -> None:
        assert size >= 1
        self._size = size
        self._wait_s = dict(wait_s)
        self._waiting: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: int, app: str, arrival_s: float, now: float) -> Batch | None:
        """The batch that this request completes, if it does."""
        self._waiting.append(Waiting(request, app, arrival_s, arrival_s + self._wait_s[app]))
        return self._form(now) if len(self._waiting) >= self._size or self._size == 1 else None

    def due_s(self) -> float | None:
        """When the first of those that wait must start."""
        return min((waiting.start_by_s for waiting in self._waiting), default=None)

    def flush(self, now: float) -> Batch | None:
        """All that wait, if one of them must start."""
        due_s = self.due_s()
        return self._form(now) if due_s is not None and due_s <= now else None

    def drain(self, now: float) -> Batch | None:
        """All that wait, whatever the time: the group is about to change."""
        return self._form(now) if self._waiting else None

    def _form(self, now: float) -> Batch:
        batch = Batch(tuple(self._waiting), now)
        self._waiting = []
        assert 1 <= len(batch) <= self._size
        return batch


@dataclass(frozen=True)
class Placement:
    """A batch on a function that is ready for it."""

    function: int
    batch: Batch


class Pool:
    """The functions of one group.

    started = idle + busy + starting;   a batch queues only while nothing is idle

    A batch that finds none idle has one started, and is bound to whichever is ready first: the new one, or one that
    ends its run before.
    """

    def __init__(self, limit: int | None, keep_alive_s: float, keep: int = 0) -> None:
        self._limit = limit  # of functions at once; None = as many as are asked for
        self._keep_alive_s = keep_alive_s
        self._keep = keep  # functions that stay, however long they are idle
        self._idle: list[tuple[int, float]] = []  # function, since when; the last used is used next
        self._busy: dict[int, Batch] = {}
        self._starting: set[int] = set()
        self._queue: deque[Batch] = deque()
        self._next = 0

    @property
    def num_started(self) -> int:
        return len(self._idle) + len(self._busy) + len(self._starting)

    @property
    def first_queued(self) -> Batch | None:
        return self._queue[0] if self._queue else None

    @property
    def is_quiet(self) -> bool:
        return not self._busy and not self._queue

    def add(self, batch: Batch) -> None:
        self._queue.append(batch)

    def place(self) -> Placement | None:
        """The next batch that can run now."""
        if not self._queue or not self._idle:
            return None
        function, _ = self._idle.pop()
        self._busy[function] = self._queue.popleft()
        return Placement(function, self._busy[function])

    def start_wanted(self) -> int | None:
        """A function that the caller starts now, one for each batch that waits; `ready` or `lose` says what became of
        it."""
        is_enough = len(self._starting) >= len(self._queue)
        if is_enough or (self._limit is not None and self.num_started >= self._limit):
            return None
        return self.start_ahead()

    def start_ahead(self) -> int:
        """As `start_wanted`, before anybody waits."""
        self._next += 1
        self._starting.add(self._next)
        return self._next

    def ready(self, function: int, now: float) -> None:
        """It has been started."""
        self._starting.remove(function)
        self._idle.append((function, now))

    def release(self, function: int, now: float) -> None:
        """Its batch is done."""
        del self._busy[function]
        self._idle.append((function, now))

    def lose(self, function: int) -> Batch | None:
        """It died, or did not start. What it ran comes back first, since it has waited longest."""
        self._idle = [entry for entry in self._idle if entry[0] != function]
        self._starting.discard(function)
        batch = self._busy.pop(function, None)
        if batch is not None:
            self._queue.appendleft(batch)
        return batch

    def give_up(self, batch: Batch) -> None:
        """It waits, and will not be run."""
        self._queue.remove(batch)

    def expire(self, now: float) -> list[int]:
        """Functions that have been idle for longer than the keep-alive; the caller ends them."""
        late = [function for function, since in self._idle if since + self._keep_alive_s < now]
        gone = late[: max(self.num_started - self._keep, 0)]
        self._idle = [entry for entry in self._idle if entry[0] not in gone]
        return gone
