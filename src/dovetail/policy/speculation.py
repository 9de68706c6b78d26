"""How many proposed tokens are worth verifying: what they are likely to yield against what their rows cost.

A function of chances and times; where proposals come from and what became of them is the caller's to know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

MIN_GAIN = 1.05  # tokens per second, over an iteration without drafts: less is noise of the estimates
LEAST_CHANCE = 0.05  # of a token: those beyond are not weighed

Rows = Callable[[int], float]  # seconds of an iteration of so many rows
Steps = Callable[[int, int], float]  # seconds that a draft model takes for its n-th step (from 0), of so many sequences


def no_steps(step: int, count: int) -> float:
    return 0.0


class Proposal(NamedTuple):
    """For one sequence."""

    length: int  # tokens proposed
    chance: float  # that one of them is what is chosen, if those before it were
    is_drafted: bool = False  # a draft model has to make them first, a step for each


class Plan(NamedTuple):
    lengths: list[int]  # how many tokens of each proposal to verify
    tokens_per_s: float


def plan_drafts(
    proposals: Sequence[Proposal], batch: int, iteration_s: Rows, most_s: float, step_s: Steps = no_steps
) -> Plan:
    """How many tokens of each proposal to verify, so that an iteration of `batch` sequences yields most tokens per
    second and takes at most `most_s`, with the steps of a draft model before it."""
    # Chances fall from one token of a proposal to the next, so that the best rows are always leading tokens.
    rows = sorted(
        (proposal.chance**place, at)
        for at, proposal in enumerate(proposals)
        for place in range(1, proposal.length + 1)
        if proposal.chance**place >= LEAST_CHANCE
    )
    rows.reverse()
    expected, kept, drafting_s = float(batch), 0, 0.0
    least_s = iteration_s(batch)
    best_rate, rate = expected / least_s * MIN_GAIN, expected / least_s
    lengths = [0] * len(proposals)
    sharing: list[int] = []  # by step: sequences that take part in it
    for count, (chance, at) in enumerate(rows, 1):
        expected += chance
        if proposals[at].is_drafted:
            drafting_s += _joins(sharing, lengths[at], step_s)
        lengths[at] += 1
        seconds = drafting_s + iteration_s(batch + count)
        if seconds > most_s:
            break
        if expected / seconds > best_rate:
            best_rate = rate = expected / seconds
            kept = count
    kept_rows = Counter(at for _, at in rows[:kept])
    return Plan([kept_rows[at] for at in range(len(proposals))], rate)


def _joins(sharing: list[int], step: int, step_s: Steps) -> float:
    """What a step takes longer with one more sequence in it."""
    if step == len(sharing):
        sharing.append(0)
    sharing[step] += 1
    before_s = step_s(step, sharing[step] - 1) if sharing[step] > 1 else 0.0
    return step_s(step, sharing[step]) - before_s


def drafting_gain(proposal: Proposal, count: int, batch: int, iteration_s: Rows, step_s: Steps) -> float:
    """Tokens per second with a draft model over without one, if `count` of the batch have such a proposal; 1 = none.
    A quick look, before each is weighed by itself."""
    expected, drafting_s, least_s = float(batch), 0.0, iteration_s(batch)
    best = 1.0
    for place in range(1, proposal.length + 1):
        expected += count * proposal.chance**place
        drafting_s += step_s(place - 1, count)
        best = max(best, expected / (drafting_s + iteration_s(batch + place * count)) / (batch / least_s))
    return best


def is_worth_catching_up(made: int, iteration_s: float, gain: float, catching_up_s: float) -> bool:
    """A draft model has to read a text before it can go on with it. Nobody knows how long an answer will be: as long
    again as it is already. So it is read when what drafts would have saved so far is what the reading takes, and at
    the worst the loss is as much as was saved before."""
    return made * iteration_s * (1.0 - 1.0 / gain) >= catching_up_s


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
