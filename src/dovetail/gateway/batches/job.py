"""The life of a batch: validating → in_progress → finalizing → completed, or failed, expired, cancelled.

Functions of a record and the time. Once lines may have run every end goes through files that are closed: what was
answered is kept, and what was not gets a line that says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from dovetail.errors import Conflict
from dovetail.gateway.batches.records import Batch, BatchUsage, Counts, LineProblem

MAX_ENDED = 2000  # batches of one key that are kept: they are in memory, with what was wrong with their files


def out_of_date(batches: Iterable[Batch], now: float, keep_s: float) -> list[Batch]:
    """Those that ended long ago, and of each key those before its last ones. In the order in which they were made."""
    ended = [batch for batch in batches if batch.ended_s is not None]
    surplus = Counter(batch.owner for batch in ended)
    found = []
    for batch in ended:
        assert batch.ended_s is not None
        if surplus[batch.owner] > MAX_ENDED or now >= batch.ended_s + keep_s:
            found.append(batch)
            surplus[batch.owner] -= 1
    return found


def begin(batch: Batch, total: int, models: Sequence[str | None], now: int) -> Batch:
    """Its lines are sound."""
    assert batch.status == "validating"
    counts = Counts(total=total)
    return msgspec.structs.replace(batch, status="in_progress", began_s=now, counts=counts, models=tuple(models))


def fail(batch: Batch, problems: Sequence[LineProblem], now: int) -> Batch:
    """None of its lines has run."""
    assert batch.status == "validating"
    return msgspec.structs.replace(batch, status="failed", problems=tuple(problems), ended_s=now)


def cancel(batch: Batch, now: int) -> Batch:
    """The same again changes nothing. Raises Conflict for one that is over."""
    if batch.status == "cancelling":
        return batch
    if batch.is_over or batch.status == "finalizing":
        raise Conflict(
            f"the batch '{batch.id}' is {batch.status}: there is nothing to cancel", code="batch_not_cancellable"
        )
    return msgspec.structs.replace(batch, status="cancelling", ends_as="cancelled", cancelling_s=now)


def is_late(batch: Batch, now: float) -> bool:
    return batch.status in ("validating", "in_progress") and now >= batch.expires_s


def expire(batch: Batch, now: int) -> Batch:
    assert is_late(batch, now)
    return msgspec.structs.replace(batch, status="finalizing", ends_as="expired", finalizing_s=now)


def finalize(batch: Batch, now: int) -> Batch:
    """All lines are answered."""
    assert batch.status == "in_progress"
    return msgspec.structs.replace(batch, status="finalizing", finalizing_s=now)


def finish(batch: Batch, counts: Counts, usage: BatchUsage, now: int) -> Batch:
    """Its files are closed: each line is in one of them, once."""
    assert batch.status in ("finalizing", "cancelling")
    assert counts.ended == counts.total
    return msgspec.structs.replace(batch, status=batch.ends_as, counts=counts, usage=usage, ended_s=now)
