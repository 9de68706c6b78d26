"""How often each model is called, the last calls counting most: what a place given to one of its requests is worth to
the next ones, which find the weights there.
"""

from __future__ import annotations

import math

FADES_S = 30.0  # a call counts for a third of what it did after so long


class CallRates:
    def __init__(self) -> None:
        self._of: dict[str, tuple[float, float]] = {}  # by model: calls, faded, as of when

    def called(self, model: str, now: float) -> None:
        self._of[model] = self._faded(model, now) + 1.0, now

    def per_s(self, model: str, now: float) -> float:
        return self._faded(model, now) / FADES_S

    def _faded(self, model: str, now: float) -> float:
        count, then = self._of.get(model, (0.0, now))
        return count * math.exp((then - now) / FADES_S)
