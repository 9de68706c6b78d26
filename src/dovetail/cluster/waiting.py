"""When those without a place ask again: soon after something changed, else after a while, the most urgent first.

For a driver that can be asked at any moment. What becomes of them is the controller's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

# A decision takes a fraction of a millisecond, an iteration many: they look this often.
CHANGED_S, UNCHANGED_S = 0.02, 0.25
MAX_FAILURES = 3


class Due(Protocol):
    @property
    def due_s(self) -> float: ...


class WaitingRoom:
    def __init__(self) -> None:
        self._queued: dict[int, Due] = {}
        self._has_changed = False  # somebody left or memory came free since they last tried
        self._last_retry_s = 0.0

    def __contains__(self, id: int) -> bool:
        return id in self._queued

    def __iter__(self) -> Iterator[int]:
        return iter(self._queued)

    def enter(self, id: int, work: Due) -> None:
        self._queued[id] = work

    def leave(self, id: int) -> None:
        self._queued.pop(id, None)

    def changed(self) -> None:
        """There may be a place now."""
        self._has_changed = True

    def next_s(self) -> float | None:
        """When `retry` has something to do."""
        if not self._queued:
            return None
        return self._last_retry_s + (CHANGED_S if self._has_changed else UNCHANGED_S)

    def retry(self, now: float, ask: Callable[[int, float], None]) -> None:
        """Let them ask, until a few in a row got no place: what holds those back holds the others back as well. Who
        gets none enters again."""
        next_s = self.next_s()
        if next_s is None or now < next_s:
            return
        self._last_retry_s, self._has_changed = now, False
        failures = 0
        for id, _ in sorted(self._queued.items(), key=lambda one: (one[1].due_s, one[0])):
            if self._queued.pop(id, None) is None:
                continue  # it went with another's end
            ask(id, now)
            failures += id in self._queued
            if failures == MAX_FAILURES:
                return
