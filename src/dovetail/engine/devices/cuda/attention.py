"""Attention over the paged KV cache of one layer, in Triton: single queries (decode) with long contexts split over the
device as planned (`splits`), and chunks of prompts with or without context. Sliding windows, soft caps and any ratio of
query to key heads.

A cache is [blocks, 2, page, kv_heads, d]; the blocks of a sequence are named by its row of a block table. Sums are kept
in float32; weights are rounded to the cache's type for the product with the values, as in the usual flash kernels.
"""

# mypy: ignore-errors

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.engine.devices.cuda.launch import OVERLAP, launch_next, wait_for_previous
from dovetail.engine.devices.cuda.splits import AttentionShape, SplitPlan, num_extra

DECODE_WARPS, DECODE_STAGES = 4, 3  # of the kernel for single queries
MERGED_TOGETHER = 64  # items whose sums are added at the same time


@triton.jit
def _cap(scores, softcap):
    """softcap · tanh(scores / softcap), by the exponential that the hardware has."""
    return softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)


# The same kernels for every length: neither the width of a table of blocks nor where one begins makes another.
@triton.jit(
    do_not_specialize=["window", "num_heads", "table_stride"],
    do_not_specialize_on_alignment=["table", "lengths"],
)
def _decode_kernel(
    q, cache, table, lengths, items, partial, stats, out, scale, softcap,
    q_stride, block_stride, value_offset, token_stride, table_stride, out_stride, window, num_heads,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    launch_next(OVERLAP)
    kv_head = tl.program_id(1)
    if SPLIT:  # plans and lengths are there since before the first layer
        item = tl.program_id(0)
        row = tl.load(items + 4 * item).to(tl.int64)
        begin = tl.load(items + 4 * item + 1)
        end = tl.load(items + 4 * item + 2)
        parts = tl.load(items + 4 * item + 3)
    else:
        row = tl.program_id(0).to(tl.int64)
        end = tl.load(lengths + row)
        begin = tl.where(window > 0, tl.maximum(end - window, 0), 0)
        parts = tl.full((), 1, tl.int32)
    queries = tl.arange(0, BLOCK_G)
    columns = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + queries
    inside = (queries < GROUP)[:, None] & (columns < HEAD_DIM)[None, :] & (parts > 0)
    wait_for_previous(OVERLAP)
    query = tl.load(q + row * q_stride + heads[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
    largest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    sums = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        valid = keys < end
        block = tl.load(table + row * table_stride + keys // PAGE, mask=valid, other=0).to(tl.int64)
        at = cache + block * block_stride + (keys % PAGE) * token_stride + kv_head * HEAD_DIM
        taken = valid[:, None] & (columns < HEAD_DIM)[None, :]
        key = tl.load(at[:, None] + columns[None, :], mask=taken, other=0.0)
        value = tl.load(at[:, None] + value_offset + columns[None, :], mask=taken, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if SOFTCAP:
            scores = _cap(scores, softcap)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        above = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp(scores - above[:, None])
        fade = tl.exp(largest - above)
        total = total * fade + tl.sum(weights, axis=1)
        sums = sums * fade[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = above
    if SPLIT:
        place = item * num_heads + heads
        cut = (queries < GROUP) & (parts > 1)
        tl.store(stats + 2 * place, largest, mask=cut)
        tl.store(stats + 2 * place + 1, total, mask=cut)
        tl.store(partial + place[:, None] * HEAD_DIM + columns[None, :], sums, mask=inside & (parts > 1))
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + row * out_stride + heads[:, None] * HEAD_DIM + columns[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=inside & (parts == 1))


@triton.jit(do_not_specialize=["num_heads"])
def _merge_kernel(
    partial, stats, merges, out, num_heads, out_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    launch_next(OVERLAP)
    merge, head = merges + 4 * tl.program_id(0), tl.program_id(1)
    row, first, count = tl.load(merge).to(tl.int64), tl.load(merge + 1), tl.load(merge + 2)
    columns = tl.arange(0, BLOCK_D)
    largest = tl.full((), float("-inf"), tl.float32)
    whole = tl.full((), 0.0, tl.float32)
    sums = tl.zeros([BLOCK_D], tl.float32)
    wait_for_previous(OVERLAP)
    for begin in range(0, count, BLOCK_S):
        split = begin + tl.arange(0, BLOCK_S)
        place = (first + split) * num_heads + head
        most = tl.load(stats + 2 * place, mask=split < count, other=float("-inf"))
        total = tl.load(stats + 2 * place + 1, mask=split < count, other=0.0)
        above = tl.maximum(largest, tl.max(most, axis=0))
        share = tl.where(total > 0.0, tl.exp(most - above), 0.0)
        used = (total > 0.0)[:, None] & (columns < HEAD_DIM)[None, :]
        part = tl.load(partial + place[:, None] * HEAD_DIM + columns[None, :], mask=used, other=0.0)
        fade = tl.exp(largest - above)
        sums = sums * fade + tl.sum(part * share[:, None], axis=0)
        whole = whole * fade + tl.sum(share * total, axis=0)
        largest = above
    value = sums / tl.where(whole == 0.0, 1.0, whole)
    target = out + row * out_stride + head * HEAD_DIM + columns
    tl.store(target, value.to(out.dtype.element_ty), mask=(columns < HEAD_DIM) & (count > 0))


class DecodeScratch:
    """Partial sums of split contexts, for as many rows as a batch may have."""

    def __init__(self, max_rows: int, shape: AttentionShape, num_processors: int, device: torch.device) -> None:
        places = max(rows + num_extra(rows, shape, num_processors) for rows in range(1, max_rows + 1))
        self.partial = torch.empty(places * shape.num_heads * shape.head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(places * shape.num_heads * 2, dtype=torch.float32, device=device)


def decode(
    q: Tensor,
    cache: Tensor,
    table: Tensor,
    lengths: Tensor,
    shape: AttentionShape,
    plan: SplitPlan | None,
    scratch: DecodeScratch,
    out: Tensor,
) -> None:
    """q [n, heads·d] (rows may lie apart), one query each at the end of its context; out [n, heads·d]. Without a plan
    each row has one program per head of keys; with one, rows of negative length are left as they are."""
    head_dim, group = shape.head_dim, shape.num_heads // shape.num_kv_heads
    block_d = max(16, triton.next_power_of_2(head_dim))
    programs = len(lengths) if plan is None else len(plan.items)
    _decode_kernel[(programs, shape.num_kv_heads)](
        q, cache, table, lengths, lengths if plan is None else plan.items, scratch.partial, scratch.stats, out,
        shape.scale, shape.softcap or 1.0,
        q.stride(0), cache.stride(0), cache.stride(1), cache.stride(2), table.stride(0), out.stride(0), shape.window,
        shape.num_heads,
        GROUP=group, BLOCK_G=max(16, triton.next_power_of_2(group)), HEAD_DIM=head_dim, BLOCK_D=block_d,
        BLOCK_N=shape.keys, PAGE=cache.shape[2], SOFTCAP=shape.softcap is not None, SPLIT=plan is not None,
        num_warps=DECODE_WARPS, num_stages=DECODE_STAGES, **OVERLAP,
    )  # fmt: skip
    if plan is not None:
        _merge_kernel[(len(plan.merges), shape.num_heads)](
            scratch.partial, scratch.stats, plan.merges, out, shape.num_heads, out.stride(0),
            HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_S=MERGED_TOGETHER, num_warps=4, **OVERLAP,
        )  # fmt: skip


@triton.jit
def _read_keys(
    query, at, table, start, last, positions, columns, block_stride, value_offset, token_stride, scale, softcap, window,
    largest, total, sums,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, SOFTCAP: tl.constexpr,
    ALL_SEEN: tl.constexpr,
):  # fmt: skip
    """One step of a tile of queries; with ALL_SEEN every key is there and seen by all of them."""
    keys = start + tl.arange(0, BLOCK_N)
    if ALL_SEEN:
        block = tl.load(table + keys // PAGE).to(tl.int64)
    else:
        block = tl.load(table + keys // PAGE, mask=keys < last, other=0).to(tl.int64)
    key_at = (at + block * block_stride + (keys % PAGE) * token_stride)[:, None] + columns[None, :]
    if ALL_SEEN and HEAD_DIM == BLOCK_D:
        key, value = tl.load(key_at), tl.load(key_at + value_offset)
    else:
        taken = (keys < last)[:, None] & (columns < HEAD_DIM)[None, :]
        key, value = tl.load(key_at, mask=taken, other=0.0), tl.load(key_at + value_offset, mask=taken, other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if SOFTCAP:
        scores = _cap(scores, softcap)
    scores *= 1.4426950408889634  # exponentials to the base of 2 are what the hardware has
    if not ALL_SEEN:
        seen = (keys[None, :] <= positions[:, None]) & (keys < last)[None, :]
        if window > 0:
            seen = seen & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    above = tl.maximum(largest, tl.max(scores, axis=1))
    level = above
    if not ALL_SEEN:
        level = tl.where(above == float("-inf"), 0.0, above)  # a row that has seen nothing yet
    weights = tl.exp2(scores - level[:, None])
    fade = tl.exp2(largest - level)
    total = total * fade + tl.sum(weights, axis=1)
    sums = sums * fade[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
    return above, total, sums


@triton.jit(
    do_not_specialize=["window", "table_stride"],
    do_not_specialize_on_alignment=["table", "tile_rows", "tile_first", "sequences"],
)
def _prefill_kernel(
    q, cache, table, out, tile_rows, tile_first, sequences, scale, softcap,
    q_stride, block_stride, value_offset, token_stride, table_stride, out_stride, window,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, SOFTCAP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    tile, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tile_rows + tile).to(tl.int64)
    first = tl.load(tile_first + tile)  # query of the sequence's chunk that the tile begins with
    begin_row = tl.load(sequences + 3 * sequence)  # of q, where the chunk begins
    context = tl.load(sequences + 3 * sequence + 1)  # tokens before the chunk
    count = tl.load(sequences + 3 * sequence + 2)
    kv_head = head // GROUP
    queries = first + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    inside = (queries < count)[:, None] & (columns < HEAD_DIM)[None, :]
    rows = (begin_row + queries).to(tl.int64)
    query = tl.load(q + rows[:, None] * q_stride + head * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
    positions = context + queries
    last = tl.where(first < count, tl.minimum(context + first + BLOCK_M, context + count), 0)
    begin = 0
    common = tl.minimum(context + first + 1, last) // BLOCK_N * BLOCK_N  # keys before are seen by all queries
    if window > 0:
        begin = tl.maximum(context + first - window + 1, 0) // BLOCK_N * BLOCK_N
        common = begin
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    at, blocks = cache + kv_head * HEAD_DIM, table + sequence * table_stride
    for start in range(begin, common, BLOCK_N):
        largest, total, sums = _read_keys(
            query, at, blocks, start, last, positions, columns, block_stride, value_offset, token_stride, scale,
            softcap, window, largest, total, sums, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE, SOFTCAP, True,
        )  # fmt: skip
    for start in range(common, last, BLOCK_N):
        largest, total, sums = _read_keys(
            query, at, blocks, start, last, positions, columns, block_stride, value_offset, token_stride, scale,
            softcap, window, largest, total, sums, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE, SOFTCAP, False,
        )  # fmt: skip
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + rows[:, None] * out_stride + head * HEAD_DIM + columns[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class PrefillPlan:
    """The chunks of an iteration, cut into tiles of queries."""

    tile_rows: Tensor  # [tiles] int32: which sequence
    tile_first: Tensor  # [tiles] int32: first query of the tile within the chunk
    sequences: Tensor  # [sequences, 3] int32: first row, tokens before the chunk, tokens of the chunk
    table: Tensor  # [sequences, blocks] int32


class PrefillTile(NamedTuple):
    """What a program works on at a time, and how."""

    queries: int
    keys: int
    warps: int
    stages: int


def prefill_shape(head_dim: int) -> PrefillTile:
    """Small tiles, so that several programs of a processor hide each other's waiting."""
    if head_dim > 128:
        return PrefillTile(64, 32, 8, 2)
    return PrefillTile(64, 64, 4, 2) if head_dim > 64 else PrefillTile(64, 128, 4, 3)


def prefill_tile(head_dim: int) -> int:
    """Queries of a tile."""
    return prefill_shape(head_dim).queries


def prefill(q: Tensor, cache: Tensor, plan: PrefillPlan, shape: AttentionShape, out: Tensor) -> None:
    """Chunks of prompts: each query sees the context of its sequence, the keys of its chunk up to itself among them."""
    head_dim, tile = shape.head_dim, prefill_shape(shape.head_dim)
    block_d = max(16, triton.next_power_of_2(head_dim))
    _prefill_kernel[(len(plan.tile_rows), shape.num_heads)](
        q, cache, plan.table, out, plan.tile_rows, plan.tile_first, plan.sequences, shape.scale, shape.softcap or 1.0,
        q.stride(0), cache.stride(0), cache.stride(1), cache.stride(2), plan.table.stride(0), out.stride(0),
        shape.window,
        GROUP=shape.num_heads // shape.num_kv_heads, HEAD_DIM=head_dim, BLOCK_D=block_d,
        BLOCK_M=tile.queries, BLOCK_N=tile.keys, PAGE=cache.shape[2], SOFTCAP=shape.softcap is not None,
        num_warps=tile.warps, num_stages=tile.stages, **OVERLAP,
    )  # fmt: skip
