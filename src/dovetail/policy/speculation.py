"""How many proposed tokens are worth verifying: what they are likely to yield against what their rows cost.

A function of chances and times; where proposals come from and what became of them is the caller's to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

MIN_GAIN = 1.05  # tokens per second, over an iteration without drafts: less is noise of the estimates
LEAST_CHANCE = 0.05  # of a token: those beyond are not weighed


class Proposal(NamedTuple):
    """For one sequence."""

    length: int  # tokens proposed
    chance: float  # that one of them is what is chosen, if those before it were


def draft_lengths(
    proposals: Sequence[Proposal], batch: int, iteration_s: Callable[[int], float], most_s: float
) -> list[int]:
    """How many tokens of each proposal to verify, so that an iteration of `batch` sequences yields most tokens per
    second and takes at most `most_s`. `iteration_s`: of so many rows."""
    # Chances fall from one token of a proposal to the next, so that the best rows are always leading tokens.
    rows = sorted(
        (proposal.chance**place, at)
        for at, proposal in enumerate(proposals)
        for place in range(1, proposal.length + 1)
        if proposal.chance**place >= LEAST_CHANCE
    )
    rows.reverse()
    expected, kept = float(batch), 0
    best_rate = expected / iteration_s(batch) * MIN_GAIN
    for count, (chance, _) in enumerate(rows, 1):
        expected += chance
        seconds = iteration_s(batch + count)
        if seconds > most_s:
            break
        if expected / seconds > best_rate:
            best_rate, kept = expected / seconds, count
    lengths = [0] * len(proposals)
    for _, at in rows[:kept]:
        lengths[at] += 1
    return lengths


class Acceptance:
    """How often proposed tokens were right, the latest counting most. What was long ago is forgotten, so that a kind of
    proposal that was once wrong is tried again."""

    __slots__ = ("_hits", "_tries")

    WEIGHT = 4.0  # of what is believed before anything was seen, in tries
    MEMORY = 32.0  # tries that count
    FADING = 0.98  # of what was seen, at each proposal that was not worth verifying

    def __init__(self) -> None:
        self._hits = self._tries = 0.0

    def chance(self, prior: float) -> float:
        return (self._hits + self.WEIGHT * prior) / (self._tries + self.WEIGHT)

    def observe(self, accepted: int, proposed: int) -> None:
        """The first wrong one ends the look at them: those behind it tell nothing."""
        tries = accepted + (accepted < proposed)
        share = min(1.0, max(self.MEMORY - tries, 0.0) / self._tries) if self._tries else 1.0
        self._hits = self._hits * share + accepted
        self._tries = self._tries * share + tries

    def fade(self) -> None:
        self._hits *= self.FADING
        self._tries *= self.FADING
