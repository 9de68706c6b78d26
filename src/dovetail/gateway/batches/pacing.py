"""How many lines of batches run at a time: what latency-sensitive work leaves. Pure; time is an argument.

The nodes say it themselves: a line that no node takes stays in the controller's queue. While lines wait there, no
further ones are added; while clients wait, or have just been answered late, batches give way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_WAITING = 2  # lines of a model without a place: enough to fill the next gap
_GROWTH_S = 0.25  # between two steps up
_SHRINK_S = 1.0  # between two steps down
_START = 4.0


@dataclass(frozen=True)
class Pressure:
    """What a server has to do, apart from and of batches."""

    online: int = 0  # unfinished answers of clients
    online_waiting: int = 0  # of them without a place
    late: int = 0  # answers that missed their targets since the server was started
    waiting: Mapping[str, int] = field(default_factory=dict)  # lines without a place, by model


class Pace:
    """The number of lines that may run, at most `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = min(_START, float(most))
        self._pressure = Pressure()
        self._late = 0  # as of the last look
        self._grown_s = self._shrunk_s = float("-inf")

    def observe(self, pressure: Pressure, now: float) -> None:
        is_late = pressure.late > self._late
        self._pressure, self._late = pressure, pressure.late
        if pressure.online_waiting or is_late:
            if now >= self._shrunk_s + _SHRINK_S:
                self.limit, self._shrunk_s = max(1.0, self.limit / 2), now
        elif now >= self._grown_s + _GROWTH_S:
            step = 1.0 if pressure.online else self.limit  # nobody else is there: as fast as it goes
            self.limit, self._grown_s = min(float(self.most), self.limit + step), now

    def has_room(self, model: str, running: int) -> bool:
        """For one more line, beside so many."""
        return running < self.limit and self._pressure.waiting.get(model, 0) < _WAITING

    def held_by(self) -> str | None:
        """In words; None: by nothing but the machine's speed."""
        if self._pressure.online_waiting:
            return "requests of clients wait for a place"
        if self.limit < self.most and self._pressure.online:
            return "requests of clients come first"
        return None
