"""Whether applications still send what the plan was made for: arrivals counted over a window, time as an argument."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

SURE = 4.0  # standard deviations of a Poisson count that chance may explain


class RateWatch:
    """Says when rates have left the plan's by more than `threshold`, and by more than chance."""

    def __init__(self, rates: Mapping[str, float], window_s: float, threshold: float, now: float) -> None:
        self._planned = dict(rates)
        self._window_s = window_s
        self._threshold = threshold
        self._since_s = now
        self._arrivals: dict[str, deque[float]] = {app: deque() for app in rates}

    def observe(self, app: str, now: float) -> None:
        self._arrivals[app].append(now)

    def rates(self, now: float) -> dict[str, float]:
        """Over the window; an application that sent nothing keeps a hundredth of its planned rate."""
        self._forget(now)
        span_s = min(max(now - self._since_s, 1e-9), self._window_s)
        return {app: max(len(times) / span_s, self._planned[app] / 100) for app, times in self._arrivals.items()}

    def drifted(self, now: float) -> dict[str, float] | None:
        """Rates to plan with from now on: those that drifted as seen, the others as planned. None = no need."""
        if now - self._since_s < self._window_s:
            return None
        seen = self.rates(now)
        moved = {app: rate for app, rate in seen.items() if self._has_moved(app)}
        return {**self._planned, **moved} if moved else None

    def _has_moved(self, app: str) -> bool:
        expected = self._planned[app] * self._window_s
        gap = abs(len(self._arrivals[app]) - expected)
        return gap > self._threshold * expected and gap > SURE * math.sqrt(max(expected, 1.0))

    def _forget(self, now: float) -> None:
        for times in self._arrivals.values():
            while times and times[0] < now - self._window_s:
                times.popleft()
