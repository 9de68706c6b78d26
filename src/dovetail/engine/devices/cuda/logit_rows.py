"""Rows of logits as the kernels of `choose` read them: shaped, weighed and ranked as `engine.draw` defines it, and the
last token of a row that top-k or top-p keeps."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.engine.draw import LOWEST_POWER, POWER, WEIGHT_BITS

_C0, _C1, _C2, _C3, _C4, _C5 = (tl.constexpr(value) for value in POWER)
_SCALE, _LOWEST = tl.constexpr(2.0**WEIGHT_BITS), tl.constexpr(LOWEST_POWER)
MOST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def parameter(parameters, which: tl.constexpr, row, rows):
    """A float32 parameter."""
    return tl.load(parameters + which * rows + row).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def rank_key(x):
    """Integers in the order of the numbers; 0.0 and -0.0 are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -2147483648 - bits, bits)


@triton.jit
def value_of_key(key):
    key = key.to(tl.int32)
    return tl.where(key < 0, -2147483648 - key, key).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x, largest, sharpness):
    power = tl.maximum((x - largest) * sharpness, _LOWEST)
    whole = tl.floor(power)
    part = power - whole
    value = part * _C5 + _C4
    value = value * part + _C3
    value = value * part + _C2
    value = value * part + _C1
    value = value * part + _C0
    value = value * part + 1.0
    scale = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return (value * scale * _SCALE).to(tl.int64)


@triton.jit
def shaped(logits, parameters, row, rows, columns, vocab, stride):
    """Logits of some columns with all that is done to them before one is chosen; minus infinity = barred."""
    inside = columns < vocab
    x = tl.load(logits + row.to(tl.int64) * stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    counts = tl.load(parameters + 9 * rows + row)
    if counts != 0:
        count = tl.load(counts.to(tl.pointer_type(tl.int16)) + columns, mask=inside, other=0).to(tl.int32)
        penalty, inverse = parameter(parameters, 5, row, rows), parameter(parameters, 6, row, rows)
        presence, frequency = parameter(parameters, 7, row, rows), parameter(parameters, 8, row, rows)
        scaled = tl.where(x > 0, x * inverse, x * penalty)
        scaled = tl.minimum(tl.maximum(scaled, -MOST), MOST)
        if penalty != 1.0:
            x = tl.where((count != 0) & (x == x), scaled, x)
        made = (count & 32767).to(tl.float32)
        x = tl.where(made > 0, x - (frequency * made + presence), x)
    bias = tl.load(parameters + 10 * rows + row)
    if bias != 0:
        x = x + tl.load(bias.to(tl.pointer_type(tl.float32)) + columns, mask=inside, other=0.0)
    words = tl.load(parameters + 11 * rows + row)
    if words != 0:
        word = tl.load(words.to(tl.pointer_type(tl.int32)) + columns // 32, mask=inside, other=0)
        open = ((word >> (columns % 32)) & 1) != 0
        lifted = tl.where(x < -MOST, -MOST, x)  # one token alone is chosen also where it has no chance
        x = tl.where(open & inside, lifted, float("-inf"))
    return x


@triton.jit
def is_filtered(parameters, row, rows):
    top_p = tl.load(parameters + 3 * rows + row).to(tl.float64, bitcast=True)
    return (tl.load(parameters + 2 * rows + row) > 0) | (top_p < 1.0)


@triton.jit
def enough_for(total, parameters, row, rows):
    """The weight before a token with which it is one too many for top-p."""
    top_p = tl.load(parameters + 3 * rows + row).to(tl.float64, bitcast=True)
    share = tl.ceil(total.to(tl.float64) * top_p).to(tl.int64)
    return tl.where(top_p < 1.0, tl.maximum(share, 1), total + 1)


@triton.jit
def last_among(key, number, measure, goal, low, high):
    """The last kept of these, which come in the order of their numbers: its key and number. Kept are all of which the
    sum of the measures before is below the goal; high if the goal is above all sums."""
    steps = 0
    while high - low > 1:
        # Halves of what lies between as numbers; near zero there are too many keys. Then halves of the keys.
        halfway = rank_key(0.5 * (value_of_key(low) + value_of_key(high))).to(tl.int64)
        fair = (steps < 16) & (halfway > low) & (halfway < high)
        middle = tl.where(fair, halfway, (low + high) >> 1)
        below = tl.sum(tl.where(key > middle, measure, 0), axis=0) < goal
        reached = tl.max(tl.where(key <= middle, key, -2147483647), axis=0).to(tl.int64)  # the next that there is
        high = tl.where(below, tl.maximum(reached, low + 1), high)
        low = tl.where(below, low, middle)
        steps += 1
    each = tl.max(tl.where(key == high, measure, 0), axis=0)
    before = tl.sum(tl.where(key > high, measure, 0), axis=0)
    ties = (goal - before + tl.maximum(each, 1) - 1) // tl.maximum(each, 1)
    tied = key == high
    kept = tied & (tl.cumsum(tied.to(tl.int32), axis=0) <= ties)
    return high, tl.max(tl.where(kept, number, -1), axis=0).to(tl.int64)


@triton.jit
def rank_order(key, number):
    """Integers in the order of the ranks, the first the largest: by key, and of equal keys by number."""
    return key.to(tl.int64) * 4294967296 + (4294967295 - number.to(tl.int64))


@triton.jit
def last_of_row(
    logits, parameters, row, rows, vocab, stride, num_chunks, largest, sharpness, goal, low, CHUNK: tl.constexpr
):  # fmt: skip
    """The rank order of the last token that top-k (whose goal is given) and top-p keep, of all whose keys are above
    `low`. The row is read once for each of some fifty steps."""
    anything = tl.full((), -9223372036854775807, tl.int64)
    cut = anything
    for stage in range(2):  # by rank, then by weight of what that has kept
        if stage == 1:
            goal = tl.zeros((), tl.int64)  # not known before the sum of all
        bottom, top = (
            rank_order(low, tl.full((), 4294967295, tl.int64)),
            rank_order(rank_key(largest), tl.zeros((), tl.int64)),
        )
        while ((stage == 1) | (goal > 0)) & (top > bottom + 1):
            middle = tl.where((stage == 1) & (goal == 0), anything, (bottom >> 1) + (top >> 1) + (bottom & top & 1))
            total = tl.zeros((), tl.int64)
            for chunk in range(0, num_chunks):
                columns = chunk * CHUNK + tl.arange(0, CHUNK)
                x = shaped(logits, parameters, row, rows, columns, vocab, stride)
                order = rank_order(rank_key(x), columns)
                weight = weight_of(x, largest, sharpness)
                measure = tl.where(x > float("-inf"), 1, 0).to(tl.int64)
                if stage == 1:
                    measure = tl.where(order >= cut, weight, 0)
                total += tl.sum(tl.where(order > middle, measure, 0), axis=0)
            if (stage == 1) & (goal == 0):
                goal = enough_for(total, parameters, row, rows)
                if goal > total:  # top-p keeps all
                    top = bottom
            else:
                below = total < goal
                top = tl.where(below, middle, top)
                bottom = tl.where(below, bottom, middle)
        if (top > bottom) & ((stage == 1) | (goal > 0)):
            cut = top
    return cut
