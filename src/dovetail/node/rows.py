"""Which requests of a batch an iteration decodes: all of them, or as many as others may wait for, answers of other
models or those that are on their way here. A turn of some rows takes no longer than one of all, so that whatever was
promised by playing whole batches is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dovetail.node.events import Turn
from dovetail.node.instance import Instance
from dovetail.policy.headroom import INFINITY
from dovetail.policy.rounds import LEAST_SINGLES, WORTH_SPLITTING, decode_limit_s
from dovetail.policy.work import Work

AWAITED_SHARE = 0.25  # of an iteration is what an answer that is on its way here may wait for
PACED_SHARE = 0.6  # of a pace that was asked for: within that everybody of a batch that is split has a token


def batch_s(instance: Instance) -> float:
    """One iteration of those who run."""
    return instance.hosting.latency.decode_s(len(instance.running), instance.tokens) * instance.overestimate


def latest_s(instance: Instance, silence_s: float, *, is_promised: bool = False) -> float:
    """When its running requests must have their next token. Where a batch is split, or what was promised is asked for,
    only those who asked for a pace must: the others wait for their turn."""
    if not (instance.is_split or is_promised):
        return min(instance.running_due_s, instance.spoke_s + silence_s)
    return _strict_latest_s(instance, instance.running, silence_s)


def promised_s(turn: Turn, silence_s: float) -> float:
    """When those whose tokens an iteration gives must have them, of whoever asked for a pace."""
    return _strict_latest_s(turn.instance, turn.decoding, silence_s)


def _strict_latest_s(instance: Instance, ids: Collection[int], silence_s: float) -> float:
    works = [work for id in ids if (work := instance.running[id]).is_strict]
    return min([_row_latest_s(instance, work, silence_s) for work in works], default=INFINITY)


def split_rows(instance: Instance, others_s: Sequence[float], now: float, silence_s: float) -> tuple[int, ...] | None:
    """Those of its running requests that decode beside others, whose iterations take so long; None = all of them."""
    if len(instance.running) < 2 or not others_s:
        return None
    return _rows_of(instance, decode_limit_s(_rows_s(instance, 1), others_s), sum(others_s), now, silence_s)


def awaiting_rows(instance: Instance, now: float, silence_s: float) -> tuple[int, ...] | None:
    """Those that decode while an answer is on its way here; None = all of them, because fewer take as long."""
    return _rows_of(instance, _awaited_s(instance), 0.0, now, silence_s) if is_worth_splitting(instance) else None


def is_worth_splitting(instance: Instance) -> bool:
    """A part of its running batch takes much less than all of it: what is on its way here need not wait for that."""
    return len(instance.running) > 1 and batch_s(instance) > WORTH_SPLITTING * _awaited_s(instance)


def _awaited_s(instance: Instance) -> float:
    return max(AWAITED_SHARE * batch_s(instance), LEAST_SINGLES * _rows_s(instance, 1))


def _rows_of(
    instance: Instance, limit_s: float, round_s: float, now: float, silence_s: float
) -> tuple[int, ...] | None:
    """As many as take so long, where a round of the others takes `round_s`."""
    batch, whole_s = len(instance.running), batch_s(instance)
    if whole_s <= WORTH_SPLITTING * limit_s:
        return None
    rows = -(-batch // -(-batch // _rows_within(instance, limit_s)))  # as many each time
    # Who is left out has its next turn after this one, a round of the others with a part of a prompt, and one of all.
    promised_s = now + limit_s + 3 * round_s + whole_s
    works = sorted(instance.running.values(), key=lambda work: (work.last_token_s or 0.0, work.id))
    strict = [work for work in works if work.is_strict]
    chosen = strict[: _rows_for_pace(instance, strict, round_s)]
    chosen += [one for one in strict[len(chosen) :] if _row_latest_s(instance, one, silence_s) < promised_s]
    left = set(works).difference(chosen)
    chosen += [work for work in works if work in left][: max(rows - len(chosen), 1)]
    return tuple([work.id for work in chosen]) if len(chosen) < batch else None


def _rows_for_pace(instance: Instance, strict: Sequence[Work], others_s: float) -> int:
    """How many of those who asked for a pace take part each time, so that all have had a token well before the first of
    them is due again: else they would all be due at once."""
    if not strict:
        return 0
    well_s = PACED_SHARE * min(work.tpot_s for work in strict)
    exceeds, fits = 0, len(strict)
    while fits - exceeds > 1:
        middle = (fits + exceeds) // 2
        if len(strict) / middle * (_rows_s(instance, middle) + others_s) <= well_s:
            fits = middle
        else:
            exceeds = middle
    return fits


def _row_latest_s(instance: Instance, work: Work, silence_s: float) -> float:
    return min(instance.due_s(work), (work.last_token_s or 0.0) + silence_s)


def _rows_s(instance: Instance, rows: int) -> float:
    mean = instance.tokens // len(instance.running)
    return instance.hosting.latency.decode_s(rows, rows * mean) * instance.overestimate


def _rows_within(instance: Instance, limit_s: float) -> int:
    fits, exceeds = 1, len(instance.running)
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        if _rows_s(instance, middle) <= limit_s:
            fits = middle
        else:
            exceeds = middle
    return fits
