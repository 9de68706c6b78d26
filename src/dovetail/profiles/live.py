"""A latency model that goes on learning: what was measured or estimated before, corrected by what iterations take.

Corrections are ratios of observed to predicted time, averaged in the logarithm and kept by size of the iteration
(powers of two; few rows one by one, because drafts are weighed by single rows): a device that is 10 % slower at
decoding single tokens need not be so at prefilling thousands.
A size that has not been seen yet takes the correction of its kind as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from dovetail.policy.latency import Latency

EXACT_ROWS = 8
STEP = 0.1  # weight of a new observation once enough have been made
BOUND = math.log(2.0)  # one observation counts as at most twice or half of what was expected: a hiccup is no trend


class Correction:
    """The running ratio of one kind of iteration."""

    __slots__ = ("_log", "count", "factor")

    def __init__(self) -> None:
        self._log = 0.0
        self.count = 0  # observations
        self.factor = 1.0

    def observe(self, ratio: float) -> None:
        self.count += 1
        error = math.log(ratio) - self._log
        if self.count > 3:  # a preset may be wrong by any factor; afterwards only outliers are
            error = min(max(error, -BOUND), BOUND)
        self._log += error * max(STEP, 1.0 / self.count)
        self.factor = math.exp(self._log)  # asked for far more often than learned


class LiveLatency:
    """`base` with corrections. Predicts like `LatencyModel`."""

    def __init__(self, base: Latency) -> None:
        self.base = base
        self._prefill = Correction()
        self._decode = Correction()
        self._sizes: dict[Hashable, Correction] = {}
        self.version = 0

    def prefill_s(self, tokens: int) -> float:
        own = self._sizes.get(tokens.bit_length() or 1, self._prefill)
        return self.base.prefill_s(tokens) * own.factor

    def decode_s(self, batch: int, total_tokens: int) -> float:
        size = (_rows(batch), _size(total_tokens // batch))
        return self.base.decode_s(batch, total_tokens) * self._sizes.get(size, self._decode).factor

    def observe_prefill(self, tokens: int, seconds: float) -> float:
        """Learn from it; returns what `base` expected."""
        self.version += 1
        return self._observe(_size(tokens), self._prefill, self.base.prefill_s(tokens), seconds)

    def observe_decode(self, batch: int, total_tokens: int, seconds: float) -> float:
        """Learn from it; returns what `base` expected."""
        size = (_rows(batch), _size(total_tokens // batch))
        return self._observe(size, self._decode, self.base.decode_s(batch, total_tokens), seconds)

    def _observe(self, size: Hashable, kind: Correction, base_s: float, seconds: float) -> float:
        ratio = seconds / base_s
        if ratio > 0.0:
            kind.observe(ratio)
            self._sizes.setdefault(size, Correction()).observe(ratio)
        return base_s


def _rows(batch: int) -> int:
    """Not above zero where it stands for one size only."""
    return batch - EXACT_ROWS if batch <= EXACT_ROWS else _size(batch)


def _size(number: int) -> int:
    return max(number, 1).bit_length()
