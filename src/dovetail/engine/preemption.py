"""Preemption points: where an iteration stops between two layers for others."""

from __future__ import annotations

import time
from collections.abc import Callable


class PreemptionPoint:
    """For an executor that can stop an iteration between two layers: it stops whenever it has computed for `every_s`,
    and calls `let_in`, in which other models may compute."""

    def __init__(self, every_s: float, let_in: Callable[[], None]) -> None:
        self.every_s = every_s
        self.away_s = 0.0  # what others computed meanwhile
        self._let_in = let_in
        self._since_s = time.monotonic()  # since the last stop

    def preempt(self) -> None:
        started = time.monotonic()
        self._let_in()
        self._since_s = time.monotonic()
        self.away_s += self._since_s - started

    def preempt_if_due(self) -> None:
        """For what is computed besides."""
        if time.monotonic() - self._since_s >= self.every_s:
            self.preempt()
