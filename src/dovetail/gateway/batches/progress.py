"""How fast a batch gets on, of the last half minute. Pure; time is an argument."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_WINDOW_S = 30.0


@dataclass(frozen=True)
class Speed:
    tokens_per_s: float
    lines_per_s: float


class Progress:
    """Lines that ended, with their tokens."""

    def __init__(self, now: float) -> None:
        self._began_s = now
        self._ended: deque[tuple[float, int]] = deque()

    def add(self, tokens: int, now: float) -> None:
        self._ended.append((now, tokens))
        self._forget(now)  # nobody may ever ask

    def speed(self, now: float) -> Speed:
        self._forget(now)
        seconds = max(min(now - self._began_s, _WINDOW_S), 0.1)
        return Speed(sum(tokens for _, tokens in self._ended) / seconds, len(self._ended) / seconds)

    def _forget(self, now: float) -> None:
        while self._ended and self._ended[0][0] < now - _WINDOW_S:
            self._ended.popleft()


def eta_s(num_left: int, speed: Speed) -> float | None:
    """None: nothing ended lately."""
    if not num_left:
        return 0.0
    return num_left / speed.lines_per_s if speed.lines_per_s else None
