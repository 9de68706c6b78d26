"""How much of a prompt an iteration computes: as much as fits before somebody else is due, and several prompts where
that saves time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
LEAST_SINGLES = 1.5  # a batch that is split decodes no fewer rows at a time than take so many times what one takes,
# and no more short prompts come along in an iteration than take so many times what the fewest tokens take


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


def lost_s(latency: Latency) -> float:
    """What two parts take longer than one."""
    return max(2 * latency.prefill_s(FEWEST_TOKENS) - latency.prefill_s(2 * FEWEST_TOKENS), 0.0)


def split_s(latency: Latency) -> float:
    """As much of it as the length of parts goes by: on devices where few tokens take as long as many, parts would be
    longer than answers should wait."""
    return min(lost_s(latency), latency.prefill_s(FEWEST_TOKENS) / 2)


def part_limit_s(part_s: float, split: float) -> float:
    """How long a part is if nobody is due: what splitting costs shall be a small share of it."""
    return max(part_s, SPLIT_LIMIT * split)


def stretched_s(limit_s: float, whole_s: float, lost: float) -> float:
    """The same where what is left of a prompt takes `whole_s`: all of it, if a part less costs more than others wait
    longer."""
    return whole_s if limit_s < whole_s <= limit_s + lost else limit_s


def in_parts_s(seconds: float, part_s: float, split: float, lost: float) -> float:
    """What takes so long in one piece, in parts, each of which takes `lost` longer."""
    limit_s = part_limit_s(part_s, split)
    return seconds if seconds <= limit_s else seconds * limit_s / (limit_s - lost)


def parts_of(latency: Latency, start: int, pending: int, seconds: float) -> tuple[float, float]:
    """How many parts of so long at most a prompt has left, and what one takes: the mean of the first and the last."""
    first = tokens_within(latency, start, pending, seconds)
    if first >= pending:
        return 1.0, prompt_s(latency, start, pending)
    begins = start + pending - first
    last = tokens_within(latency, begins, first, seconds)
    part_s = (prompt_s(latency, start, first) + prompt_s(latency, begins, last)) / 2
    return 2 * pending / (first + last), part_s


def begins_by_s(decodes: Sequence[tuple[float, float]]) -> float:
    """When the first of these iterations, (latest end, duration) each, has to begin so that none is late."""
    if len(decodes) == 1:
        return decodes[0][0] - decodes[0][1]
    begins_s, total_s = INFINITY, 0.0
    for latest_s, seconds in sorted(decodes):
        total_s += seconds
        begins_s = min(begins_s, latest_s - total_s)
    return begins_s


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


def tokens_together(
    latency: Latency,
    start: int,
    pending: int,
    others: Iterable[int],
    seconds: float,
    left_s: float,
    fewest: int = FEWEST_TOKENS,
) -> list[int]:
    """How many tokens of which prompts an iteration of about so long computes: of the first one as many of its pending
    tokens as fit, at least `fewest`; where it is done with them, also those of others, whole, as far as that saves
    time and the first, which is due in `left_s`, were not late by it."""
    tokens = tokens_within(latency, start, pending, seconds, fewest)
    found = [tokens]
    if tokens < pending:
        return found
    if fewest < FEWEST_TOKENS:
        seconds = min(seconds, LEAST_SINGLES * latency.prefill_s(fewest))
    seconds = together_s(seconds, latency.prefill_s(tokens), left_s)
    for more in others:
        if not saves(latency, tokens, more) or latency.prefill_s(tokens + more) > seconds:
            break
        found.append(more)
        tokens += more
    return found
