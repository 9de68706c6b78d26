"""Whether applications still send what the plan was made for: arrivals counted over a window, time as an argument."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping

# Log-likelihood of the rate that was seen over that of the planned one which chance does not explain: 4.2 standard
# deviations of a large count. (Of small ones, which are skewed, a number of deviations says little.)
SURE = 9.0
PARTS = 8  # of the window: a change may lie anywhere in it, and only what came since tells the new rate


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

    def drifted(self, now: float) -> dict[str, float] | None:
        """Rates to plan with from now on: those that drifted as seen, the others as planned. None = no need."""
        if now - self._since_s < self._window_s:
            return None
        self._forget(now)
        moved = {app: rate for app in self._planned if (rate := self._moved_to(app, now)) is not None}
        return {**self._planned, **moved} if moved else None

    def _moved_to(self, app: str, now: float) -> float | None:
        """Since the moment at which a change explains most. One that sent nothing keeps a hundredth of its rate."""
        planned, times = self._planned[app], list(self._arrivals[app])
        surest, found = SURE, None
        for part in range(1, PARTS + 1):
            span_s = self._window_s * part / PARTS
            count, expected = len(times) - bisect_left(times, now - span_s), planned * span_s
            explained = count * math.log(count / expected) - count + expected if count else expected
            if abs(count - expected) > self._threshold * expected and explained > surest:
                surest, found = explained, max(count / span_s, planned / 100)
        return found

    def _forget(self, now: float) -> None:
        for times in self._arrivals.values():
            while times and times[0] < now - self._window_s:
                times.popleft()
