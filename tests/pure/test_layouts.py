"""Layouts: packing and unpacking undo each other, sizes are as announced, and elements lie where the text says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_codes import random_codes

from dovetail.codings import CODINGS, Coding
from dovetail.layouts import (
    BY_ROWS,
    CELLS,
    bfloat16_bits,
    coding_of,
    narrow,
    pack_codes,
    packed_bytes,
    packer,
    to_cells,
    unpack,
    unpack_codes,
    unpack_tiles,
)

WRITTEN = ("plain", "amx-bf16", *CELLS.values())

SHAPES = st.one_of(
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40)),
)


def pack(layout: str, dtype: str, values: Any) -> Any:
    """All bytes of a tensor at once."""
    making = packer(layout, dtype, values.shape)
    parts = [*making.rows(values.reshape(-1, values.shape[-1])), *making.finish()]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def random_values(shape: tuple[int, ...], seed: int) -> Any:
    generator = np.random.default_rng(seed)
    scale = np.exp(generator.uniform(-8, 8, (*shape[:-1], 1)))
    return (generator.standard_normal(shape) * scale).astype(np.float32)


@given(shape=SHAPES, seed=st.integers(0, 2**32), layout=st.sampled_from(WRITTEN))
@settings(max_examples=150, deadline=None)
def test_what_is_packed_in_parts_is_what_is_packed_at_once(shape: tuple[int, ...], seed: int, layout: str) -> None:
    values = random_values(shape, seed)
    whole = pack(layout, "bf16", values)
    assert whole.nbytes == packed_bytes(layout, "bf16", shape)
    generator = np.random.default_rng(seed)
    rows = values.reshape(-1, shape[-1])
    making, parts, start = packer(layout, "bf16", shape), [], 0
    while start < len(rows):
        stop = start + int(generator.integers(1, 40))
        parts += list(making.rows(rows[start:stop]))
        start = stop
    np.testing.assert_array_equal(np.concatenate([*parts, *making.finish()]), whole)


@given(
    rows=st.integers(1, 40), columns=st.integers(1, 600), seed=st.integers(0, 2**32), layout=st.sampled_from(CODINGS)
)
@settings(max_examples=150, deadline=None)
def test_codes_and_scales_of_others_are_kept_to_the_bit(rows: int, columns: int, seed: int, layout: str) -> None:
    coding, given_codes = coding_of(layout, columns), random_codes(layout, rows, columns, seed)
    data = pack_codes(layout, (rows, columns), given_codes)
    assert data.nbytes == packed_bytes(layout, "f32", (rows, columns))
    back = unpack_codes(layout, (rows, columns), memoryview(data))
    for found, wanted in zip((back.codes, *back.scales), (given_codes.codes, *given_codes.scales), strict=True):
        np.testing.assert_array_equal(found, wanted)
    values = unpack(layout, "f32", (rows, columns), memoryview(data))
    np.testing.assert_array_equal(values, by_hand(layout, given_codes)[:, :columns])
    whole = coding.part(back, slice(0, rows), slice(0, columns))
    assert whole is not None
    np.testing.assert_array_equal(coding.dequantise(whole), values)


def by_hand(layout: str, quantised: Any) -> Any:
    """Element by element, as the text says."""
    codes, scales = quantised.codes, [part.astype(np.float32) for part in quantised.scales]
    group = {"int8-cells": codes.shape[1], "int8-k16": 16}.get(layout, 32)
    offset = np.float32(8 if layout.startswith("int4") and layout.endswith("min") else 0)
    columns = np.arange(codes.shape[1])
    if layout == "fp4-e32":
        sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7]
        return np.where(codes & 8, -sizes, sizes) * np.exp2(scales[0] - 127)[:, columns // group]
    if "-k" in layout:
        kinds = len(scales) // 2
        factors = [scales[kind][:, columns // 256] * scales[kinds + kind][:, columns // group] for kind in range(kinds)]
        factors[1:] = [-least for least in factors[1:]]
    else:
        factors = [part[:, columns // group] for part in scales]
    values = factors[0] * (codes.astype(np.float32) + offset)
    return values + factors[1] if len(factors) > 1 else values


@pytest.mark.parametrize("layout", CODINGS)
def test_columns_are_cut_at_whole_groups_alone(layout: str) -> None:
    coding, whole = coding_of(layout, 1024), random_codes(layout, 20, 1024)
    values = coding.dequantise(whole)
    for start, stop in ((0, 512), (512, 1024), (256, 768)):
        cut = coding.part(whole, slice(3, 20), slice(start, stop))
        assert cut is not None
        np.testing.assert_array_equal(coding_of(layout, stop - start).dequantise(cut), values[3:, start:stop])
    assert (coding.part(whole, slice(0, 20), slice(0, 40)) is None) == (layout != "int8-cells")
    assert (coding.part(whole, slice(0, 20), slice(32, 1024)) is None) == ("-k" in layout)


@given(shape=SHAPES, seed=st.integers(0, 2**32), dtype=st.sampled_from(["f32", "bf16", "f16"]))
@settings(max_examples=60, deadline=None)
def test_plain_and_tiled_values_come_back_to_the_bit(shape: tuple[int, ...], seed: int, dtype: str) -> None:
    values = random_values(shape, seed)
    rounded = unpack("plain", dtype, shape, memoryview(pack("plain", dtype, values)))
    np.testing.assert_array_equal(pack("plain", dtype, rounded), pack("plain", dtype, values))
    if dtype == "f32":
        np.testing.assert_array_equal(rounded, values)
    tiles = pack("amx-bf16", "bf16", values)
    np.testing.assert_array_equal(unpack_tiles(shape, memoryview(tiles)), bfloat16_bits(values))
    back = unpack("amx-bf16", "bf16", shape, memoryview(tiles))
    np.testing.assert_array_equal(pack("amx-bf16", "bf16", back), tiles)


@given(rows=st.integers(1, 9), columns=st.integers(1, 100), seed=st.integers(0, 2**32), wide=st.booleans())
@settings(max_examples=100, deadline=None)
def test_codes_come_back_exactly_and_values_within_half_a_step(rows: int, columns: int, seed: int, wide: bool) -> None:
    layout = CELLS["int8" if wide else "int4"]
    coding = Coding(layout, columns)
    values = random_values((rows, columns), seed)
    quantised = coding.quantise(values)
    np.testing.assert_array_equal(coding.unpack(coding.pack(quantised.codes)), quantised.codes)
    back = coding.dequantise(quantised)
    step = np.abs(np.repeat(quantised.scales[0].astype(np.float32), 32, axis=1)[:, :columns])
    # Rounding a scale to float16 can cut off up to 2⁻¹¹ of the largest value; below 2⁻¹⁴ more. In 4 bits a number as
    # large as the largest, of the other sign, lies a whole step outside.
    largest = 127 if wide else 8
    slack = (0.5 if wide else 1.5) + largest * 2.0**-11
    assert (np.abs(back - values) <= step * slack + largest * 2.0**-24).all()
    packed = pack(layout, "f32", values)
    np.testing.assert_array_equal(unpack(layout, "f32", (rows, columns), memoryview(packed)), back)


def test_four_bits_are_those_of_q4_0() -> None:
    """As GGUF's own package quantises: the same codes, to the bit."""
    gguf = pytest.importorskip("gguf")
    values = random_values((64, 256), 9)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_0)
    wanted = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_0)
    np.testing.assert_array_equal(
        unpack("int4-g32", "f32", (64, 256), memoryview(pack("int4-g32", "f32", values))), wanted
    )


def test_an_element_of_amx_bf16_lies_where_the_specification_says() -> None:
    rows, columns = 50, 70
    values = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    bits = bfloat16_bits(values)
    array = pack("amx-bf16", "bf16", values).view("<u2").reshape(2, 3, 2, 16, 16, 2)
    for r in range(rows):
        for c in range(columns):
            assert array[r // 32][c // 32][(r % 32) // 16][(c % 32) // 2][r % 16][c % 2] == bits[r, c]
    assert array.astype(np.int64).sum() == bits.astype(np.int64).sum()  # the rest is zeros


@pytest.mark.parametrize("layout", CODINGS)
def test_codes_and_scales_lie_where_the_specification_says(layout: str) -> None:
    rows, columns = 21, 300
    coding, quantised = coding_of(layout, columns), random_codes(layout, rows, columns, 3)
    packed = pack_codes(layout, (rows, columns), quantised)
    size, is_byte = 32 * coding.row_bytes, coding.form.bits == 8
    cells = packed[:size].view(np.int8).reshape(2, -1, 16, 4)
    for r in range(rows):
        for c in range(columns):
            byte = c if is_byte else c // 32 * 16 + c % 16
            found = int(cells[r // 16][byte // 4][r % 16][byte % 4])
            if not is_byte:
                found = found >> 4 if c % 32 >= 16 else ((found & 15) ^ 8) - 8
            assert found == quantised.codes[r, c]
    records, start = packed[size:].reshape(2, -1), 0
    for part in quantised.scales:
        width = 16 * part.shape[1] * part.itemsize
        lanes = np.ascontiguousarray(records[:, start : start + width]).view(part.dtype).reshape(2, -1, 16)
        start += width
        for r in range(rows):
            np.testing.assert_array_equal(lanes[r // 16, :, r % 16], part[r])
        assert (lanes[1, :, 5:] == 0).all(), "rows that were added"
    assert start == records.shape[1]
    assert (cells[1, :, 5:] == 0).all()


def by_rows(layout: str, quantised: Any, columns: int) -> Any:
    """As earlier releases wrote it."""
    codes, (scales,) = quantised.codes, quantised.scales
    data = codes[:, :columns] if layout == "int8" else Coding("int4-g32", columns).pack(codes) ^ np.uint8(0x88)
    flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    return np.concatenate([flat, np.zeros(-flat.size % 64, np.uint8), scales.reshape(-1).view(np.uint8)])


@pytest.mark.parametrize("shape", [(16, 64), (21, 70), (1, 33), (50, 96)])
@pytest.mark.parametrize("layout", list(BY_ROWS))
def test_what_an_earlier_release_wrote_row_by_row_is_read_and_can_be_put_into_cells(
    layout: str, shape: tuple[int, int]
) -> None:
    quantised = random_codes(BY_ROWS[layout], *shape)
    old = by_rows(layout, quantised, shape[1])
    assert old.nbytes == packed_bytes(layout, "f32", shape)
    new = pack_codes(BY_ROWS[layout], shape, quantised)
    np.testing.assert_array_equal(
        unpack(layout, "f32", shape, memoryview(old)), unpack(BY_ROWS[layout], "f32", shape, memoryview(new))
    )
    np.testing.assert_array_equal(to_cells(layout, shape, memoryview(old)), new)


def test_rows_that_overflow_or_are_zero_do_no_harm() -> None:
    values = np.array([[0.0] * 32, [1e30] * 32, [np.nan] + [1.0] * 31], np.float32)
    for layout in CELLS.values():
        with np.errstate(all="ignore"):
            back = unpack(layout, "f32", values.shape, memoryview(pack(layout, "f32", values)))
        assert (back[0] == 0).all()
        assert np.isfinite(back[1]).all()


@pytest.mark.parametrize("layout", WRITTEN)
def test_experts_are_packed_each_for_itself_or_row_by_row(layout: str) -> None:
    values = random_values((3, 33, 40), 5)
    whole = unpack(layout, "bf16", values.shape, memoryview(pack(layout, "bf16", values)))
    for expert in range(3):
        alone = values[expert]
        np.testing.assert_array_equal(
            whole[expert], unpack(layout, "bf16", alone.shape, memoryview(pack(layout, "bf16", alone)))
        )


def test_what_float16_cannot_say_is_refused_and_infinities_stay() -> None:
    fits = np.array([65504.0, -65519.0, np.inf, np.nan], np.float32)
    assert np.isinf(narrow(fits, "f16")).tolist() == [False, False, True, False]
    with pytest.raises(OverflowError, match="1e\\+06 is beyond float16"):
        narrow(np.array([1.0, 1e6], np.float32), "f16")
