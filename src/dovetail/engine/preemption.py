"""Preemption points: where an iteration stops between two layers for others."""

from __future__ import annotations

import time
from collections.abc import Callable

INFINITY = float("inf")


IsHere = Callable[[float], bool]  # after so many seconds at most


class PreemptionPoint:
    """For an executor that can stop an iteration between two layers: it stops whenever it has computed for `every_s`,
    and calls `let_in`, in which other models may compute."""

    def __init__(self, every_s: float, let_in: Callable[[], None]) -> None:
        self.every_s = every_s
        self.away_s = 0.0  # what others computed meanwhile
        self._let_in = let_in
        self._since_s = time.monotonic()  # since the last stop

    def halt(self, is_here: IsHere) -> None:
        """The next layer may still be on its way: returns when it is here."""
        is_here(INFINITY)
        self.preempt_if_due()

    def preempt(self) -> None:
        started = time.monotonic()
        self._let_in()
        self._since_s = time.monotonic()
        self.away_s += self._since_s - started

    def preempt_if_due(self) -> None:
        """For what is computed besides."""
        if time.monotonic() - self._since_s >= self.every_s:
            self.preempt()


class HaltingPoint(PreemptionPoint):
    """For an executor that reads layers while it computes: before each of its layers it calls `let_in`, which returns
    when the layer is here."""

    def __init__(self, let_in: Callable[[IsHere], float]) -> None:
        """`let_in` returns what others computed meanwhile, in seconds."""
        super().__init__(INFINITY, lambda: None)
        self._halt = let_in

    def halt(self, is_here: IsHere) -> None:
        self.away_s += self._halt(is_here)
