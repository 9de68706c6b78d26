"""How long things take: interpolated iteration times, fitted from samples (S3), and linear models of moving bytes (S6).

Beyond the measured range the rule is stated once, in `Curve.at`: below the first point the first value holds, above the
last point time grows in proportion to the argument. Knows nothing of requests or deadlines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import NamedTuple, Protocol

GIB = 1024**3
MOST_KNOWN = 8192  # lengths whose time is remembered
LONGER = 2048  # tokens: over so many more a decode is looked at to see what contexts cost


class PrefillSample(NamedTuple):
    tokens: int
    seconds: float


class DecodeSample(NamedTuple):
    batch: int
    mean_length: float
    seconds: float


class Curve:
    """Piecewise-linear time over one argument."""

    __slots__ = ("_xs", "_ys")

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        if not points:
            raise ValueError("a curve needs at least one point")
        xs = [float(x) for x, _ in points]
        if any(a >= b for a, b in pairwise(xs)):
            raise ValueError(f"curve arguments must rise, got {xs}")
        self._xs = xs
        self._ys = [float(y) for _, y in points]

    def at(self, x: float) -> float:
        xs, ys = self._xs, self._ys
        if x <= xs[0]:
            return ys[0]
        if x >= xs[-1]:
            return ys[-1] * x / xs[-1]
        i = bisect_left(xs, x)
        left, right = xs[i - 1], xs[i]
        return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - left) / (right - left)

    @property
    def points(self) -> list[tuple[float, float]]:
        return list(zip(self._xs, self._ys, strict=True))


class Surface:
    """Time of one decode iteration over batch size and mean length: a Curve over batch for each measured length.

    For a fixed batch the surface is itself piecewise linear in the mean length, so each batch size that occurs gets its
    own Curve once; the hot path then costs one bisection.
    """

    __slots__ = ("_by_batch", "_rows")

    def __init__(self, rows: Sequence[tuple[float, Curve]]) -> None:
        if not rows:
            raise ValueError("a surface needs at least one row")
        self._rows = sorted(rows, key=lambda row: row[0])
        self._by_batch: dict[int, Curve] = {}

    def at(self, batch: int, mean_length: float) -> float:
        return self.of(batch).at(mean_length)

    def of(self, batch: int) -> Curve:
        """Over the mean length."""
        curve = self._by_batch.get(batch)
        if curve is None:
            curve = self._by_batch[batch] = Curve([(length, row.at(batch)) for length, row in self._rows])
        return curve

    def corners(self) -> list[tuple[float, float, float]]:
        """(batch, mean length, seconds) wherever a measured length meets a batch measured at any length: between
        neighbours of these it is linear along either axis."""
        batches = sorted({batch for _, row in self._rows for batch, _ in row.points})
        return [(batch, length, row.at(batch)) for length, row in self._rows for batch in batches]


class Latency(Protocol):
    """What schedulers ask. `LatencyModel` answers from measurements, `live.LiveLatency` goes on learning."""

    @property
    def version(self) -> int:
        """Counts what was learned of prefills: while it stays, `prefill_s` says the same."""
        ...

    def prefill_s(self, tokens: int) -> float: ...

    def attending_s(self, start: int, count: int) -> float:
        """What so many tokens of a prompt take longer because of those before them."""
        ...

    def decode_s(self, batch: int, total_tokens: int) -> float: ...

    def reading_s(self, batch: int, total_tokens: int) -> float:
        """What of a decode is reading its contexts."""
        ...


def prompts_s(latency: Latency, parts: Sequence[tuple[int, int]]) -> float:
    """One iteration of parts of prompts, (tokens before it, tokens of it) each: what one prompt of so many tokens
    takes, and what attending to those before costs."""
    if len(parts) == 1:
        return prompt_s(latency, *parts[0])
    total_s = latency.prefill_s(sum(count for _, count in parts))
    for start, count in parts:
        if start:
            total_s += latency.attending_s(start, count)
    return total_s


def mixed_s(latency: Latency, batch: int, total_tokens: int, parts: Sequence[tuple[int, int]]) -> float:
    """One iteration of parts of prompts and of a token for each of so many running requests: what a prompt of so many
    tokens more takes, and reading their contexts. No more than one after the other."""
    apart_s = latency.decode_s(batch, total_tokens) + prompts_s(latency, parts)
    together_s = latency.prefill_s(batch + sum(count for _, count in parts)) + latency.reading_s(batch, total_tokens)
    together_s += sum(latency.attending_s(start, count) for start, count in parts if start)
    return min(together_s, apart_s)


def prompt_s(latency: Latency, start: int, count: int) -> float:
    """The same of one part."""
    seconds = latency.prefill_s(count)
    return seconds + latency.attending_s(start, count) if start else seconds


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """One model on one kind of hardware."""

    prefill: Curve  # seconds over input tokens
    decode: Surface  # seconds over batch size and mean length
    _known: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)  # of `prefill_s`
    _decodes: dict[int, Callable[[float], float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def version(self) -> int:
        return 0

    def prefill_s(self, tokens: int) -> float:
        """Asked for the same few lengths again and again."""
        seconds = self._known.get(tokens)
        if seconds is None:
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
            seconds = self._known[tokens] = self.prefill.at(tokens)
        return seconds

    def attending_s(self, start: int, count: int) -> float:
        marginal_s = self.prefill_s(start + count) - self.prefill_s(start)
        return max(marginal_s - self.prefill_s(count), 0.0)

    def decode_s(self, batch: int, total_tokens: int) -> float:
        """One iteration of `batch` sequences that hold `total_tokens` together."""
        at = self._decodes.get(batch)
        if at is None:
            at = self._decodes[batch] = self.decode.of(batch).at
        return at(total_tokens / batch)

    def reading_s(self, batch: int, total_tokens: int) -> float:
        """By what a decode takes longer with contexts that are longer: short ones are not measured apart."""
        more_s = self.decode_s(batch, total_tokens + batch * LONGER) - self.decode_s(batch, total_tokens)
        return max(more_s, 0.0) * total_tokens / (batch * LONGER)


def fit_prefill(samples: Iterable[PrefillSample]) -> Curve:
    by_length: dict[float, list[float]] = defaultdict(list)
    for sample in samples:
        by_length[float(sample.tokens)].append(sample.seconds)
    return Curve([(length, median(times)) for length, times in sorted(by_length.items())])


def fit_decode(samples: Iterable[DecodeSample]) -> Surface:
    grid: dict[float, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        grid[float(sample.mean_length)][float(sample.batch)].append(sample.seconds)
    rows = [
        (length, Curve([(batch, median(times)) for batch, times in sorted(row.items())]))
        for length, row in sorted(grid.items())
    ]
    return Surface(rows)


def fit(prefill: Iterable[PrefillSample], decode: Iterable[DecodeSample]) -> LatencyModel:
    """Repeated measurements of one point count by their median, so that a hiccup does not bend the curve."""
    return LatencyModel(fit_prefill(prefill), fit_decode(decode))


@dataclass(frozen=True, slots=True)
class TransferModel:
    """Times of loads, unloads and resizes on one node, all linear in bytes."""

    load_bytes_per_s: float = 13.0 * GIB
    load_fixed_s: float = 0.0
    unload_s: float = 0.1
    resize_fixed_s: float = 0.05  # every layer's tensors are allocated and freed one by one; also when the pool goes
    resize_new_s_per_byte: float = 0.0180 / GIB  # allocating the new pool
    resize_copy_s_per_byte: float = 0.0219 / GIB  # moving the old blocks over when the pool grows

    def load_s(self, num_bytes: int) -> float:
        return self.load_fixed_s + num_bytes / self.load_bytes_per_s

    def resize_s(self, old_bytes: int, new_bytes: int) -> float:
        if new_bytes == 0:
            return self.resize_fixed_s
        copied = old_bytes if new_bytes > old_bytes else 0
        return self.resize_fixed_s + new_bytes * self.resize_new_s_per_byte + copied * self.resize_copy_s_per_byte


# Pools in reserved address ranges: a resize commits or releases pages at the tail and copies nothing.
IN_PLACE_RESIZE = TransferModel(resize_fixed_s=0.002, resize_new_s_per_byte=0.0, resize_copy_s_per_byte=0.0)
