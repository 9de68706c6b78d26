"""The lines of one batch: where each is in its file, which model it asks, which were answered. No I/O.

number  0 1 2 3 4 …      in the order of the file, empty lines left out
state   PENDING → TAKEN → DONE, and back to PENDING when a line has to be tried again
"""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from typing import Any

import numpy as np

# A line as the checking process writes it down: its place in the file, and the number of its model.
LINE = np.dtype([("offset", "<u8"), ("length", "<u4"), ("model", "<u2")])
PART = ".part"  # ends the name of an index that is being written
Array = np.ndarray[Any, Any]

PENDING, TAKEN, DONE = 0, 1, 2
_STEP = 4096  # lines that are looked at together
_ASSUMED_TOKENS = 256.0  # of a line, before the first one was answered
_WEIGHT = 0.05  # of one line in the mean


class BatchLines:
    """Of a batch in progress."""

    def __init__(self, index: Array, num_models: int) -> None:
        self._models = index["model"]
        self._states = np.zeros(len(index), dtype=np.uint8)
        self._left = Counter(dict(enumerate(np.bincount(self._models, minlength=num_models).tolist())))
        self._cursors = [0] * num_models  # no line before it is pending, but those that are tried again
        self._later: list[tuple[float, int]] = []  # heap: when a line is tried again, and which
        self.num_taken = 0
        self.num_done = 0
        self.mean_tokens = _ASSUMED_TOKENS

    def __len__(self) -> int:
        return len(self._states)

    @property
    def models(self) -> list[int]:
        """That lines ask which nobody works on."""
        return [model for model, count in self._left.items() if count]

    def note_done(self, numbers: Array) -> None:
        """Answered before this server was started."""
        assert not self._states[numbers].any()
        self._states[numbers] = DONE
        self.num_done += len(numbers)
        self._left.subtract(dict(enumerate(np.bincount(self._models[numbers], minlength=1).tolist())))

    def take(self, model: int, now: float) -> int | None:
        """The next line of this model. None: all of them wait for their time."""
        number = self._due(model, now)
        if number is None:
            number = self._next(model)
        if number is None:
            return None
        assert self._states[number] == PENDING
        self._states[number] = TAKEN
        self._left[model] -= 1
        self.num_taken += 1
        return number

    def give_back(self, number: int, not_before: float) -> None:
        """It is tried again."""
        assert self._states[number] == TAKEN
        self._states[number] = PENDING
        self._left[int(self._models[number])] += 1
        self.num_taken -= 1
        heappush(self._later, (not_before, number))

    def done(self, number: int, tokens: int) -> None:
        """Its answer is on disk."""
        assert self._states[number] == TAKEN
        self._states[number] = DONE
        self.num_taken -= 1
        self.num_done += 1
        self.mean_tokens += max(_WEIGHT, 1 / self.num_done) * (tokens - self.mean_tokens)
        assert self.num_taken >= 0
        assert self.num_done + self.num_taken <= len(self)

    def unanswered(self) -> Array:
        return np.flatnonzero(self._states != DONE)

    def _due(self, model: int, now: float) -> int | None:
        """Of those that are tried again."""
        put_back, found = [], None
        while self._later and self._later[0][0] <= now and found is None:
            entry = heappop(self._later)
            if int(self._models[entry[1]]) == model:
                found = entry[1]
            else:
                put_back.append(entry)
        for entry in put_back:
            heappush(self._later, entry)
        return found

    def _next(self, model: int) -> int | None:
        """Of those that nobody has tried."""
        waiting = {number for _, number in self._later}
        while (first := self._cursors[model]) < len(self):
            part = slice(first, first + _STEP)
            for at in np.flatnonzero((self._models[part] == model) & (self._states[part] == PENDING)):
                number = first + int(at)
                if number not in waiting:
                    self._cursors[model] = number + 1
                    return number
            self._cursors[model] = min(first + _STEP, len(self))
        return None
