"""Draws tokens from logits: temperature, top-k, top-p, min-p and one number in [0, 1).

The arithmetic is defined to the bit, so that every implementation (this one, and the GPU's kernels in
`devices.cuda.choose`) draws the same token from the same logits:

- A token's weight is 2^((logit - largest) · log2(e) / temperature) in fixed point with 34 bits: a float32 polynomial
  without fused operations, then cut to a whole number. Sums of weights are exact, in whatever order they are made.
- Tokens are ranked by logit, equal ones by their number. Top-k keeps the first k; top-p keeps those that have less than
  the share p of the weight of what top-k kept before them; min-p keeps logits of at least largest + T · ln(min-p).
- Of the weights that are kept, in the order of the tokens' numbers, the first whose running sum is above
  floor(u · sum) is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from dovetail.sched.sequence import mix64
from dovetail.sched.turn import TurnRow
from dovetail.types import SamplingParams

WEIGHT_BITS = 34  # 2^18 tokens of the largest weight still have a sum that is exact in float64
LOWEST_POWER = -40.0  # of a weight before it is cut; below 2^-34 it is 0
# 2^f = 1 + f·(c0 + f·(c1 + …)) for f in [0, 1), with a relative error of 1e-7.
POWER = (0.69314706, 0.24022931, 0.055485282, 0.009675452, 0.0012467846, 0.00021612915)
LARGEST = float(torch.finfo(torch.float32).max)

_CANDIDATES = (256, 4096)  # top-p usually needs fewer than the first; if the second is not enough, all are sorted


def uniform(seed: int, position: int) -> float:
    """In [0, 1): the only randomness there is."""
    return (mix64(seed, position) >> 11) * 2.0**-53


def sharpness(sampling: SamplingParams) -> float:
    """By which differences of logits become powers of two. A float32 number."""
    exact = 1.0 / sampling.temperature if sampling.temperature > 1e-38 else math.inf
    return float(np.float32(min(exact * 1.4426950408889634, LARGEST)))


def least_offset(sampling: SamplingParams) -> float:
    """Of min-p: what a logit may be below the largest. A float32 number."""
    if sampling.min_p <= 0.0:
        return -math.inf
    return float(np.float32(max(sampling.temperature * math.log(min(sampling.min_p, 1.0)), -LARGEST)))


def weights(logits: Tensor, largest: Tensor, sharp: Tensor) -> Tensor:
    """int64 of the shape of the logits (float32); `largest` and `sharp` [rows, 1] float32."""
    power = ((logits - largest) * sharp).clamp_(min=LOWEST_POWER)
    whole = power.floor()
    part = power.sub_(whole)
    value = torch.full_like(part, POWER[-1])
    for coefficient in (*POWER[-2::-1], 1.0):
        value.mul_(part).add_(coefficient)
    scale = ((whole.int() + 127) << 23).view(torch.float32)
    return value.mul_(scale).mul_(2.0**WEIGHT_BITS).long()


def draw(logits: Tensor, at: Sequence[int], rows: Sequence[TurnRow], kernels: ModuleType | None) -> list[int]:
    """A token for each of the rows, which are at these places of logits [all rows, vocab] float32."""
    native = kernels if logits.device.type == "cpu" and logits.dtype == torch.float32 else None
    return [_draw_one(logits, place, row, native) for place, row in zip(at, rows, strict=True)]


def _draw_one(logits: Tensor, place: int, row: TurnRow, kernels: ModuleType | None) -> int:
    """Row by row, so that a few weights of one vocabulary are all the memory that it takes."""
    if kernels is not None and _is_filtered(row.sampling):
        token = _draw_candidates(logits, place, row, kernels)
        if token is not None:
            return token
    return _draw_row(logits[place].float(), row)


def _is_filtered(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0


def _draw_row(logits: Tensor, row: TurnRow) -> int:
    """Of logits [vocab]."""
    sampling = row.sampling
    largest = logits.max()
    sharp = torch.tensor(sharpness(sampling), device=logits.device)
    each = weights(logits, largest, sharp)
    kept = logits >= largest + least_offset(sampling)
    if _is_filtered(sampling):
        ranked = _ranked(logits, each, largest, sharp, sampling)
        last = ranked[-1]
        ties = logits == last
        kept &= (logits > last) | (ties & (ties.cumsum(0) <= (ranked == last).sum()))
    return _pick(each.masked_fill_(~kept, 0), row)


def _ranked(logits: Tensor, each: Tensor, largest: Tensor, sharp: Tensor, sampling: SamplingParams) -> Tensor:
    """The logits that top-k and top-p keep, the largest first."""
    vocab = len(logits)
    most = min(sampling.top_k or vocab, vocab)
    total = each.sum()
    for width in (*_CANDIDATES, vocab):
        width = min(width, vocab)
        values = logits.topk(width).values if width < vocab else logits.sort(descending=True).values
        values = values[:most]
        ranked = weights(values, largest, sharp)
        whole = ranked.sum() if most < vocab else total
        before = ranked.cumsum(0) - ranked
        count = int((before < _enough(whole, sampling.top_p)).sum())
        if most <= width or (most == vocab and count < width):
            return values[: max(count, 1)]
    raise AssertionError("the last width is the whole vocabulary")


def _enough(total: Tensor, top_p: float) -> Tensor:
    """The weight before a token with which it is one too many."""
    return (total.double() * top_p).ceil().long().clamp_(min=1) if top_p < 1.0 else total + 1


def _draw_candidates(logits: Tensor, place: int, row: TurnRow, kernels: ModuleType) -> int | None:
    """By the native search for the likeliest tokens; None if too few are found by it."""
    sampling, vocab = row.sampling, logits.shape[1]
    most = min(sampling.top_k or vocab, vocab)
    sharp = torch.tensor(sharpness(sampling))
    total: Tensor | None = None
    for width in (min(width, vocab) for width in _CANDIDATES):
        values, order = _likeliest(logits, place, width, kernels)
        ranked = weights(values, values[0], sharp)
        if most <= width:
            values, order, ranked = values[:most], order[:most], ranked[:most]
            whole = ranked.sum()
        elif most < vocab:
            continue  # what top-p is a share of is not known
        elif total is None:
            whole = total = weights(logits[place], values[0], sharp).sum()
        before = ranked.cumsum(0) - ranked
        kept = before < _enough(whole, sampling.top_p)
        kept[0] = True
        if most <= width or not bool(kept[-1]):
            kept &= values >= values[0] + least_offset(sampling)
            tokens, by_number = order[kept].sort()
            return int(tokens[_pick(ranked[kept][by_number], row)])
    return None


def _likeliest(logits: Tensor, place: int, width: int, kernels: ModuleType) -> tuple[Tensor, Tensor]:
    """The largest logits of a row in the order of their rank, and their tokens."""
    values, order = torch.empty(1, width), torch.empty(1, width, dtype=torch.int64)
    ignored = torch.empty(1, 1, dtype=torch.float64)
    at = np.array([place], dtype=np.int32)
    kernels.candidates(torch.get_num_threads(), logits, at, torch.ones(1), values, order, ignored)
    return values[0], order[0]


def _pick(kept: Tensor, row: TurnRow) -> int:
    """The place of the weight in which the row's number falls."""
    sums = kept.cumsum(0)
    total = int(sums[-1])
    target = min(math.floor(uniform(row.sampling.seed, len(row.tokens)) * float(total)), total - 1)
    return min(int(torch.searchsorted(sums, target, right=True)), len(kept) - 1)
