"""How long answers will be, by model: learned from those that have ended, and from those that run longer than expected.

S5 knows one mean of all answers. Models differ by two orders of magnitude, and one whose answers take minutes has ended
none of them when it matters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

GUESS_WEIGHT = 2.0  # answers that the mean of all models counts for, in a model's own
UNKNOWN = 2.0  # a model of which no answer has ended may be a chatty one: the mean of all, this many times
RUN_ON = 4.0  # while no answer of a model has ended: how much longer than the longest that runs they may be expected
KEPT = 0.95  # weight of what was seen before, with each answer of the model: about the last twenty count
# A mean pace is kept over the whole answer: what is held back of it may be spent once, over half of a usual answer.
PACE_SHARE = 0.5
SHORT_ANSWER = 32.0  # tokens, until answers have been seen
COMPARED = 0.985  # weight of what was compared before, with each answer: about the last seventy count
COMPARED_OFTEN = 48
ALIKE = 0.5  # of the squared difference between answers of different models: models that differ have less within
OF_MODEL, OF_ALL = 0.5, 0.1  # weights of the last answer: some models answer in a word, others in pages


class _Seen:
    """Of one model's answers that have ended, faded."""

    __slots__ = ("count", "log_length", "tokens")

    def __init__(self, log_length: float) -> None:
        self.count = 0.0
        self.tokens = 0.0
        self.log_length = log_length  # of the last ones

    def add(self, tokens: int) -> None:
        self.count = self.count * KEPT + 1.0
        self.tokens = self.tokens * KEPT + tokens
        self.log_length += (math.log(max(tokens, 1)) - self.log_length) * OF_MODEL


class Likeness:
    """Whether models answer at like length: then two answers of one model differ as much as two of different ones."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}  # by model: logarithm of its last answer's length
        self._before: tuple[str, float] | None = None  # the answer before, of whichever model
        self._within = self._between = 0.0  # squared differences, faded
        self._count = 0

    def add(self, model: str, tokens: int) -> None:
        """An answer has ended."""
        log_length = math.log(max(tokens, 1))
        last, before = self._last.get(model), self._before
        if last is not None and before is not None and before[0] != model:
            self._count += 1
            self._within = self._within * COMPARED + (log_length - last) ** 2
            self._between = self._between * COMPARED + (log_length - before[1]) ** 2
        self._last[model] = log_length
        self._before = model, log_length

    @property
    def is_seen(self) -> bool:
        """Models answer at like length, as far as enough answers have shown."""
        return self._count >= COMPARED_OFTEN and self._within >= ALIKE * self._between


class AnswerLengths:
    def __init__(self) -> None:
        self._of: dict[str, _Seen] = {}
        self._running: dict[str, dict[int, int]] = {}  # by model and answer: tokens that one that runs is known to have
        self._model_of: dict[int, str] = {}  # of these answers
        self._usual_log_length = math.log(SHORT_ANSWER)  # of all models

    def add(self, model: str, tokens: int) -> None:
        """An answer has ended."""
        seen = self._of.get(model)
        if seen is None:
            seen = self._of[model] = _Seen(self._usual_log_length)
        seen.add(tokens)
        self._usual_log_length += (math.log(max(tokens, 1)) - self._usual_log_length) * OF_ALL

    def runs(self, model: str, id: int, produced: int) -> None:
        """An answer is known to be so long already."""
        self._running.setdefault(model, {})[id] = produced
        self._model_of[id] = model

    def ended(self, id: int) -> None:
        """It does not run any more, or was never heard of."""
        model = self._model_of.pop(id, None)
        if model is not None:
            del self._running[model][id]

    def pace_tokens(self, model: str) -> float:
        """Over how many tokens the safety of a pace may be spent at once: rather too few, so by the geometric mean."""
        seen = self._of.get(model)
        return PACE_SHARE * math.exp(self._usual_log_length if seen is None else seen.log_length)

    def mean(self, model: str, guess: float, produced: Sequence[int]) -> float:
        """Mean length of the model's answers, of which these run. One that has outlived the mean is expected to become
        twice as long as it is now, and counts as an answer of that length: where answers take minutes, none has ended
        when the first hundred requests come. As long as none has, every token of those that run speaks for long ones:
        the likeliest mean of lengths of which only lower bounds are known, within what the longest makes credible."""
        seen = self._of.get(model)
        count, tokens = GUESS_WEIGHT, GUESS_WEIGHT * guess
        if seen is None:
            likeliest = (tokens + sum(produced)) / count
            return max(guess, min(likeliest, RUN_ON * max(produced, default=0)))
        count += seen.count
        tokens += seen.tokens
        mean = tokens / count
        for one in produced:
            if one > mean:
                count += 1.0
                tokens += 2.0 * one
        return tokens / count

    def mean_known(self, model: str, guess: float) -> float:
        """The same for somebody who does not run the answers and is told of them."""
        if model not in self._of:
            guess *= UNKNOWN
        return self.mean(model, guess, tuple(self._running.get(model, {}).values()))


def expected_length(mean: float, produced: int) -> float:
    """Of an answer that has so many tokens: beyond the mean it goes on for as long as it has outlived it."""
    return max(mean, 2.0 * produced - mean)


def most_tokens(lengths: Sequence[tuple[int, int]], mean: float) -> tuple[int, int]:
    """When these requests, (input, produced) pairs, hold most tokens if nobody else comes: how many requests, and how
    many tokens they hold together. Every iteration adds a token to each, and those that end leave."""
    if len(lengths) == 1:
        given, produced = lengths[0]
        return 1, given + max(int(expected_length(mean, produced)), produced + 1)
    groups: dict[int, list[int]] = {}  # by tokens produced: how many, and what they hold; those who came together
    for given, produced in lengths:
        group = groups.get(produced)
        if group is None:
            groups[produced] = [1, given + produced]
        else:
            group[0] += 1
            group[1] += given + produced
    left, known = [], 0
    for produced, group in groups.items():
        expected = 2.0 * produced - mean  # `expected_length`, for each of dozens in an admission
        remaining = (expected if expected > mean else mean) - produced
        left.append((remaining if remaining > 1.0 else 1.0, produced))
        known += group[1]
    left.sort()
    count = len(lengths)
    best_count, best_tokens = count, float(known)
    for remaining, produced in left:
        total = known + count * remaining
        if total > best_tokens:
            best_count, best_tokens = count, total
        group = groups[produced]
        count -= group[0]
        known -= group[1]
    return best_count, int(best_tokens)
