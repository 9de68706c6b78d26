"""Requests that nobody waits for, beside those that somebody does (O1, O9): they have the device while the others have
nothing to compute, ride along in iterations that hardly take longer for it, and have a small share of the time anyway.

An iteration of theirs is short, because whoever comes meanwhile waits for its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Generic, NamedTuple

from dovetail.policy.headroom import INFINITY
from dovetail.policy.iteration import Iteration, LaneT
from dovetail.policy.lane import Lane, resume, suspend
from dovetail.policy.latency import prompt_s
from dovetail.policy.parts import LEAST_SINGLES, Share, begins_by_s, last_within, tokens_within
from dovetail.policy.rows import PACED_SHARE, latest_s
from dovetail.policy.turn_rule import TurnRule


def seat_beside(lanes: Sequence[Lane], rule: TurnRule) -> None:
    """Before an iteration of somebody who is waited for: who of the others rides along. Nobody, while a prompt waits,
    for everybody's first token is later by what they take."""
    answering = [one for one in lanes if one.answers]
    may_ride = not any(one.waiting for one in lanes)
    pace_s = min((one.tpot_s for one in answering), default=INFINITY)
    round_s = sum(one.batch_s() for one in answering)
    for one in lanes:
        if one.riding or one.suspended:
            most = _most_beside(one, round_s, pace_s, rule.ride) if may_ride and one.answers else 0
            _seat(one, most)


def is_harmless(lanes: Sequence[Lane], seconds: float, now: float, silence_s: float) -> bool:
    """Whether nobody notices if the device does something else for so long: no prompt waits, every next token is in
    time, and none comes later after the one before than its pace. Answers that are ahead of their pace are not held
    back to it: what they have gained is theirs, and an answer may be shorter than its pace was spread over."""
    if any(one.waiting for one in lanes):
        return False
    decodes = [(min(latest_s(one, silence_s), one.spoke_s + one.tpot_s), one.batch_s()) for one in lanes if one.answers]
    return now + seconds <= begins_by_s(decodes)


class Spare(NamedTuple, Generic[LaneT]):
    """An iteration for best effort that may be."""

    lane: LaneT
    share: Share | None  # of its first prompt; None: a decode
    riding: int  # how many take part in that
    seconds: float

    def begin(self) -> Iteration[LaneT]:
        if self.share is not None:
            return Iteration(self.lane, (self.share,), decodes=False)
        _seat(self.lane, self.riding)
        return Iteration(self.lane)


def spare_of(lanes: Sequence[LaneT], rule: TurnRule) -> Spare[LaneT] | None:
    """Of the lane whose turn was longest ago; prompts and answers take turns."""
    found = [one for one in lanes if one.patient or one.suspended or one.riding]
    if not found:
        return None
    lane = min(found, key=lambda one: (one.spared_s, one.id))
    if lane.patient and not (lane.has_spared_prompt and (lane.suspended or lane.riding)):
        share = _part_of(lane, rule)
        seconds = prompt_s(lane.hosting.latency, share.start, share.tokens) * lane.overestimate
        return Spare(lane, share, 0, seconds)
    limit_s = _decode_s(lane, 0) + rule.best_effort_s if lane.answers else LEAST_SINGLES * _decode_s(lane, 1)
    riding = max(_most_within(lane, max(limit_s, rule.best_effort_s)), 1)
    return Spare(lane, None, riding, _decode_s(lane, riding))


def _part_of(lane: Lane, rule: TurnRule) -> Share:
    work = lane.patient[0]
    if rule.part_s == INFINITY:
        return Share(work, work.start, work.uncomputed_tokens)
    seconds = rule.best_effort_s / lane.overestimate
    return Share(work, work.start, tokens_within(lane.hosting.latency, work.start, work.uncomputed_tokens, seconds))


def _most_beside(lane: Lane, round_s: float, pace_s: float, ride: float) -> int:
    """How many may take part in the next decode of the lane's others, in a round of everybody's that takes so long."""
    alone_s = _decode_s(lane, 0)
    within_pace_s = PACED_SHARE * pace_s - (round_s - lane.batch_s())
    return min(_most_within(lane, min((1.0 + ride) * alone_s, within_pace_s)), lane.riding + lane.spare_blocks())


def _most_within(lane: Lane, seconds: float) -> int:
    """With how many of best effort a decode takes so long at most."""
    all_of_them = lane.riding + len(lane.suspended)
    return last_within(0, all_of_them + 1, lambda more: _decode_s(lane, more) <= seconds)


def _decode_s(lane: Lane, more: int) -> float:
    """One decode of those who are waited for, with so many of the others."""
    rows, tokens = len(lane.running) - lane.riding + more, lane.tokens - lane.riding_tokens
    if more:
        tokens += more * lane.best_effort_tokens // (lane.riding + len(lane.suspended))
    return lane.hosting.latency.decode_s(rows, tokens) * lane.overestimate if rows else 0.0


def _seat(lane: Lane, most: int) -> None:
    """So many of its best effort run, those first who do already."""
    if lane.riding > most:
        riding = [work for work in lane.running.values() if work.is_best_effort]
        suspend(lane, riding[most:])
    elif lane.riding < most and lane.suspended:
        resume(lane, list(islice(lane.suspended.values(), most - lane.riding)))
