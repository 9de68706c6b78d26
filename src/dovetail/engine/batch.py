"""One turn as tensors: what each token is, where its key and value go, and which keys each query may see.

Built once per iteration and shared by all layers. Rows are ordered so that sequences with a like amount of context lie
together: they form a group whose attention is one call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from dovetail.sched.turn import Turn, TurnRow


@dataclass
class AttentionGroup:
    """Sequences with equally many queries, at tokens[first : first + num_sequences·num_queries] of the batch."""

    first: int
    num_sequences: int
    num_queries: int
    blocks: torch.Tensor  # [sequences · width] block numbers, short tables padded with their first block
    lengths: list[int]  # keys of each sequence, the new ones included
    width: int  # blocks per sequence
    block_size: int
    _masks: dict[int, torch.Tensor | None] = field(default_factory=dict)

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.first + self.num_sequences * self.num_queries)

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    def mask(self, window: int) -> torch.Tensor | None:
        """[sequences, 1, queries, keys], True where a query sees a key; None if each sees all of max_length."""
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int) -> torch.Tensor | None:
        longest = self.max_length
        uniform = self.num_queries == 1 and min(self.lengths) == longest
        if uniform and (window == 0 or longest <= window):
            return None
        ends = torch.tensor(self.lengths)[:, None]  # [sequences, 1]
        positions = ends - self.num_queries + torch.arange(self.num_queries)  # [sequences, queries]
        distance = positions[:, None, :, None] - torch.arange(longest)  # [sequences, 1, queries, keys]
        seen = distance >= 0
        return seen & (distance < window) if window else seen


@dataclass
class Batch:
    rows: list[TurnRow]  # in the order of the tensors
    tokens: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    slot_blocks: torch.Tensor  # [tokens] block of each token's key and value
    slot_offsets: torch.Tensor  # [tokens] place within the block
    groups: list[AttentionGroup]
    sampled: list[TurnRow]  # rows that yield a token
    sampled_at: torch.Tensor  # [sampled] index of their last token


def build_batch(turn: Turn, block_size: int) -> Batch:
    rows = sorted(turn.rows, key=lambda row: (row.count, _bucket(row, block_size)))
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last: list[int] = []
    for row in rows:
        assert 0 < row.count <= len(row.tokens) - row.start, "a row computes known tokens only"
        assert len(row.blocks) * block_size >= row.end, "the block table covers the row"
        tokens.extend(row.tokens[row.start : row.end])
        positions.extend(range(row.start, row.end))
        slots.extend(row.blocks[p // block_size] for p in range(row.start, row.end))
        last.append(len(tokens) - 1)
    position = torch.tensor(positions)
    return Batch(
        rows=rows,
        tokens=torch.tensor(tokens),
        positions=position,
        slot_blocks=torch.tensor(slots),
        slot_offsets=position % block_size,
        groups=list(_groups(rows, block_size)),
        sampled=[row for row in rows if row.samples],
        sampled_at=torch.tensor([at for row, at in zip(rows, last, strict=True) if row.samples], dtype=torch.int64),
    )


def _bucket(row: TurnRow, block_size: int) -> int:
    """Blocks of context to the next power of two: padding within a group at most doubles the work."""
    return (-(-row.end // block_size) - 1).bit_length()


def _groups(rows: list[TurnRow], block_size: int) -> Iterable[AttentionGroup]:
    first = start = 0
    while start < len(rows):
        key = (rows[start].count, _bucket(rows[start], block_size))
        end = start
        while end < len(rows) and (rows[end].count, _bucket(rows[end], block_size)) == key:
            end += 1
        group = _group(rows[start:end], first, block_size)
        yield group
        first += group.num_sequences * group.num_queries
        start = end


def _group(rows: list[TurnRow], first: int, block_size: int) -> AttentionGroup:
    width = max(-(-row.end // block_size) for row in rows)
    blocks: list[int] = []
    for row in rows:
        table = row.blocks[:width]
        blocks.extend(table)
        blocks.extend([table[0]] * (width - len(table)))
    return AttentionGroup(
        first=first,
        num_sequences=len(rows),
        num_queries=rows[0].count,
        blocks=torch.tensor(blocks),
        lengths=[row.end for row in rows],
        width=width,
        block_size=block_size,
    )
