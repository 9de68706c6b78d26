"""Drafts in an iteration of one model: room for them, and what is left over when they have been verified."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several

import msgspec

from dovetail.sched.blocks import BlockPool
from dovetail.sched.sequence import Sequence
from dovetail.sched.turn import TurnRow

NO_DRAFTS: Mapping[int, Several[int]] = {}


def with_drafts(
    rows: Iterable[TurnRow], by_id: Mapping[int, Sequence], drafts: Mapping[int, Several[int]], pool: BlockPool
) -> tuple[TurnRow, ...]:
    """The rows with their drafts (by sequence), as far as answers may go and as there are blocks. All rows have theirs
    already, so that a draft takes none that somebody needs in this iteration."""
    return tuple(
        _with_draft(row, by_id[row.sequence], drafts[row.sequence], pool) if row.sequence in drafts else row
        for row in rows
    )


def _with_draft(row: TurnRow, sequence: Sequence, draft: Several[int], pool: BlockPool) -> TurnRow:
    if row.count != 1 or not row.samples or sequence.num_generated == 0 or sequence.is_held:
        return row
    most = sequence.longest - sequence.num_generated - 1  # the iteration yields a token more than it verifies
    count = max(min(len(draft), most), 0)
    missing = pool.blocks_for(row.end + count) - len(sequence.blocks)
    if missing > 0:
        blocks = pool.allocate(missing)
        if blocks is None:
            count = len(sequence.blocks) * pool.block_size - row.end
        else:
            sequence.blocks.extend(blocks)
    return msgspec.structs.replace(row, draft=tuple(draft[:count])) if count else row


def reserve(sequences: Several[Sequence], wanted: Mapping[int, int], pool: BlockPool) -> dict[int, int]:
    """Blocks for so many further tokens (by sequence) of an iteration of `sequences`, before anybody knows them, as far
    as answers may go and as there are blocks that the iteration itself does not need. Returns how many there is room
    for, by sequence; what comes to be unused is given back by `trim`."""
    missing = {one.id: max(pool.blocks_for(len(one.tokens)) - len(one.blocks), 0) for one in sequences}
    kept = sum(missing.values())
    granted: dict[int, int] = {}
    for one in sequences:
        count = min(wanted.get(one.id, 0), one.longest - one.num_generated - 1)
        more = pool.blocks_for(len(one.tokens) + count) - len(one.blocks)
        if count > 0 and more > 0:
            if more + kept - missing[one.id] <= pool.num_available:
                blocks = pool.allocate(more)
                assert blocks is not None, "they were counted"
                one.blocks.extend(blocks)
                kept -= missing[one.id]
            else:
                count = len(one.blocks) * pool.block_size - len(one.tokens)
        if count > 0:
            granted[one.id] = count
    return granted


def trim(sequence: Sequence, pool: BlockPool, further: int = 0) -> None:
    """Give back the blocks that only rejected tokens needed, but for so many further ones: what is held is what the
    node counts."""
    needed = pool.blocks_for(len(sequence.tokens) + further)
    if len(sequence.blocks) > needed:
        pool.release(sequence.blocks[needed:])
        del sequence.blocks[needed:]
