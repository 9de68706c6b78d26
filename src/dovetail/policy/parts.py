"""How much of a prompt an iteration computes: as much as fits before somebody else is due, and several prompts where
that saves time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dovetail.policy.headroom import INFINITY
from dovetail.policy.latency import Latency, prompt_s
from dovetail.policy.work import Work

FEWEST_TOKENS = 16  # of a part: fewer would cost nearly as much
SMOOTH_TOKENS = 4  # of a part that answers of other models wait for, where no prompt was promised anything
PACKED_SHARE = 0.9  # of the time that two prompts take one by one: they share an iteration if it takes no longer
UNHURRIED = 3.0  # times what is left of a prompt: it is due no sooner
SPLIT_LIMIT = 8.0  # parts take no less than so many times what splitting costs
MOST_PROMPTS = 32  # in one iteration


class Share(NamedTuple):
    """A part of one prompt, or all of it."""

    work: Work
    start: int  # its tokens before are computed
    tokens: int  # that are computed in it

    @property
    def is_last(self) -> bool:
        """With them the prompt is computed."""
        return self.start + self.tokens >= self.work.known_tokens


def last_within(fits: int, exceeds: int, is_within: Callable[[int], bool]) -> int:
    """Of the numbers from one that fits towards one that does not, on either side of it, the last that fits."""
    while abs(exceeds - fits) > 1:
        middle = (fits + exceeds) // 2
        if is_within(middle):
            fits = middle
        else:
            exceeds = middle
    return fits


def tokens_within(latency: Latency, start: int, pending: int, seconds: float, fewest: int = FEWEST_TOKENS) -> int:
    """How many of the pending tokens of a prompt can be computed in so long, those before `start` being there: a
    multiple of `fewest`, and no fewer than what those cost."""
    if pending <= fewest or prompt_s(latency, start, pending) <= seconds:
        return pending
    seconds = max(seconds, prompt_s(latency, start, fewest))
    parts = last_within(1, -(-pending // fewest), lambda many: prompt_s(latency, start, many * fewest) <= seconds)
    tokens = parts * fewest
    if pending - tokens >= FEWEST_TOKENS or fewest < FEWEST_TOKENS:
        return tokens
    return tokens - fewest if tokens > fewest else pending  # no crumbs, unless others wait


def least_s(latency: Latency, start: int, pending: int) -> float:
    """What the smallest part of a prompt takes."""
    return prompt_s(latency, start, min(FEWEST_TOKENS, pending))


def split_s(latency: Latency) -> float:
    """What two parts take longer than one."""
    least = latency.prefill_s(FEWEST_TOKENS)
    return max(min(2 * least - latency.prefill_s(2 * FEWEST_TOKENS), least / 2), 0.0)


def part_limit_s(part_s: float, split: float) -> float:
    """How long a part is if nobody is due: what splitting costs shall be a small share of it."""
    return max(part_s, SPLIT_LIMIT * split)


def in_steps_s(seconds: float, least: float, split: float) -> float:
    """What a part takes that is given so long: as many steps as fit, the smallest part being one."""
    step_s = least - split
    if seconds <= least or step_s <= 0.0:
        return max(seconds, least)
    return split + int((seconds - split) / step_s) * step_s


def in_parts_s(seconds: float, part_s: float, split: float) -> float:
    """What takes so long in one piece, in parts."""
    limit_s = part_limit_s(part_s, split)
    return seconds if seconds <= limit_s or not split else seconds * limit_s / (limit_s - split)


def begins_by_s(decodes: Sequence[tuple[float, float]]) -> float:
    """When the first of these iterations, (latest end, duration) each, has to begin so that none is late."""
    if len(decodes) == 1:
        return decodes[0][0] - decodes[0][1]
    begins_s, total_s = INFINITY, 0.0
    for latest_s, seconds in sorted(decodes):
        total_s += seconds
        begins_s = min(begins_s, latest_s - total_s)
    return begins_s


def are_behind(answers: Sequence[tuple[float, float]], steps: int, step_s: float) -> bool:
    """Whether so many steps, with a token in each, make somebody late of those whose next one is due in so long, the
    others at that pace: whoever is ahead may lose what it has gained."""
    return any(step_s > tpot_s and left_s < step_s + (steps - 1) * (step_s - tpot_s) for left_s, tpot_s in answers)


def is_unhurried(now: float, left_s: float, due_s: float) -> bool:
    """Whether a prompt with so much left has time to share the device with answers that are not due yet."""
    return now + UNHURRIED * left_s < due_s


def together_s(limit_s: float, alone_s: float, left_s: float) -> float:
    """How long an iteration may take in which others come along with a prompt that takes so long alone and is due in
    `left_s`. One that is late anyway does not count."""
    return min(limit_s, left_s) if alone_s <= left_s else limit_s


def saves(latency: Latency, tokens: int, more: int) -> bool:
    """Whether so many more tokens of another prompt had better be in the same iteration."""
    return latency.prefill_s(tokens + more) <= PACKED_SHARE * (latency.prefill_s(tokens) + latency.prefill_s(more))


def saves_s(seconds: float, more_s: float, split: float) -> bool:
    """The same of what takes so long by itself, where an iteration of both costs less by what splitting costs."""
    return split >= (1.0 - PACKED_SHARE) * (seconds + more_s)
