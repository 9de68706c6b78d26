"""RequestState without a place: who asks again and when. Soon after something changed, else after a while.

What becomes of them is the controller's.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from dovetail.cluster.request import RequestState, Search
from dovetail.policy.queueing import CHANGED_S, Key, urgency

RETRY_S = 0.25  # those without a place try again this often
# How many may ask in vain in one pass. What holds one back mostly holds back the others of its model, and soon after
# a change what holds back a few of the most urgent mostly holds back everybody.
MAX_FAILURES_CHANGED = 4
MAX_FAILURES_OF_MODEL = 3
MAX_FAILURES = 96
EXPIRY_S = 0.001  # after a token was due
KEPT_ENDS = 16
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 60.0


class Ends:
    """When requests last ended: how long a refused client should wait."""

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque(maxlen=KEPT_ENDS)

    def note(self, now: float) -> None:
        self._ends_s.append(now)

    def retry_after_s(self, num_queued: int, now: float) -> float:
        """Until so many have got places, if requests go on ending as they did lately."""
        if not self._ends_s:
            return MIN_RETRY_AFTER_S
        each_s = (now - self._ends_s[0]) / len(self._ends_s)
        return min(max((num_queued + 1) * each_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


class WaitingRoom:
    def __init__(self, change_s: float = CHANGED_S) -> None:
        self.order: Callable[[RequestState], Key] = urgency
        self.by_model: Counter[str] = Counter()
        self._change_s = change_s  # how soon after a change they ask
        self._works: dict[int, RequestState] = {}
        self._expiries: list[tuple[float, int]] = []  # heap of (time, request); stale if the request has another time
        self._has_changed = False  # somebody left or memory came free since they last asked
        self._last_pass_s = float("-inf")
        self._last_full_s = float("-inf")  # a pass in which nearly everybody might ask

    def __contains__(self, id: int) -> bool:
        return id in self._works

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._works.values())

    def __len__(self) -> int:
        return len(self._works)

    @property
    def num_waited_for(self) -> int:
        """Requests that are not best effort."""
        return sum(not work.is_best_effort for work in self._works.values())

    def enter(self, work: RequestState, search: Search, now: float, due_s: float | None = None) -> None:
        """It has just asked in vain; `due_s` is when it expires, if not when its next token is due."""
        if not self._works:
            self._last_pass_s = self._last_full_s = now
        self._works[work.id] = work
        work.last_search = search
        self.by_model[work.model] += 1
        due_s = work.due_s if due_s is None else due_s
        # One that came late may ask once more.
        work.expires_s = max(due_s + EXPIRY_S, now + RETRY_S if due_s <= now else now)
        heappush(self._expiries, (work.expires_s, work.id))

    def leave(self, id: int) -> RequestState | None:
        work = self._works.pop(id, None)
        if work is not None:
            work.last_search = work.expires_s = None
            self.by_model[work.model] -= 1
            if not self.by_model[work.model]:
                del self.by_model[work.model]
            if not self._works:
                self._expiries.clear()
        return work

    def changed(self) -> None:
        """There may be a place now."""
        self._has_changed = True

    def next_s(self) -> float | None:
        """When there is somebody to look at."""
        if not self._works:
            return None
        self._drop_stale()
        return min(self._next_pass_s(), self._expiries[0][0])

    def _next_pass_s(self) -> float:
        full_s = self._last_full_s + RETRY_S
        return min(self._last_pass_s + self._change_s, full_s) if self._has_changed else full_s

    def expired(self, now: float) -> list[RequestState]:
        """Everyone whose token was due before now, in order."""
        found: dict[int, RequestState] = {}  # one that asked several times is several times in the heap
        self._drop_stale()
        while self._expiries and self._expiries[0][0] <= now:
            id = heappop(self._expiries)[1]
            found[id] = self._works[id]
            self._drop_stale()
        return list(found.values())

    def _drop_stale(self) -> None:
        heap = self._expiries
        while heap and ((work := self._works.get(heap[0][1])) is None or work.expires_s != heap[0][0]):
            heappop(heap)

    def _in_turn(self) -> list[RequestState]:
        """First those whom a node owes memory: others ask in vain there until these have a place."""
        works = sorted(self._works.values(), key=self.order)
        if any(work.owed_by for work in works):
            works.sort(key=lambda work: not work.owed_by)
        return works

    def begin_pass(self, now: float) -> Iterator[RequestState]:
        """Those who may ask now, in order; the caller lets each leave, and enter again if it got no place.
        Nobody, if it is not time. One whose search waits for an answer counts as refused until that comes."""
        if not self._works or now < self._next_pass_s():
            return
        limit = MAX_FAILURES_CHANGED
        if now >= self._last_full_s + RETRY_S:
            limit, self._last_full_s = MAX_FAILURES, now
        self._last_pass_s, self._has_changed = now, False
        failures: Counter[str] = Counter()
        for work in self._in_turn():
            if work.id not in self._works or failures[work.model] >= MAX_FAILURES_OF_MODEL:
                continue  # it went with another's end, or others of its model asked in vain
            yield work
            failures[work.model] += work.id in self._works or work.search is not None
            if failures.total() >= limit:
                return
