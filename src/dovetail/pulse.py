"""What a worker shows of itself in memory that it shares with whoever started it: that its loop goes round, and whose
iteration it computes.

No message could say either: a process that hangs sends none, and one that crashes loses those that are on their way.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import msgspec

_SIZE = 1 << 18
_HEADER = 24  # three words: beats, milliseconds that the iteration is expected to take, bytes of names
_BEATS, _EXPECTED_MS, _NUM_BYTES = range(3)
UNUSABLE_CODE = 78  # a worker ends with it where no retry mends what is wrong, and leaves the reason beside its pulse
LOOK_S = 0.5  # how often a worker's pulse is felt


def reason_file(pulse_file: Path) -> Path:
    return pulse_file.with_name(f"{pulse_file.name}.reason")


class Pulse:
    """Written by the worker, read by its supervisor. Without a file it is the worker's own affair."""

    def __init__(self, file: Path | None = None) -> None:
        if file is None:
            self._memory = mmap.mmap(-1, _SIZE)
        else:
            with file.open("r+b") as opened:
                self._memory = mmap.mmap(opened.fileno(), _SIZE)
        self._words = memoryview(self._memory)[:_HEADER].cast("Q")
        self._names: list[str] = []  # as they were last written
        self._num_bytes = 0

    @classmethod
    def create(cls, file: Path) -> Pulse:
        """Nothing of an earlier worker is left in it: whoever still maps the old file maps another one."""
        file.unlink(missing_ok=True)
        with file.open("xb") as opened:
            opened.truncate(_SIZE)
        return cls(file)

    def beat(self) -> None:
        self._words[_BEATS] += 1

    def begin(self, request_ids: list[str], expected_s: float) -> None:
        """An iteration of these requests is about to be computed."""
        self._words[_BEATS] += 1
        self._words[_EXPECTED_MS] = min(int(expected_s * 1000), 1 << 40)
        if request_ids != self._names:  # mostly it is the batch of the iteration before
            self._names = list(request_ids)
            self._write(msgspec.json.encode(self._names))
        self._words[_NUM_BYTES] = self._num_bytes  # last: names count only when they are whole

    def _write(self, names: bytes) -> None:
        """What finds no room is left out as a whole: then nobody knows who took part, as between two iterations."""
        self._num_bytes = len(names) if len(names) <= _SIZE - _HEADER else 0
        self._memory[_HEADER : _HEADER + self._num_bytes] = names[: self._num_bytes]

    def end(self) -> None:
        self._words[_NUM_BYTES] = 0
        self._words[_EXPECTED_MS] = 0

    @property
    def beats(self) -> int:
        """0 = a worker that has none."""
        return self._words[_BEATS]

    @property
    def expected_s(self) -> float:
        """How long what it does now should take."""
        return self._words[_EXPECTED_MS] / 1000

    def in_iteration(self) -> frozenset[str]:
        """Requests of the iteration that was being computed; empty between two. Of a worker that has ended."""
        size = min(self._words[_NUM_BYTES], _SIZE - _HEADER)
        if not size:
            return frozenset()
        return frozenset(msgspec.json.decode(self._memory[_HEADER : _HEADER + size], type=list[str]))

    def close(self) -> None:
        self._words.release()
        self._memory.close()


class StillWatch:
    """For how long a worker has done nothing. One that reads its weights in from the disk page by page does something,
    and time in which the observer did not run either does not count."""

    def __init__(self, now: float) -> None:
        self._last = (0, 0)
        self._since = self._looked = now

    def look(self, pulse: Pulse, major_faults: int, now: float) -> float:
        sign = (pulse.beats, major_faults)
        self._since += max(now - self._looked - 2 * LOOK_S, 0.0)
        self._looked = now
        if sign != self._last or not pulse.beats:
            self._last, self._since = sign, now
        return now - self._since
