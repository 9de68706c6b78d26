"""What an iteration of mixed rows needs on the device: one copy of integers, cut into tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dovetail.engine.devices.cuda.attention import DecodeScratch, PrefillPlan, decode, prefill, prefill_tile
from dovetail.engine.devices.cuda.splits import AttentionShape, SplitPlans
from dovetail.engine.devices.cuda.transfer import to_device
from dovetail.engine.devices.cuda.whole_prompts import attend_whole
from dovetail.engine.sampler import is_shaped
from dovetail.sched.turn import Turn, TurnRow


@dataclass(frozen=True)
class MixedBatch:
    """Rows with one token come first, then chunks."""

    rows: list[TurnRow]  # in the order of their tokens
    tokens: Tensor  # [tokens] int32
    positions: Tensor  # [tokens] int32
    slots: Tensor  # [tokens] int32: block · page + offset
    num_single: int  # leading rows with one token
    lengths: Tensor  # [single] int32
    table: Tensor  # [rows, blocks] int32
    plan: PrefillPlan | None
    whole_prompt: bool  # the only row is a prompt from its first token on
    sampled: list[TurnRow]
    sampled_at: Tensor  # [sampled] int32


def build(turn: Turn, page: int, head_dim: int, device: torch.device) -> MixedBatch:
    rows = sorted(turn.rows, key=lambda row: row.count > 1)
    num_single = sum(row.count == 1 for row in rows)
    chunks = rows[num_single:]
    ends = np.cumsum([row.count for row in rows])
    width = max(-(-row.end // page) for row in rows)
    table = np.zeros((len(rows), width), np.int32)
    for at, row in enumerate(rows):
        assert 0 < row.count <= len(row.tokens) - row.start, "a row computes known tokens only"
        used = -(-row.end // page)
        assert len(row.blocks) >= used, "the block table covers the row"
        table[at, :used] = row.blocks[:used]
    positions = np.concatenate([np.arange(row.start, row.end, dtype=np.int32) for row in rows])
    owner = np.repeat(np.arange(len(rows)), [row.count for row in rows])
    tile = prefill_tile(head_dim)
    tiles = [(at, first) for at, row in enumerate(chunks) for first in range(0, row.count, tile)]
    fields = {
        "tokens": np.concatenate([np.asarray(row.tokens[row.start : row.end], np.int32) for row in rows]),
        "positions": positions,
        "slots": table[owner, positions // page] * page + positions % page,
        "lengths": np.array([row.end for row in rows[:num_single]], np.int32),
        "table": table.reshape(-1),
        "tile_rows": np.array([at for at, _ in tiles], np.int32),
        "tile_first": np.array([first for _, first in tiles], np.int32),
        "sequences": np.array(
            [(end - row.count, row.start, row.count) for row, end in zip(chunks, ends[num_single:], strict=True)],
            np.int32,
        ).reshape(-1),
        "sampled": np.array([end - 1 for row, end in zip(rows, ends, strict=True) if row.samples], np.int32),
    }
    on = _to_device(fields, device)
    blocks = on["table"].view(len(rows), width)
    plan = PrefillPlan(on["tile_rows"], on["tile_first"], on["sequences"].view(-1, 3), blocks[num_single:])
    return MixedBatch(
        rows=rows,
        tokens=on["tokens"],
        positions=on["positions"],
        slots=on["slots"],
        num_single=num_single,
        lengths=on["lengths"],
        table=blocks,
        plan=plan if chunks else None,
        whole_prompt=len(rows) == 1 and rows[0].start == 0 and bool(chunks),
        sampled=[row for row in rows if row.samples],
        sampled_at=on["sampled"],
    )


class MixedAttention:
    """Attention of one mixed batch, for every layer of it."""

    def __init__(
        self, shapes: Sequence[AttentionShape], scratch: DecodeScratch, num_processors: int, batch: MixedBatch
    ) -> None:
        self._batch = batch
        self._scratch = scratch
        self._plans = SplitPlans(batch.lengths, shapes if batch.num_single else (), num_processors)

    def __call__(self, qkv: Tensor, cache: Tensor, shape: AttentionShape) -> Tensor:
        batch = self._batch
        if batch.whole_prompt and shape.softcap is None and shape.window == 0:
            attended = attend_whole(qkv, shape)
            if attended is not None:
                return attended
        size = shape.num_heads * shape.head_dim
        out = torch.empty(len(qkv), size, dtype=qkv.dtype, device=qkv.device)
        single = batch.num_single
        if single:
            plan, scratch = self._plans.of(shape), self._scratch
            decode(qkv[:single, :size], cache, batch.table, batch.lengths, shape, plan, scratch, out[:single])
        if batch.plan is not None:
            prefill(qkv[:, :size], cache, batch.plan, shape, out)
        return out


def _to_device(fields: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """One copy for all of them. Each begins at a multiple of 16 bytes: kernels are compiled for aligned pointers."""
    starts, total = {}, 0
    for name, values in fields.items():
        starts[name] = total
        total += -(-len(values) // 4) * 4
    host = torch.empty(total, dtype=torch.int32, pin_memory=device.type == "cuda")
    view = host.numpy()
    for name, values in fields.items():
        view[starts[name] : starts[name] + len(values)] = values
    copied = to_device(host, device)
    return {name: copied[start : start + len(fields[name])] for name, start in starts.items()}


def only_greedy(rows: Sequence[TurnRow]) -> bool:
    """The largest logits are all that is asked for."""
    return all(row.sampling.is_greedy and row.sampling.logprobs is None and not is_shaped(row) for row in rows)


def _stays_greedy(row: TurnRow) -> bool:
    """The same of all tokens that this sequence will have, whatever they are."""
    sampling = row.sampling
    changes = sampling.thinking is not None or (sampling.min_tokens > 0 and bool(sampling.stop_token_ids))
    return sampling.is_greedy and sampling.logprobs is None and not changes and not is_shaped(row)


class GreedyRows:
    """Which sequences are greedy for as long as they last."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}

    def has_all(self, rows: Sequence[TurnRow]) -> bool:
        known = self._known
        for row in rows:
            greedy = known.get(row.sequence)
            if greedy is None:
                greedy = known[row.sequence] = _stays_greedy(row)
            if not greedy:
                return False
        return True

    def forget(self, sequence: int) -> None:
        self._known.pop(sequence, None)
