"""Whose turn it is where answers are smooth: models that answer take turns, and between two parts of prompts each of
them has one, so that an answer waits for one turn of each other model at most. Knows nothing of requests.

The node asks this for real and shadow validation for play.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from dovetail.policy.headroom import INFINITY
from dovetail.policy.parts import LEAST_SINGLES, part_limit_s

SMOOTH_LIMIT = 3.0  # a part between two rounds takes no less than so many times what splitting costs
WORTH_SPLITTING = 1.25  # times the limit: shorter iterations stay whole
STALL_COSTS = 0.5  # of a token's time that is stalled: a layer that was begun, and what a change of turns takes
ANSWER_SLICE = 0.8  # of a round of those who answer: so long others' answers are computed at least between two of them
ALMOST_DONE = 0.3  # of what would be let in is left of an iteration
LEAST_SLICE_S = 0.002  # shorter ones would be breaks mostly


class Rotating(Protocol):
    """A model that could have the next turn."""

    @property
    def turned_s(self) -> float: ...  # when its last turn ended

    @property
    def prompted_s(self) -> float: ...  # of its own prompts, computed since its running requests had a token

    @property
    def spoke_s(self) -> float: ...  # when they had it; INFINITY: none runs

    @property
    def latest_s(self) -> float: ...  # when they must have the next one

    @property
    def decode_s(self) -> float: ...  # what that takes


RotatingT = TypeVar("RotatingT", bound=Rotating)


def may_compute(prompter: Rotating, answering: Sequence[Rotating], parted_s: float) -> bool:
    """Whether a part of its prompt may be next, the last part of anybody's having ended then. Everyone else who answers
    has had a token since, and a turn since the prompter's last one; its own answers have half of its time."""
    for one in answering:
        if one is prompter:
            if one.prompted_s >= one.decode_s:
                return False
        elif one.spoke_s < parted_s or one.turned_s < prompter.turned_s:
            return False
    return True


def next_to_answer(answering: Sequence[RotatingT], now: float) -> RotatingT:
    """Whose turn was longest ago; before it somebody who would be late otherwise, unless it is late itself."""
    oldest = strictest = answering[0]
    strictest_s = INFINITY
    for one in answering:
        if one.turned_s < oldest.turned_s:
            oldest = one
        if now <= one.latest_s < strictest_s:
            strictest, strictest_s = one, one.latest_s
    if oldest.latest_s < now:
        return oldest
    return strictest if now + oldest.decode_s + strictest.decode_s > strictest_s else oldest


def decode_limit_s(single_s: float, others_s: Sequence[float]) -> float:
    """How long an iteration of a batch may take, which takes `single_s` for one row, beside those of others: a round
    takes twice as long as if everybody's were as short as the shortest, and those that are longer share what that
    leaves. Batches of a size do not split each other."""
    shortest_s = min(others_s)
    longer = 1 + sum(one_s > WORTH_SPLITTING * shortest_s for one_s in others_s)
    return max(len(others_s) * shortest_s / longer, LEAST_SINGLES * single_s)


def part_between_s(prompter: Rotating, answering: Sequence[Rotating], part_s: float, split: float) -> float:
    """How long a part is at most: with it a round of the others takes twice as long, and no more."""
    limit_s = part_limit_s(part_s, split)
    if not answering:
        return limit_s
    others_s = sum(one.decode_s for one in answering if one is not prompter)
    return min(limit_s, max(others_s or prompter.decode_s, SMOOTH_LIMIT * split))


def slice_between_s(round_s: float, max_stall: float, *, has_prompts: bool) -> float:
    """How long an iteration is computed between two rounds of those who answer, which take so long each and wait for so
    many of them."""
    share = max_stall - 1.0 - STALL_COSTS
    return max((share if has_prompts else max(share, ANSWER_SLICE)) * round_s, LEAST_SLICE_S)


def is_almost_done(spent_s: float, whole_s: float, decode_s: float) -> bool:
    """Whether an iteration of answers that should take `whole_s` is finished before somebody else's is let in, which
    they would wait for longer. One that should be done long ago may take any time."""
    return whole_s - ALMOST_DONE * decode_s < spent_s < WORTH_SPLITTING * whole_s


def may_stop(now: float, left_s: float, latest_s: float) -> bool:
    """Whether an iteration may let others in, so that it is over in so long, whose tokens must be there by then. Who is
    late already waits like anybody."""
    return latest_s < now or now + left_s <= latest_s
