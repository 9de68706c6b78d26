"""Breaks in an iteration."""

from __future__ import annotations

import time
from collections.abc import Callable


class Breath:
    """For an executor that can stop an iteration between two layers: it does so whenever it has computed for so long,
    and takes one. Others may compute meanwhile."""

    def __init__(self, every_s: float, let_in: Callable[[], None]) -> None:
        self.every_s = every_s
        self.away_s = 0.0  # that others had of it
        self._let_in = let_in
        self._since_s = time.monotonic()  # computed without a break

    def take(self) -> None:
        started = time.monotonic()
        self._let_in()
        self._since_s = time.monotonic()
        self.away_s += self._since_s - started

    def take_if_due(self) -> None:
        """For what is computed besides."""
        if time.monotonic() - self._since_s >= self.every_s:
            self.take()
