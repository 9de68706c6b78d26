"""Which requests of a batch an iteration decodes: all of them, or as many as other models' answers may wait for. A
turn of some rows takes no longer than one of all, so that whatever was promised by playing whole batches is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.node.instance import Instance
from dovetail.node.work import Work
from dovetail.policy.headroom import INFINITY
from dovetail.policy.rounds import WORTH_SPLITTING, decode_limit_s

PROMISED_ROUNDS = 2  # of whole batches: whoever is due before so many are over, and asked for it, is not left out


def batch_s(instance: Instance) -> float:
    """One iteration of those who run."""
    return instance.hosting.latency.decode_s(len(instance.running), instance.tokens) * instance.overestimate


def latest_s(instance: Instance, silence_s: float) -> float:
    """When its running requests must have their next token. Where a batch is split, only those who asked for a pace
    must: the others wait for their turn."""
    if not instance.is_split:
        return min(instance.running_due_s, instance.spoke_s + silence_s)
    strict = [_row_latest_s(instance, work, silence_s) for work in instance.running.values() if work.is_strict]
    return min(strict, default=INFINITY)


def split_rows(instance: Instance, others_s: Sequence[float], now: float, silence_s: float) -> tuple[int, ...] | None:
    """Those of its running requests that decode beside others, whose iterations take so long; None = all of them."""
    batch, whole_s = len(instance.running), batch_s(instance)
    if batch < 2 or not others_s:
        return None
    limit_s = decode_limit_s(_rows_s(instance, 1), others_s)
    if whole_s <= WORTH_SPLITTING * limit_s:
        return None
    rows = -(-batch // -(-batch // _rows_within(instance, limit_s)))  # as many each time
    promised_s = now + PROMISED_ROUNDS * (whole_s + sum(others_s))
    return _longest_silent(instance, rows, promised_s, silence_s)


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


def _longest_silent(instance: Instance, rows: int, promised_s: float, silence_s: float) -> tuple[int, ...] | None:
    """So many, whose last tokens are longest ago, and everybody else who must have one before then."""
    works = sorted(instance.running.values(), key=lambda work: (work.last_token_s or 0.0, work.id))
    chosen = works[:rows]
    for work in works[rows:]:
        if work.is_strict and _row_latest_s(instance, work, silence_s) < promised_s:
            chosen.append(work)
    return tuple([work.id for work in chosen]) if len(chosen) < len(works) else None
