"""What becomes of a request whose token is due while it has no place (S11 gives it up)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Lateness(Protocol):
    def may_extend(self, *, is_strict: bool, produced: int) -> bool:
        """A request gets later deadlines rather than being given up; `is_strict`: it asked for its targets."""

    def owes_place(self, produced: int) -> bool:
        """Where an answer was evicted for want of memory, newcomers wait until it has a place again."""

    def begins_early(self, num_waiting: int) -> bool:
        """One of so many that will be late is begun in time that nothing else wants, before it is late."""

    def takes_less(self, *, is_capped: bool) -> bool:
        """A request alone on a device gets what memory there is, if less than it should have; `is_capped`: the model's
        pool has a limit of its own."""

    def overdue_s(self, now: float) -> float:
        """Deadlines before this say nothing about urgency any more and are set anew."""


@dataclass(frozen=True, slots=True)
class ServeLate:
    """Late rather than refused, unless it asked for its targets; an answer that has begun is never given up."""

    overdue_after_s: float = 1.0

    def may_extend(self, *, is_strict: bool, produced: int) -> bool:
        return not is_strict or produced > 0

    def owes_place(self, produced: int) -> bool:
        return produced > 0

    def begins_early(self, num_waiting: int) -> bool:
        return num_waiting > 0

    def takes_less(self, *, is_capped: bool) -> bool:
        return True

    def overdue_s(self, now: float) -> float:
        return now - self.overdue_after_s
