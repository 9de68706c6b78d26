"""The largest logit of each row, on the device: what greedy decoding needs, and all that it needs on the host."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.engine.devices.cuda.launch import OVERLAP, launch_next, wait_for_previous

_CHUNK = 4096


@triton.jit
def _largest_of_chunks_kernel(
    logits, values, places, vocab, stride, num_chunks, CHUNK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
    broken = tl.sum((x != x).to(tl.int32), axis=0) > 0
    value, place = tl.max(
        tl.where(x == x, x, float("-inf")), axis=0, return_indices=True, return_indices_tie_break_left=True
    )
    tl.store(values + row * num_chunks + chunk, tl.where(broken, float("inf"), value))
    tl.store(places + row * num_chunks + chunk, tl.where(broken, -1, chunk * CHUNK + place))


@triton.jit
def _largest_kernel(values, places, best, num_chunks, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, BLOCK)
    inside = chunks < num_chunks
    value = tl.load(values + row * num_chunks + chunks, mask=inside, other=float("-inf"))
    place = tl.load(places + row * num_chunks + chunks, mask=inside, other=2147483647)
    largest = tl.max(value, axis=0)
    tl.store(best + row, tl.min(tl.where(value == largest, place, 2147483647), axis=0))


@triton.jit(do_not_specialize=["count"])
def _fill_in_kernel(tokens, chosen, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + at, mask=at < count, other=0)
    previous = tl.load(chosen + (-1 - token), mask=(at < count) & (token < 0), other=0)
    tl.store(tokens + at, tl.where(token < 0, tl.maximum(previous, 0), token), mask=at < count)


def fill_in(tokens: Tensor, chosen: Tensor) -> None:
    """Tokens that the host did not know: -1 - i stands for the i-th of those chosen before, in place. One that is not
    a token (a row whose logits were no numbers) becomes 0, and its result is discarded."""
    _fill_in_kernel[(triton.cdiv(len(tokens), 256),)](tokens, chosen, len(tokens), BLOCK=256, num_warps=1)


def greedy(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """[rows, vocab] → [rows] int32: where the largest of a row is, the first of equals; -1 if one is not a number."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, _CHUNK)
    values = torch.empty(rows, chunks, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    best = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out
    _largest_of_chunks_kernel[(rows, chunks)](
        logits, values, places, vocab, logits.stride(0), chunks, CHUNK=_CHUNK, num_warps=4, **OVERLAP
    )
    _largest_kernel[(rows,)](values, places, best, chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1, **OVERLAP)
    return best
