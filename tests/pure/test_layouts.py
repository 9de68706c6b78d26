"""Layouts: packing and unpacking undo each other, sizes are as announced, and elements lie where the text says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.layouts import (
    CELLS,
    Int4,
    Int8,
    Quantised,
    bfloat16_bits,
    codes_and_scales,
    coding_of,
    narrow,
    pack,
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


@given(rows=st.integers(1, 70), columns=st.integers(1, 100), seed=st.integers(0, 2**32), wide=st.booleans())
@settings(max_examples=100, deadline=None)
def test_codes_and_scales_of_others_are_kept_to_the_bit(rows: int, columns: int, seed: int, wide: bool) -> None:
    layout, generator = CELLS["int8" if wide else "int4"], np.random.default_rng(seed)
    coding = coding_of(layout, columns)
    lowest, highest = (-127, 127) if wide else (-8, 7)
    codes = generator.integers(lowest, highest, (rows, columns), np.int8, endpoint=True)
    padded = codes if wide else np.pad(codes, ((0, 0), (0, -columns % 32)))
    scales = generator.standard_normal((rows, coding.groups)).astype(coding.scale_type)
    data = pack_codes(layout, (rows, columns), Quantised(padded, scales))
    assert data.nbytes == packed_bytes(layout, "f32", (rows, columns))
    back = unpack_codes(layout, (rows, columns), memoryview(data))
    np.testing.assert_array_equal(back.codes, padded)
    np.testing.assert_array_equal(back.scales, scales)
    values = unpack(layout, "f32", (rows, columns), memoryview(data))
    each = scales.astype(np.float32) if wide else np.repeat(scales.astype(np.float32), 32, axis=1)[:, :columns]
    np.testing.assert_array_equal(values, codes * each)
    part = coding.part(back, slice(0, rows), slice(0, columns))
    assert part is not None
    np.testing.assert_array_equal(part.codes, padded)
    if columns > 40:
        cut = coding.part(back, slice(1, rows), slice(32, columns))
        assert cut is not None
        np.testing.assert_array_equal(cut.codes, padded[1:, 32:])
        np.testing.assert_array_equal(cut.scales, scales[1:] if wide else scales[1:, 1:])
        assert (coding.part(back, slice(0, rows), slice(0, 40)) is None) == (not wide)


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
    layout: Int8 | Int4 = Int8(columns) if wide else Int4(columns)
    values = random_values((rows, columns), seed)
    quantised = layout.quantise(values)
    np.testing.assert_array_equal(layout.unpack(layout.pack(quantised.codes)), quantised.codes)
    assert np.abs(quantised.codes).max() <= (127 if wide else 7)
    back = layout.dequantise(quantised.codes, quantised.scales)
    step = np.repeat(np.asarray(quantised.scales, np.float32).reshape(rows, -1), columns if wide else 32, axis=1)
    # Rounding a scale to float16 can cut off up to 2⁻¹¹ of the largest value, which is 7 steps; below 2⁻¹⁴ more.
    slack = 1e-5 if wide else 7 * 2.0**-11
    assert (np.abs(back - values) <= step[:, :columns] * (0.5 + slack) + (0 if wide else 7 * 2.0**-25)).all()
    name = CELLS["int8" if wide else "int4"]
    packed = pack(name, "f32", values)
    np.testing.assert_array_equal(unpack(name, "f32", (rows, columns), memoryview(packed)), back)


def test_an_element_of_amx_bf16_lies_where_the_specification_says() -> None:
    rows, columns = 50, 70
    values = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    bits = bfloat16_bits(values)
    array = pack("amx-bf16", "bf16", values).view("<u2").reshape(2, 3, 2, 16, 16, 2)
    for r in range(rows):
        for c in range(columns):
            assert array[r // 32][c // 32][(r % 32) // 16][(c % 32) // 2][r % 16][c % 2] == bits[r, c]
    assert array.astype(np.int64).sum() == bits.astype(np.int64).sum()  # the rest is zeros


def test_elements_of_int8_cells_lie_where_the_specification_says() -> None:
    rows, columns = 21, 70
    values = np.random.default_rng(3).integers(-126, 127, (rows, columns)).astype(np.float32)
    values[:, 0] = 127
    packed = pack("int8-cells", "f32", values)
    cells, scales = packed[: 32 * 128].view(np.int8).reshape(2, 32, 16, 4), packed[32 * 128 :].view("<f4")
    for r in range(rows):
        for c in range(columns):
            assert cells[r // 16][c // 4][r % 16][c % 4] == values[r, c]
    assert cells.astype(int).sum() == values.sum()  # the rest is zeros
    assert list(scales) == [1] * rows + [0] * 11


def test_elements_of_int4_cells_lie_where_the_specification_says() -> None:
    rows, columns = 18, 40
    values = np.random.default_rng(4).integers(-6, 7, (rows, columns)).astype(np.float32)
    values[:, [0, 32]] = 7
    values[3, 32:] = [0.5] + [0] * 7
    packed = pack("int4-cells", "f32", values)
    cells, scales = packed[:1024].reshape(2, 2, 4, 16, 4), packed[1024:].view("<f2").reshape(2, 2, 16)
    for r in range(rows):
        for c in range(columns):
            byte = int(cells[r // 16][c // 32][c % 16 // 4][r % 16][c % 4])
            code = (byte >> 4 if c % 32 >= 16 else byte & 15) ^ 8
            assert (code - 8) * float(scales[r // 16][c // 32][r % 16]) == pytest.approx(values[r, c], rel=1e-3)
    assert scales[0, 1, 3] == np.float16(0.5 / 7)
    assert (scales[1, :, 2:] == 0).all()
    assert (cells[1, :, :, 2:] == 0).all()


def by_rows(layout: str, values: Any) -> Any:
    """As earlier releases wrote it."""
    form = Int8(values.shape[1]) if layout == "int8" else Int4(values.shape[1])
    codes, scales = form.quantise(values)
    data = codes.view(np.uint8) if layout == "int8" else form.pack(codes) ^ np.uint8(0x88)
    flat = data.reshape(-1)
    return np.concatenate([flat, np.zeros(-flat.size % 64, np.uint8), scales.reshape(-1).view(np.uint8)])


@pytest.mark.parametrize("shape", [(16, 64), (21, 70), (1, 33), (50, 96)])
@pytest.mark.parametrize("layout", list(CELLS))
def test_what_an_earlier_release_wrote_row_by_row_is_read_and_can_be_put_into_cells(
    layout: str, shape: tuple[int, int]
) -> None:
    values = random_values(shape, 7)
    old = by_rows(layout, values)
    assert old.nbytes == packed_bytes(layout, "f32", shape)
    new = pack(CELLS[layout], "f32", values)
    np.testing.assert_array_equal(
        unpack(layout, "f32", shape, memoryview(old)), unpack(CELLS[layout], "f32", shape, memoryview(new))
    )
    np.testing.assert_array_equal(to_cells(layout, shape, memoryview(old)), new)


def test_kernels_take_cells_where_they_lie() -> None:
    for layout in CELLS.values():
        data = pack(layout, "f32", random_values((40, 96), 8))
        assert all(np.shares_memory(part, data) for part in codes_and_scales(layout, (40, 96), memoryview(data)))


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
