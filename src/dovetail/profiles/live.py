"""A latency model that goes on learning: what was measured or estimated before, corrected by what iterations take.

Corrections are ratios of observed to predicted time, averaged in the logarithm and kept by size of the iteration
(powers of two; few rows one by one, because drafts are weighed by single rows): a device that is 10 % slower at
decoding single tokens need not be so at prefilling thousands.
A size that has not been seen yet takes the correction of its kind as a whole, and one that was seen a few times a mean
of both: a prompt that was slow once is computed in parts from then on, and never seen again at its size.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from dovetail.policy.latency import Latency

EXACT_ROWS = 8
STEP = 0.1  # weight of a new observation once enough have been made
KIND_COUNTS = 4  # observations of its own size weigh as much as all of the kind
BOUND = math.log(2.0)  # one observation counts as at most twice or half of what was expected: a hiccup is no trend


class Correction:
    """The running ratio of one kind of iteration."""

    __slots__ = ("count", "log")

    def __init__(self) -> None:
        self.log = 0.0
        self.count = 0  # observations

    def observe(self, ratio: float) -> None:
        self.count += 1
        error = math.log(ratio) - self.log
        if self.count > 3:  # a preset may be wrong by any factor; afterwards only outliers are
            error = min(max(error, -BOUND), BOUND)
        self.log += error * max(STEP, 1.0 / self.count)


_UNSEEN = Correction()


class LiveLatency:
    """`base` with corrections. Predicts like `LatencyModel`."""

    def __init__(self, base: Latency, least_s: float = 0.0) -> None:
        """`least_s`: no iteration is shorter, whatever is learnt."""
        self.base = base
        self._least_s = least_s
        self._prefill = Correction()
        self._decode = Correction()
        self._sizes: dict[Hashable, Correction] = {}
        self._factors: dict[Hashable, float] = {}  # asked for far more often than learned
        self.version = 0

    def prefill_s(self, tokens: int) -> float:
        return max(self.base.prefill_s(tokens) * self._prefill_factor(tokens), self._least_s)

    def attending_s(self, start: int, count: int) -> float:
        """Corrected as the part is: the difference of two prompts of other sizes, with corrections of their own, may be
        anything."""
        return self.base.attending_s(start, count) * self._prefill_factor(count)

    def decode_s(self, batch: int, total_tokens: int) -> float:
        size = (_rows(batch), _size(total_tokens // batch))
        return max(self.base.decode_s(batch, total_tokens) * self._factor(size, self._decode), self._least_s)

    def reading_s(self, batch: int, total_tokens: int) -> float:
        size = (_rows(batch), _size(total_tokens // batch))
        return self.base.reading_s(batch, total_tokens) * self._factor(size, self._decode)

    def observe_prefill(self, tokens: int, seconds: float) -> float:
        """Learn from it; returns what `base` expected."""
        self.version += 1
        return self._observe(_size(tokens), self._prefill, self.base.prefill_s(tokens), seconds)

    def observe_decode(self, batch: int, total_tokens: int, seconds: float) -> float:
        """Learn from it; returns what `base` expected."""
        size = (_rows(batch), _size(total_tokens // batch))
        return self._observe(size, self._decode, self.base.decode_s(batch, total_tokens), seconds)

    def _prefill_factor(self, tokens: int) -> float:
        return self._factor(tokens.bit_length() or 1, self._prefill)

    def _factor(self, size: Hashable, kind: Correction) -> float:
        factor = self._factors.get(size)
        if factor is None:
            own = self._sizes.get(size, _UNSEEN)
            log = (own.count * own.log + KIND_COUNTS * kind.log) / (own.count + KIND_COUNTS)
            factor = self._factors[size] = math.exp(log)
        return factor

    def _observe(self, size: Hashable, kind: Correction, base_s: float, seconds: float) -> float:
        ratio = seconds / base_s
        if ratio > 0.0:
            kind.observe(ratio)
            self._sizes.setdefault(size, Correction()).observe(ratio)
            self._factors.clear()
        return base_s


def _rows(batch: int) -> int:
    """Not above zero where it stands for one size only."""
    return batch - EXACT_ROWS if batch <= EXACT_ROWS else _size(batch)


def _size(number: int) -> int:
    return max(number, 1).bit_length()
