"""How fast a tier is, as far as was seen: an assumed bandwidth that every busy spell corrects (L6)."""

from __future__ import annotations

import threading
import time

_WINDOW_BYTES = 256 << 20  # a spell of this many bytes moves the estimate by half of the difference
_MIN_BYTES = 1 << 20  # smaller spells tell of latency rather than of bandwidth


class Meter:
    """Counts what passes through one tier. Several transfers at once are one spell: bandwidth is the tier's, not a
    thread's."""

    def __init__(self, assumed_bytes_per_s: float) -> None:
        self.bytes_per_s = assumed_bytes_per_s
        self.total_bytes = 0
        self._is_measured = False
        self._lock = threading.Lock()
        self._in_flight = 0
        self._spell_start = 0.0
        self._spell_bytes = 0

    def begin(self) -> None:
        with self._lock:
            if self._in_flight == 0:
                self._spell_start, self._spell_bytes = time.monotonic(), 0
            self._in_flight += 1

    def end(self, num_bytes: int) -> None:
        with self._lock:
            self._in_flight -= 1
            self._spell_bytes += num_bytes
            self.total_bytes += num_bytes
            if self._in_flight == 0 or self._spell_bytes >= _WINDOW_BYTES:
                now = time.monotonic()
                self._observe(self._spell_bytes, now - self._spell_start)
                self._spell_start, self._spell_bytes = now, 0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A measurement made elsewhere, a benchmark's for example."""
        with self._lock:
            self._observe(num_bytes, seconds)

    def _observe(self, num_bytes: int, seconds: float) -> None:
        if num_bytes < _MIN_BYTES or seconds <= 0:
            return
        weight = min(1.0, num_bytes / _WINDOW_BYTES) / 2 if self._is_measured else 1.0
        self.bytes_per_s += weight * (num_bytes / seconds - self.bytes_per_s)
        self._is_measured = True
