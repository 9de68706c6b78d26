"""Tokens chosen from logits on the device, each row by its own parameters. `engine.draw` defines what is drawn, to
the bit; here is how it is found without a copy of the logits and without sorting them.

    best     chunks   largest and smallest logit of each chunk
    begin    rows     guess from a sample of the row where the last kept token's logit is
    narrow   chunks   sums of the weights above 7 thresholds around it (top-p)
    decide   rows     the range between two of them
    mark     chunks   the few tokens whose logits are in the range, as bits
    finish   rows     the last kept token among those, the chunk that the draw falls in, the token in it

Penalties, bias and barred tokens are applied to logits wherever they are read: they are found by addresses in the row's
parameters (0 = none), so that graphs know none of them. Rows that do not filter leave the middle kernels at once. A
guess decides only how long it takes: where more tokens share the range than `_CANDIDATES`, `finish` bisects over the
whole row, which is slow and rare.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.engine.devices.cuda.launch import OVERLAP, launch_next, wait_for_previous
from dovetail.engine.devices.cuda.logit_rows import (
    MOST,
    enough_for,
    is_filtered,
    last_among,
    last_of_row,
    parameter,
    rank_key,
    rank_order,
    shaped,
    value_of_key,
    weight_of,
)

CHUNK = 4096
_CANDIDATES = 4096
_SAMPLE = 8192  # logits that a guess is made from, in runs of 16
# Rows of the parameters, int64 [PARAMETERS, rows]; numbers with a fraction are there by their bits.
SHARPNESS, LEAST, TOP_K, TOP_P, DRAW, PENALTY, INVERSE, PRESENCE, FREQUENCY, COUNTS, BIAS, MASK, COUNTED = range(13)
PARAMETERS = 13
# Rows of the state that kernels hand on, int64: 0 largest logit, 1 and 2 the range (its low end is not in it), 3 the
# goal (k, or the weight that top-p keeps), 4 the weight above the range, 5 the threshold that is its high end (0 =
# none), 6 the low end of what has any weight, 7 the largest logit's token, 8 and 9 first and last threshold.
_STATE = 10
PROMPT = -32768  # of a token's count: the prompt has it, too
_EXACT = {"enable_fp_fusion": False}
_WARPS, _WARPS_OF_ROWS = 4, 8


@triton.jit(do_not_specialize=["num_rows"])
def _count_kernel(parameters, tokens, rows, num_rows, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Add the tokens that rows were computed with to what their texts have."""
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    counted = tl.load(parameters + 12 * rows + row, mask=inside, other=0)
    here = inside & (counted != 0)
    token = tl.load(tokens + row, mask=inside & (counted < 0), other=0).to(tl.int64)
    token = tl.where(counted > 0, counted - 1, token)
    address = tl.load(parameters + 9 * rows + row, mask=here, other=0) + 2 * token
    place = address.to(tl.pointer_type(tl.int16))
    count = tl.load(place, mask=here, other=0)
    tl.store(place, tl.where((count & 32767) == 32767, count, count + 1), mask=here)


@triton.jit(do_not_specialize=["num_chunks"])
def _best_kernel(
    logits, parameters, values, least, places, rows, vocab, stride, num_chunks,
    CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row, chunk = tl.program_id(0), tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = shaped(logits, parameters, row, rows, columns, vocab, stride)
    broken = tl.sum((x != x).to(tl.int32), axis=0) > 0
    value, place = tl.max(
        tl.where(x == x, x, float("-inf")), axis=0, return_indices=True, return_indices_tie_break_left=True
    )
    smallest = tl.min(tl.where(x > float("-inf"), x, MOST), axis=0)
    at = row * num_chunks + chunk
    tl.store(values + at, tl.where(broken, float("inf"), value))
    tl.store(least + at, smallest)
    tl.store(places + at, tl.where(broken, -1, chunk * CHUNK + place))


@triton.jit(do_not_specialize=["num_chunks"])
def _begin_kernel(
    logits, parameters, values, least, places, state, found, rows, vocab, stride, num_chunks,
    CHUNK: tl.constexpr, SAMPLE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    chunks = tl.arange(0, BLOCK)
    inside = chunks < num_chunks
    value = tl.load(values + row * num_chunks + chunks, mask=inside, other=float("-inf"))
    place = tl.load(places + row * num_chunks + chunks, mask=inside, other=2147483647)
    smallest = tl.min(tl.load(least + row * num_chunks + chunks, mask=inside, other=MOST), axis=0)
    largest = tl.max(value, axis=0)
    best = tl.min(tl.where(value == largest, place, 2147483647), axis=0)
    sharpness = parameter(parameters, 0, row, rows)
    bottom = tl.maximum(largest - 40.0 / tl.maximum(sharpness, 1e-37), smallest)  # weights below are 0
    low = rank_key(bottom).to(tl.int64) - 1
    tl.store(found + row, 0)
    tl.store(state + row, largest.to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(state + 6 * rows + row, low)
    tl.store(state + 7 * rows + row, best.to(tl.int64))
    if is_filtered(parameters, row, rows) & (sharpness > 0.0):
        top_k = tl.load(parameters + 2 * rows + row)
        first, last = _guess(
            logits, parameters, value, values, row, rows, vocab, stride, num_chunks, largest, bottom, sharpness, top_k,
            CHUNK, SAMPLE,
        )  # fmt: skip
        first = tl.minimum(tl.maximum(rank_key(first).to(tl.int64), low), rank_key(largest).to(tl.int64) - 1)
        tl.store(state + 1 * rows + row, tl.where(top_k > 0, first, low))
        tl.store(state + 2 * rows + row, rank_key(largest).to(tl.int64))
        tl.store(state + 3 * rows + row, top_k)
        tl.store(state + 4 * rows + row, tl.zeros((), tl.int64))
        tl.store(state + 5 * rows + row, tl.zeros((), tl.int64))
        tl.store(state + 8 * rows + row, first)
        tl.store(state + 9 * rows + row, rank_key(last).to(tl.int64))


@triton.jit
def _guess(
    logits, parameters, value, values, row, rows, vocab, stride, num_chunks, largest, bottom, sharpness, top_k,
    CHUNK: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """Two logits that the last kept one is likely to be between, from the largest of each chunk and a sample of the
    others; of top-k the first one only, below which there is none."""
    at = tl.arange(0, SAMPLE)
    runs = tl.cdiv(tl.cdiv(vocab, 16), SAMPLE // 16)
    columns = (at // 16) * (16 * runs) + at % 16
    x = shaped(logits, parameters, row, rows, columns, vocab, stride)
    chunk = tl.minimum(columns // CHUNK, num_chunks - 1)
    x = tl.where(x < tl.load(values + row * num_chunks + chunk), x, float("-inf"))
    scale = runs.to(tl.float32)
    weight = tl.exp2(tl.maximum((x - largest) * sharpness, -100.0)) * scale
    most = tl.exp2(tl.maximum((value - largest) * sharpness, -100.0))
    if top_k > 0:
        weight = tl.where(x > float("-inf"), scale, 0.0)
        most = tl.where(value > float("-inf"), 1.0, 0.0)
    weight = tl.where(x > float("-inf"), weight, 0.0)
    total = tl.sum(weight, axis=0) + tl.sum(most, axis=0)
    share = tl.load(parameters + 3 * rows + row).to(tl.float64, bitcast=True).to(tl.float32)
    error = 4.0 * tl.sqrt(tl.sum(weight * weight, axis=0) * tl.maximum(share * (1.0 - share), 0.0))
    error += 0.002 * total
    wanted, unwanted = total * share + error, total * share - error
    if top_k > 0:
        wanted = 2.0 * top_k.to(tl.float32) + 24.0 * scale
        unwanted = wanted
    low, below_low, high, below_high = bottom, largest, bottom, largest
    for _ in range(14):
        middle, other = 0.5 * (low + below_low), 0.5 * (high + below_high)
        above = tl.sum(tl.where(x > middle, weight, 0.0), axis=0) + tl.sum(tl.where(value > middle, most, 0.0), axis=0)
        over = tl.sum(tl.where(x > other, weight, 0.0), axis=0) + tl.sum(tl.where(value > other, most, 0.0), axis=0)
        low, below_low = tl.where(above >= wanted, middle, low), tl.where(above >= wanted, below_low, middle)
        high, below_high = tl.where(over >= unwanted, other, high), tl.where(over >= unwanted, below_high, other)
    return low, below_high


@triton.jit
def _threshold(first, last, at):
    """The `at`-th of 1 to 7."""
    bottom = value_of_key(first)
    return bottom + (value_of_key(last) - bottom) * ((at - 1).to(tl.float32) * 0.16666667)


@triton.jit(do_not_specialize=["num_chunks"])
def _narrow_kernel(
    logits, parameters, state, sums, totals, rows, vocab, stride, num_chunks,
    CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """sums [rows, chunks, 8] of what is above each threshold; totals [2, rows, chunks]: of all, and of what min-p
    keeps."""
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row, chunk = tl.program_id(0), tl.program_id(1)
    sharpness = parameter(parameters, 0, row, rows)
    if sharpness > 0.0:
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        x = shaped(logits, parameters, row, rows, columns, vocab, stride)
        largest = tl.load(state + row).to(tl.int32).to(tl.float32, bitcast=True)
        weight = weight_of(x, largest, sharpness)
        at = row * num_chunks + chunk
        offset = parameter(parameters, 1, row, rows)
        total = tl.sum(weight, axis=0)
        tl.store(totals + at, total)
        if offset > float("-inf"):
            total = tl.sum(tl.where(x >= largest + offset, weight, 0), axis=0)
        tl.store(totals + rows * num_chunks + at, total)
        if is_filtered(parameters, row, rows) & (tl.load(parameters + 2 * rows + row) == 0):
            first, last = tl.load(state + 8 * rows + row), tl.load(state + 9 * rows + row)
            for index in tl.static_range(1, 8):
                bar = _threshold(first, last, tl.full((), index, tl.int32))
                tl.store(sums + at.to(tl.int64) * 8 + index, tl.sum(tl.where(x > bar, weight, 0), axis=0))


@triton.jit(do_not_specialize=["num_chunks"])
def _decide_kernel(
    parameters, state, sums, totals, rows, num_chunks, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    top_p_alone = is_filtered(parameters, row, rows) & (tl.load(parameters + 2 * rows + row) == 0)
    if top_p_alone & (parameter(parameters, 0, row, rows) > 0.0):
        chunks, at = tl.arange(0, BLOCK), tl.arange(0, 8)
        inside = chunks < num_chunks
        total = tl.sum(tl.load(totals + row * num_chunks + chunks, mask=inside, other=0), axis=0)
        goal = enough_for(total, parameters, row, rows)
        place = (row.to(tl.int64) * num_chunks + chunks)[:, None] * 8 + at[None, :]
        above = tl.sum(tl.load(sums + place, mask=inside[:, None] & (at > 0)[None, :], other=0), axis=0)
        low, high = tl.load(state + rows + row), tl.load(state + 2 * rows + row)
        bar = _threshold(tl.load(state + 8 * rows + row), tl.load(state + 9 * rows + row), at)
        key = rank_key(bar).to(tl.int64)
        usable = (at > 0) & (key > low) & (key < high)
        new_high = tl.min(tl.where(usable & (above < goal), key, high), axis=0)
        tl.store(state + rows + row, tl.max(tl.where(usable & (above >= goal), key, low), axis=0))
        tl.store(state + 3 * rows + row, goal)
        if new_high < high:
            index = tl.min(tl.where(usable & (above < goal) & (key == new_high), at, 8), axis=0)
            tl.store(state + 2 * rows + row, new_high)
            tl.store(state + 4 * rows + row, tl.sum(tl.where(at == index, above, 0), axis=0))
            tl.store(state + 5 * rows + row, index.to(tl.int64))


@triton.jit(do_not_specialize=["num_chunks"])
def _mark_kernel(
    logits, parameters, state, found, marks, rows, vocab, stride, num_chunks,
    CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Bit c % 32 of marks [rows, chunks · CHUNK / 32] is set where the logit of token c is in the range; of rows with
    top-k also where it is above: `finish` needs the weights of them all."""
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row, chunk = tl.program_id(0), tl.program_id(1)
    if is_filtered(parameters, row, rows) & (parameter(parameters, 0, row, rows) > 0.0):
        words, bits = tl.arange(0, CHUNK // 32), tl.arange(0, 32)
        columns = chunk * CHUNK + words[:, None] * 32 + bits[None, :]
        key = rank_key(shaped(logits, parameters, row, rows, columns, vocab, stride))
        high = tl.load(state + 2 * rows + row)
        high = tl.where(tl.load(parameters + 2 * rows + row) > 0, 2147483647, high).to(tl.int32)
        low = tl.maximum(tl.load(state + rows + row), -2139095040).to(tl.int32)  # above minus infinity
        marked = ((key > low) & (key <= high)).to(tl.int32)
        place = (row.to(tl.int64) * num_chunks + chunk) * (CHUNK // 32)
        tl.store(marks + place + words, tl.sum(marked << bits[None, :], axis=1))
        count = tl.sum(tl.sum(marked, axis=1), axis=0)
        if count > 0:
            tl.atomic_add(found + row, count)


@triton.jit
def _list_marked(marks, numbers, row, num_words, WORDS: tl.constexpr, CANDIDATES: tl.constexpr):
    """The numbers of the marked tokens, in their order, into numbers [rows, CANDIDATES]."""
    at = tl.arange(0, WORDS)
    word = tl.load(marks + row.to(tl.int64) * num_words + at, mask=at < num_words, other=0)
    count = word - ((word >> 1) & 0x55555555)
    count = (count & 0x33333333) + ((count >> 2) & 0x33333333)
    count = (count + (count >> 4)) & 0x0F0F0F0F
    count = (count & 0xFF) + ((count >> 8) & 0xFF) + ((count >> 16) & 0xFF) + ((count >> 24) & 0xFF)
    place = tl.cumsum(count, axis=0) - count
    for bit in range(32):
        marked = ((word >> bit) & 1) != 0
        tl.store(numbers + row.to(tl.int64) * CANDIDATES + place, at * 32 + bit, mask=marked & (place < CANDIDATES))
        place += marked.to(tl.int32)
    tl.debug_barrier()


@triton.jit
def _target(total, parameters, row, rows):
    """The draw as a share of the weights that are kept."""
    draw = tl.load(parameters + 4 * rows + row).to(tl.float64) * 1.1102230246251565e-16
    return tl.minimum(tl.floor(draw * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _fall(by_chunk, parameters, row, rows, num_chunks, BLOCK: tl.constexpr):
    """The chunk that the draw falls in, and how far."""
    chunks = tl.arange(0, BLOCK)
    target = _target(tl.sum(by_chunk, axis=0), parameters, row, rows)
    ended = (tl.cumsum(by_chunk, axis=0) <= target) & (chunks < num_chunks)
    chunk = tl.minimum(tl.sum(ended.to(tl.int32), axis=0), num_chunks - 1)
    return chunk, target - tl.sum(tl.where(chunks < chunk, by_chunk, 0), axis=0)


@triton.jit
def _keep_candidates(
    logits, parameters, state, sums, marks, numbers, count, row, rows, vocab, stride, num_chunks, largest, sharpness,
    CHUNK: tl.constexpr, CANDIDATES: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last kept token of a row, its key and its number; in which chunk the draw falls, and what is left of it."""
    low, high = tl.load(state + rows + row), tl.load(state + 2 * rows + row)
    goal, above = tl.load(state + 3 * rows + row), tl.load(state + 4 * rows + row)
    top_k = tl.load(parameters + 2 * rows + row)
    _list_marked(marks, numbers, row, num_chunks * (CHUNK // 32), WORDS, CANDIDATES)
    at, chunks = tl.arange(0, CANDIDATES), tl.arange(0, BLOCK)
    here = at < count
    number = tl.load(numbers + row.to(tl.int64) * CANDIDATES + at, mask=here, other=2147483647)
    x = shaped(logits, parameters, row, rows, tl.where(here, number, vocab), vocab, stride)
    key = tl.where(here, rank_key(x), -2147483647)
    weight = tl.where(here, weight_of(x, largest, sharpness), 0)
    by_rank = top_k > 0
    last, cut = low, tl.full((), 2147483647, tl.int64)
    measure, goal = tl.where(by_rank, here.to(tl.int64), weight), tl.where(by_rank, goal, goal - above)
    for stage in range(2):  # by rank, then by weight of what that has kept
        if goal > 0:
            last, cut = last_among(key, number, measure, goal, low, tl.maximum(high, low + 1))
            weight = tl.where((key > last) | ((key == last) & (number <= cut)), weight, 0)
            total = tl.sum(weight, axis=0)
            measure, goal = weight, enough_for(total, parameters, row, rows)
            goal = tl.where(by_rank & (stage == 0) & (goal <= total), goal, 0)
    index = tl.load(state + 5 * rows + row)
    by_chunk = tl.load(sums + (row.to(tl.int64) * num_chunks + chunks) * 8 + index, mask=chunks < num_chunks, other=0)
    by_chunk = by_chunk * tl.where(index > 0, 1, 0)
    target = _target(tl.sum(weight, axis=0) + tl.sum(by_chunk, axis=0), parameters, row, rows)
    before, chunk, left = -1, num_chunks - 1, target
    while chunk - before > 1:
        middle = (before + chunk) // 2
        so_far = tl.sum(tl.where(number < (middle + 1) * CHUNK, weight, 0), axis=0)
        so_far += tl.sum(tl.where(chunks <= middle, by_chunk, 0), axis=0)
        chunk = tl.where(so_far > target, middle, chunk)
        before = tl.where(so_far > target, before, middle)
    left -= tl.sum(tl.where(number < chunk * CHUNK, weight, 0), axis=0)
    left -= tl.sum(tl.where(chunks < chunk, by_chunk, 0), axis=0)
    return last, cut, chunk, left


@triton.jit
def _keep_of_row(
    logits, parameters, state, row, rows, vocab, stride, num_chunks, largest, sharpness,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same where candidates are too many, by reading the whole row again and again."""
    top_k = tl.load(parameters + 2 * rows + row)
    cut = last_of_row(
        logits, parameters, row, rows, vocab, stride, num_chunks, largest, sharpness, top_k,
        tl.load(state + 6 * rows + row), CHUNK,
    )  # fmt: skip
    chunks = tl.arange(0, BLOCK)
    by_chunk = tl.zeros([BLOCK], tl.int64)
    for chunk in range(0, num_chunks):
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        x = shaped(logits, parameters, row, rows, columns, vocab, stride)
        kept = rank_order(rank_key(x), columns) >= cut
        own = tl.sum(tl.where(kept, weight_of(x, largest, sharpness), 0), axis=0)
        by_chunk += tl.where(chunks == chunk, own, 0)
    chunk, left = _fall(by_chunk, parameters, row, rows, num_chunks, BLOCK)
    return cut >> 32, 4294967295 - (cut & 4294967295), chunk, left


@triton.jit
def _finish_kernel(
    logits, parameters, state, sums, totals, found, marks, numbers, chosen, rows, vocab, stride, num_chunks,
    CHUNK: tl.constexpr, CANDIDATES: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    best = tl.load(state + 7 * rows + row)
    sharpness = parameter(parameters, 0, row, rows)
    token = best
    if (sharpness > 0.0) & (best >= 0):
        chunks = tl.arange(0, BLOCK)
        inside = chunks < num_chunks
        largest = tl.load(state + row).to(tl.int32).to(tl.float32, bitcast=True)
        # What is kept is (key, number) and all that is ranked before: at first what min-p keeps.
        key = rank_key(largest + parameter(parameters, 1, row, rows)).to(tl.int64)
        number = tl.full((), 2147483647, tl.int64)
        by_chunk = tl.load(totals + (rows + row) * num_chunks + chunks, mask=inside, other=0)
        chunk, left = _fall(by_chunk, parameters, row, rows, num_chunks, BLOCK)
        if is_filtered(parameters, row, rows):
            count = tl.load(found + row)
            low, bottom = tl.load(state + rows + row), tl.load(state + 6 * rows + row)
            is_enough = (count >= tl.load(parameters + 2 * rows + row)) | (low == bottom)  # for top-k
            if (count <= CANDIDATES) & is_enough:
                last, cut, fallen, rest = _keep_candidates(
                    logits, parameters, state, sums, marks, numbers, count, row, rows, vocab, stride, num_chunks,
                    largest, sharpness, CHUNK, CANDIDATES, WORDS, BLOCK,
                )  # fmt: skip
            else:
                last, cut, fallen, rest = _keep_of_row(
                    logits, parameters, state, row, rows, vocab, stride, num_chunks, largest, sharpness, CHUNK, BLOCK
                )
            if last >= key:
                key, number, chunk, left = last, cut, fallen, rest
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        x = shaped(logits, parameters, row, rows, columns, vocab, stride)
        each = rank_key(x).to(tl.int64)
        kept = (each > key) | ((each == key) & (columns <= number))
        weight = tl.where(kept, weight_of(x, largest, sharpness), 0)
        within = tl.sum((tl.cumsum(weight, axis=0) <= left).to(tl.int32), axis=0)
        drawn = tl.minimum(chunk * CHUNK + within, vocab - 1).to(tl.int64)
        token = tl.where(tl.sum(weight, axis=0) > 0, drawn, best)
    tl.store(chosen + row, token.to(tl.int32))


@triton.jit(do_not_specialize=["count"])
def _scatter_kernel(addresses, values, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(addresses + at, mask=at < count, other=0).to(tl.pointer_type(tl.int16))
    tl.store(place, tl.load(values + at, mask=at < count, other=0).to(tl.int16), mask=at < count)


def scatter(addresses: Tensor, values: Tensor) -> None:
    """int16 to where each is to go; both on the device."""
    grid = (triton.cdiv(len(addresses), 1024),)
    _scatter_kernel[grid](addresses, values, len(addresses), BLOCK=1024, num_warps=4)


class Scratch:
    """Memory that the kernels hand on what they found in; of one executor."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        chunks = triton.cdiv(vocab, CHUNK)
        self.values = torch.empty(2, rows, chunks, dtype=torch.float32, device=device)
        self.places = torch.empty(rows, chunks, dtype=torch.int32, device=device)
        self.state = torch.empty(_STATE, rows, dtype=torch.int64, device=device)
        self.sums = torch.empty(rows, chunks, 8, dtype=torch.int64, device=device)
        self.totals = torch.empty(2, rows, chunks, dtype=torch.int64, device=device)
        self.found = torch.empty(rows, dtype=torch.int32, device=device)
        self.marks = torch.empty(rows, chunks * (CHUNK // 32), dtype=torch.int32, device=device)
        self.numbers = torch.empty(rows, _CANDIDATES, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in vars(self).values())


def choose(logits: Tensor, parameters: Tensor, tokens: Tensor, scratch: Scratch, chosen: Tensor) -> None:
    """logits [rows, vocab]; parameters [PARAMETERS, at least rows]; `tokens` [rows] that the rows were computed with,
    for COUNTED; writes chosen [rows] int32, -1 where a logit is not a number."""
    (num_rows, vocab), rows, stride = logits.shape, parameters.shape[1], logits.stride(0)
    chunks = triton.cdiv(vocab, CHUNK)
    block, words = triton.next_power_of_2(chunks), triton.next_power_of_2(chunks * (CHUNK // 32))
    s, grid, each = scratch, (num_rows, chunks), (num_rows,)
    shape = (rows, vocab, stride, chunks)
    how = {"CHUNK": CHUNK} | OVERLAP | _EXACT
    _count_kernel[(triton.cdiv(num_rows, 128),)](parameters, tokens, rows, num_rows, BLOCK=128, num_warps=4, **OVERLAP)
    _best_kernel[grid](logits, parameters, s.values[0], s.values[1], s.places, *shape, num_warps=_WARPS, **how)
    _begin_kernel[each](
        logits, parameters, s.values[0], s.values[1], s.places, s.state, s.found, *shape,
        SAMPLE=_SAMPLE, BLOCK=block, num_warps=8, **how,
    )  # fmt: skip
    _narrow_kernel[grid](logits, parameters, s.state, s.sums, s.totals, *shape, num_warps=_WARPS, **how)
    _decide_kernel[each](
        parameters, s.state, s.sums, s.totals, rows, chunks, BLOCK=block, num_warps=1, **OVERLAP, **_EXACT
    )
    _mark_kernel[grid](logits, parameters, s.state, s.found, s.marks, *shape, num_warps=_WARPS, **how)
    _finish_kernel[each](
        logits, parameters, s.state, s.sums, s.totals, s.found, s.marks, s.numbers, chosen, *shape,
        CANDIDATES=_CANDIDATES, WORDS=words, BLOCK=block, num_warps=_WARPS_OF_ROWS, **how,
    )  # fmt: skip
