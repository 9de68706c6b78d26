"""Which requests of a batch an iteration decodes: all of them, or as many as others may wait for, answers of other
models or those that are on their way here. A turn of some rows takes no longer than one of all, so that whatever was
promised by playing whole batches is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dovetail.policy.headroom import INFINITY
from dovetail.policy.iteration import Iteration, LaneT
from dovetail.policy.lane import Lane
from dovetail.policy.parts import LEAST_SINGLES, last_within
from dovetail.policy.rounds import WORTH_SPLITTING, decode_limit_s
from dovetail.policy.work import Work

AWAITED_SHARE = 0.25  # of an iteration is what an answer that is on its way here may wait for
PACED_SHARE = 0.6  # of a pace that was asked for: within that everybody of a batch that is split has a token


def latest_s(lane: Lane, silence_s: float, *, is_promised: bool = False) -> float:
    """When its running requests must have their next token. Where a batch is split, or what was promised is asked for,
    only those who asked for a pace must: the others wait for their turn."""
    if not (lane.is_split or is_promised):
        return min(lane.running_due_s, lane.spoke_s + silence_s)
    return _strict_latest_s(lane, lane.running, silence_s)


def promised_s(turn: Iteration[LaneT], silence_s: float) -> float:
    """When those whose tokens an iteration gives must have them, of whoever asked for a pace."""
    return _strict_latest_s(turn.instance, turn.decoding, silence_s)


def _strict_latest_s(lane: Lane, ids: Collection[int], silence_s: float) -> float:
    works = [work for id in ids if (work := lane.running[id]).is_strict]
    return min([_row_latest_s(lane, work, silence_s) for work in works], default=INFINITY)


def split_rows(lane: Lane, others_s: Sequence[float], now: float, silence_s: float) -> tuple[int, ...] | None:
    """Those of its running requests that decode beside others, whose iterations take so long; None = all of them."""
    if len(lane.running) < 2 or not others_s:
        return None
    return _rows_of(lane, decode_limit_s(_rows_s(lane, 1), others_s), sum(others_s), now, silence_s)


def awaiting_rows(lane: Lane, now: float, silence_s: float) -> tuple[int, ...] | None:
    """Those that decode while an answer is on its way here; None = all of them, because fewer take as long."""
    return _rows_of(lane, _awaited_s(lane), 0.0, now, silence_s) if is_worth_splitting(lane) else None


def is_worth_splitting(lane: Lane) -> bool:
    """A part of its running batch takes much less than all of it: what is on its way here need not wait for that."""
    return len(lane.running) > 1 and lane.batch_s() > WORTH_SPLITTING * _awaited_s(lane)


def _awaited_s(lane: Lane) -> float:
    return max(AWAITED_SHARE * lane.batch_s(), LEAST_SINGLES * _rows_s(lane, 1))


def _rows_of(lane: Lane, limit_s: float, round_s: float, now: float, silence_s: float) -> tuple[int, ...] | None:
    """As many as take so long, where a round of the others takes `round_s`."""
    batch, whole_s = len(lane.running), lane.batch_s()
    if whole_s <= WORTH_SPLITTING * limit_s:
        return None
    rows = -(-batch // -(-batch // _rows_within(lane, limit_s)))  # as many each time
    # Who is left out has its next turn after this one, a round of the others with a part of a prompt, and one of all.
    promised_s = now + limit_s + 3 * round_s + whole_s
    works = sorted(lane.running.values(), key=lambda work: (work.last_token_s or 0.0, work.id))
    strict = [work for work in works if work.is_strict]
    chosen = strict[: _rows_for_pace(lane, strict, round_s)]
    chosen += [one for one in strict[len(chosen) :] if _row_latest_s(lane, one, silence_s) < promised_s]
    left = set(works).difference(chosen)
    chosen += [work for work in works if work in left][: max(rows - len(chosen), 1)]
    return tuple([work.id for work in chosen]) if len(chosen) < batch else None


def _rows_for_pace(lane: Lane, strict: Sequence[Work], others_s: float) -> int:
    """How many of those who asked for a pace take part each time, so that all have had a token well before the first of
    them is due again: else they would all be due at once."""
    if not strict:
        return 0
    well_s = PACED_SHARE * min(work.tpot_s for work in strict)
    return last_within(len(strict), 0, lambda rows: len(strict) / rows * (_rows_s(lane, rows) + others_s) <= well_s)


def _row_latest_s(lane: Lane, work: Work, silence_s: float) -> float:
    return min(lane.due_s(work), (work.last_token_s or 0.0) + silence_s)


def _rows_s(lane: Lane, rows: int) -> float:
    mean = lane.tokens // len(lane.running)
    return lane.hosting.latency.decode_s(rows, rows * mean) * lane.overestimate


def _rows_within(lane: Lane, limit_s: float) -> int:
    return last_within(1, len(lane.running), lambda rows: _rows_s(lane, rows) <= limit_s)
