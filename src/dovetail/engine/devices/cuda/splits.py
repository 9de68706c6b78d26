"""Which contexts of a batch are split over the processors of a GPU, and where: planned on the device from the lengths
in the batch, so that a graph holds for any lengths.

    lengths    |- a -|----------------- b -----------------|-- c --|
    items      |-- b 0 --|-- b 1 --|-- b 2 --|- b 3 -|- a -|-- c --|   a program each, per head of keys
    merges     b: items 0 to 3                                         rows of more than one item

No item is much longer than what a processor has to read on average.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

KEYS = 128  # of a step of the kernel for single queries; half of it for heads of more than 128 columns
WORTH = 256  # keys, in whose time the items are merged
# What a processor takes for as many keys as one program reads, by several programs: of that one's time.
SHARE_TIME = {True: 0.9, False: 0.6}  # by whether heads have more than 64 columns
FEW_PROGRAMS, MANY_PROGRAMS = 32, 256  # heads of keys in a batch: a program per processor is enough; three are better


@dataclass(frozen=True)
class AttentionShape:
    """What of a layer the kernels need besides its tensors."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None
    window: int  # 0 = none

    @property
    def keys(self) -> int:
        """That a program reads at a time; contexts are cut at multiples."""
        return KEYS if self.head_dim <= 128 else KEYS // 2


@dataclass(frozen=True)
class SplitPlan:
    items: Tensor  # [items, 4] int32: row, first key, end, of how many items of the row it is one; 0 = none
    merges: Tensor  # [merges, 4] int32: row, its first item, how many, unused; 0 of them = none


def num_programs(rows: int, shape: AttentionShape, num_processors: int) -> int:
    """That the contexts of so many rows are read by if they are long: every processor has one to four."""
    heads = rows * shape.num_kv_heads
    if heads < FEW_PROGRAMS:
        return num_processors
    return num_processors * (4 if shape.head_dim <= 64 else 3 if heads >= MANY_PROGRAMS else 2)


def num_extra(rows: int, shape: AttentionShape, num_processors: int) -> int:
    """Items beyond one per row, at most: an item beyond a row's first stands for an average one of the programs."""
    return -(-num_programs(rows, shape, num_processors) // shape.num_kv_heads)


def is_worth_it(lengths: np.ndarray, shape: AttentionShape, num_processors: int) -> bool:
    """Whether a batch of these lengths is read faster with a plan: its longest context would take longer than all of
    them do together where every processor has its share, by more than adding up the items takes."""
    spans = np.minimum(lengths, shape.window) if shape.window else lengths
    if not len(spans):
        return False
    share = int(spans.sum()) * shape.num_kv_heads / num_processors
    return int(spans.max()) > SHARE_TIME[shape.head_dim > 64] * share + WORTH


@triton.jit(
    do_not_specialize=["count", "window", "num_items", "num_merges", "num_kv_heads", "num_programs"],
    do_not_specialize_on_alignment=["lengths"],
)
def _plan_kernel(
    lengths, items, merges, count, window, num_items, num_merges, num_kv_heads, num_programs,
    ROWS: tl.constexpr, ITEMS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    length = tl.load(lengths + row, mask=row < count, other=-1)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    span = tl.maximum(length - first, 0)
    read = tl.sum(span.to(tl.int64), axis=0) * num_kv_heads
    chunk = tl.maximum(tl.cdiv(tl.cdiv(read, num_programs), KEYS), 1).to(tl.int32) * KEYS
    parts = tl.maximum((2 * span + chunk) // (2 * chunk), 1)  # to the nearest: crumbs are no items of their own
    each = tl.maximum(tl.cdiv(tl.cdiv(span, parts), KEYS), 1) * KEYS
    parts = tl.where(length >= 0, tl.maximum(tl.cdiv(span, each), 1), 0)
    is_cut = parts > 1
    cut, whole = tl.where(is_cut, parts, 0), tl.where(is_cut, 0, parts)
    # The long ones first, so that short ones fill what they leave.
    begins = tl.where(is_cut, tl.cumsum(cut, axis=0), tl.sum(cut, axis=0) + tl.cumsum(whole, axis=0)) - parts
    for part in range(0, tl.max(parts, axis=0)):
        item = items + 4 * (begins + part)
        begin = first + part * each
        there = part < parts
        tl.store(item, row, mask=there)
        tl.store(item + 1, begin, mask=there)
        tl.store(item + 2, tl.minimum(begin + each, length), mask=there)
        tl.store(item + 3, parts, mask=there)
    spare = tl.arange(0, ITEMS)
    unused = (spare >= tl.sum(parts, axis=0)) & (spare < num_items)
    for field in tl.static_range(4):
        tl.store(items + 4 * spare + field, 0, mask=unused)
    place = merges + 4 * (tl.cumsum(is_cut.to(tl.int32), axis=0) - 1)
    tl.store(place, row, mask=is_cut)
    tl.store(place + 1, begins, mask=is_cut)
    tl.store(place + 2, parts, mask=is_cut)
    unused = (row >= tl.sum(is_cut.to(tl.int32), axis=0)) & (row < num_merges)
    tl.store(merges + 4 * row + 2, 0, mask=unused)


def _room(count: int, usual: int) -> int:
    """The same kernel for nearly all: it takes seconds to compile."""
    return max(usual, triton.next_power_of_2(count))


def plan(lengths: Tensor, shape: AttentionShape, num_processors: int) -> SplitPlan:
    """lengths [rows] int32 on the device; negative = no such row."""
    rows = len(lengths)
    extra = num_extra(rows, shape, num_processors)
    items = torch.empty(rows + extra, 4, dtype=torch.int32, device=lengths.device)
    merges = torch.empty(min(rows, extra), 4, dtype=torch.int32, device=lengths.device)
    _plan_kernel[(1,)](
        lengths, items, merges, rows, shape.window, len(items), len(merges), shape.num_kv_heads,
        num_programs(rows, shape, num_processors),
        ROWS=_room(rows, 256), ITEMS=_room(len(items), 1024), KEYS=shape.keys, num_warps=4,
    )  # fmt: skip
    return SplitPlan(items, merges)


class SplitPlans:
    """Of one iteration: one for each width of windows that its layers have. They are made before the first layer, by
    kernels that nothing overlaps, so that those of the layers may read them before they wait for each other."""

    def __init__(self, lengths: Tensor, shapes: Iterable[AttentionShape], num_processors: int) -> None:
        self._plans: dict[int, SplitPlan] = {}
        for shape in shapes:
            if shape.window not in self._plans:
                self._plans[shape.window] = plan(lengths, shape, num_processors)

    def of(self, shape: AttentionShape) -> SplitPlan:
        return self._plans[shape.window]
