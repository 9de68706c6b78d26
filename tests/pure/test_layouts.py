"""Layouts: packing and unpacking undo each other, sizes are as announced, and elements lie where the text says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.layouts import LAYOUTS, Int4, Int8, bfloat16_bits, pack, packed_bytes, packer, unpack, unpack_tiles

SHAPES = st.one_of(
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40)),
)


def random_values(shape: tuple[int, ...], seed: int) -> Any:
    generator = np.random.default_rng(seed)
    scale = np.exp(generator.uniform(-8, 8, (*shape[:-1], 1)))
    return (generator.standard_normal(shape) * scale).astype(np.float32)


@given(shape=SHAPES, seed=st.integers(0, 2**32), layout=st.sampled_from(LAYOUTS))
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
    packed = pack("int8" if wide else "int4", "f32", values)
    name = "int8" if wide else "int4"
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


def test_elements_of_int4_lie_where_the_specification_says() -> None:
    values = np.zeros((2, 40), np.float32)
    values[1, :7] = [7, -7, 1, 2, 3, -1, 0]
    values[1, 16], values[1, 39] = -3, 0.5
    packed = pack("int4", "f32", values)
    nibbles, scales = packed[:64].reshape(2, 2, 16), packed[64:].view("<f2").reshape(2, 2)
    assert list(nibbles[1, 0, :7] & 15) == [15, 1, 9, 10, 11, 7, 8]
    assert nibbles[1, 0, 0] >> 4 == 8 - 3  # element 16
    assert nibbles[1, 1, 7] & 15 == 15  # element 39 of the second group, alone in it
    assert scales[1, 0] == 1
    assert scales[1, 1] == np.float16(0.5 / 7)
    assert (scales[0] == 0).all()
    assert (nibbles[0] == 0x88).all()


def test_rows_that_overflow_or_are_zero_do_no_harm() -> None:
    values = np.array([[0.0] * 32, [1e30] * 32, [np.nan] + [1.0] * 31], np.float32)
    for layout in ("int8", "int4"):
        with np.errstate(all="ignore"):
            back = unpack(layout, "f32", values.shape, memoryview(pack(layout, "f32", values)))
        assert (back[0] == 0).all()
        assert np.isfinite(back[1]).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_packed_each_for_itself_or_row_by_row(layout: str) -> None:
    values = random_values((3, 33, 40), 5)
    whole = unpack(layout, "bf16", values.shape, memoryview(pack(layout, "bf16", values)))
    for expert in range(3):
        alone = values[expert]
        np.testing.assert_array_equal(
            whole[expert], unpack(layout, "bf16", alone.shape, memoryview(pack(layout, "bf16", alone)))
        )
