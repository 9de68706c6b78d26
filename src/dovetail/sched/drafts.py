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


def trim(sequence: Sequence, pool: BlockPool) -> None:
    """Give back the blocks that only rejected tokens needed: what is held is what the node counts."""
    needed = pool.blocks_for(len(sequence.tokens))
    if len(sequence.blocks) > needed:
        pool.release(sequence.blocks[needed:])
        del sequence.blocks[needed:]
