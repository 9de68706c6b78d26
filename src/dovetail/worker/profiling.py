"""Measures how long iterations of a model take on this device, over the grid of S3, with the code that serves it.

Prefills are computed in full. For decodes the cache is declared computed instead of being filled: what the numbers in
it are does not change how long reading them takes, and filling it would take most of the time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from dovetail.policy.latency import DecodeSample, Latency, LatencyModel, PrefillSample, fit
from dovetail.profiles.files import BATCHES
from dovetail.sched.sequence import Sequence as Tokens
from dovetail.types import SamplingParams
from dovetail.worker.runner import ModelRunner

PREFILL_TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MEAN_LENGTHS = (32, 256, 512, 1024, 2048, 4096)  # long contexts are cut: time is no straight line over them
REPEAT_S = 0.6  # a point is repeated until this much time is spent on it, but at least
MIN_REPEATS, MAX_REPEATS = 3, 15
STEADY = 2.0  # slowest over fastest repeat of a point, up to which a machine counts as left alone
SLOW_S = 8.0  # points beyond one that takes this long are left to extrapolation

Progress = Callable[[str, int, int], None]


@dataclass
class Measured:
    prefill: list[PrefillSample] = field(default_factory=list)
    decode: list[DecodeSample] = field(default_factory=list)
    spread: dict[str, float] = field(default_factory=dict)  # by point: its slowest repeat over its fastest

    def unsteady(self) -> dict[str, float]:
        """Points whose repeats differ by more than something else on the machine can be ignored."""
        return {what: ratio for what, ratio in self.spread.items() if ratio > STEADY}

    @property
    def model(self) -> LatencyModel:
        return fit(self.prefill, self.decode)


@dataclass(frozen=True)
class Errors:
    """Relative deviation of predictions on random loads."""

    loads: int
    prefill_mean: float
    prefill_p90: float
    decode_mean: float
    decode_p90: float


class Profiler:
    def __init__(self, runner: ModelRunner, max_tokens: int, max_batch: int, seed: int = 0) -> None:
        self._runner = runner
        self._random = random.Random(seed)
        self._vocabulary = runner.card.spec.vocab_size
        self._next_id = 0
        self._block_size = runner.scheduler.pool.block_size
        context = runner.card.spec.context_length - 1
        self.max_tokens = min(max_tokens, context)
        self.max_batch = min(max_batch, runner.max_batch)
        most = runner.executor.max_blocks
        self._num_blocks = min(most, ((self.max_tokens + MAX_REPEATS) // self._block_size + 2) * self.max_batch)
        runner.resize(self._num_blocks)

    def run(self, progress: Progress = lambda *_: None) -> Measured:
        measured = Measured()
        lengths = [n for n in PREFILL_TOKENS if n <= self.max_tokens]
        points = self.decode_points()
        total = len(lengths) + len(points)
        self.prefill_s(lengths[0])  # the first one pays for what is made once
        for done, tokens in enumerate(lengths):
            progress(f"prefill of {tokens} tokens", done, total)
            times = self._repeat(lambda n=tokens: self.prefill_s(n))  # type: ignore[misc]
            measured.prefill.append(PrefillSample(tokens, median(times)))
            measured.spread[f"prefill of {tokens} tokens"] = max(times) / min(times)
            if times[0] > SLOW_S:
                break
        for done, (batch, length) in enumerate(points):
            progress(f"decode of {batch} x {length} tokens", len(lengths) + done, total)
            times = self.decode_times([length] * batch)
            measured.decode.append(DecodeSample(batch, length, median(times)))
            measured.spread[f"decode of {batch} x {length} tokens"] = max(times) / min(times)
        return measured

    def decode_points(self) -> list[tuple[int, int]]:
        """Batch and mean length, as far as they fit into the KV memory there is."""
        points = []
        for length in MEAN_LENGTHS:
            for batch in BATCHES:
                blocks = batch * (-(-(length + MAX_REPEATS + 2) // self._block_size))
                if length <= self.max_tokens and batch <= self.max_batch and blocks <= self._num_blocks:
                    points.append((batch, length))
        return points

    def check(self, latency: Latency, loads: int, progress: Progress = lambda *_: None) -> Errors:
        """Predictions against `loads` random prefills and as many random batches of mixed lengths."""
        prefill, decode = [], []
        for load in range(loads):
            progress("random loads", load, loads)
            tokens = int(2 ** self._random.uniform(4, (self.max_tokens + 1).bit_length() - 1))
            taken = median(self._repeat(lambda n=tokens: self.prefill_s(n), 3))  # type: ignore[misc]
            prefill.append(abs(latency.prefill_s(tokens) / taken - 1))
            batch, longest = self._random.randint(1, self.max_batch), self.max_tokens // 2
            lengths = [self._random.randint(16, longest) for _ in range(batch)]
            while sum(-(-(n + MAX_REPEATS + 2) // self._block_size) for n in lengths) > self._num_blocks:
                lengths.pop()
            taken = median(self.decode_times(lengths))
            decode.append(abs(latency.decode_s(len(lengths), sum(lengths)) / taken - 1))
        return Errors(loads, _mean(prefill), _p90(prefill), _mean(decode), _p90(decode))

    def prefill_s(self, tokens: int) -> float:
        """One prompt of random tokens, in as many iterations as serving it takes."""
        sequence = self._sequence(tokens)
        self._runner.scheduler.enter(sequence)
        started = time.perf_counter()
        while len(sequence.tokens) == tokens:
            self._runner.iterate([sequence])
        taken = time.perf_counter() - started
        self._drop([sequence])
        return taken

    def decode_times(self, lengths: Sequence[int]) -> list[float]:
        """Several iterations of sequences that hold so many tokens."""
        scheduler = self._runner.scheduler
        sequences = [self._sequence(length) for length in lengths]
        for sequence in sequences:
            scheduler.enter_as_computed(sequence)
        self._runner.iterate(sequences)  # touches the pages

        def step() -> float:
            started = time.perf_counter()
            self._runner.iterate(sequences)
            return time.perf_counter() - started

        times = self._repeat(step)
        self._drop(sequences)
        return times

    def _repeat(self, function: Callable[[], float], most: int = MAX_REPEATS) -> list[float]:
        times: list[float] = []
        while len(times) < most and (len(times) < min(MIN_REPEATS, most) or sum(times) < REPEAT_S):
            times.append(function())
            if times[0] > SLOW_S:
                break
        return times

    def _sequence(self, tokens: int) -> Tokens:
        self._next_id += 1
        content = [self._random.randrange(self._vocabulary) for _ in range(tokens)]
        sampling = SamplingParams(max_tokens=1 << 30, seed=0, temperature=0.0)
        return Tokens(self._next_id, f"profile-{self._next_id}", 0, content, tokens, sampling)

    def _drop(self, sequences: Iterable[Tokens]) -> None:
        for sequence in sequences:
            self._runner.drop(sequence)
        self._runner.scheduler.pool.drop_cache()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[len(values) * 9 // 10] if values else 0.0
