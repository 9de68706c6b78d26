"""Each native kernel against a float64 reference: every level that runs here, odd shapes, poisoned outputs."""

from __future__ import annotations

import random
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from random_codes import random_codes
from torch import Tensor
from tried import tried

from dovetail.engine.native_model import READABLE_LAYOUTS
from dovetail.layouts import Quantised, coding_of, pack_codes, unpack
from dovetail.native import levels
from dovetail.native.dispatch import load_kernels

LEVELS = levels()[1:]
pytestmark = pytest.mark.skipif(not LEVELS, reason="the native kernels were not built")

# Relative error that operands of the type explain; of float16 also that its sums are rounded
ROUNDING = {"f32": 2e-6, "bf16": 6e-3, "f16": 1.5e-3}
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
NAN = float("nan")


@pytest.fixture
def kernels() -> ModuleType:
    module = load_kernels()
    assert module is not None
    return module


@pytest.fixture(params=tried(LEVELS))
def level(request: pytest.FixtureRequest) -> str:
    return request.param


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(ours: Tensor, reference: Tensor) -> float:
    assert not ours.isnan().any(), "an output was not written"
    return float((ours.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize(
    ("stored", "precision"), [("f32", "f32"), ("bf16", "f32"), ("bf16", "bf16"), ("f16", "f32"), ("f16", "f16")]
)
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (48, 576), (17, 96), (100, 70), (1, 33), (259, 160), (33, 1)])
def test_a_product_is_right_in_every_shape(
    kernels: ModuleType, level: str, rows: int, columns: int, stored: str, precision: str
) -> None:
    weight = draw(rows, columns, seed=1, dtype=TYPES[stored])
    for tokens in (1, 2, 3, 5, 6, 7, 8, 15, 16, 17, 31, 33, 64, 129):
        x = draw(tokens, columns, seed=2)
        out = torch.full((tokens, rows), NAN)
        kernels.linear(level, 2, precision, x, weight, out)
        error = relative_error(out, x.double() @ weight.double().T)
        assert error < ROUNDING[precision], f"of {tokens} tokens"


@pytest.mark.parametrize(("stored", "precision"), [("f32", "f32"), ("bf16", "f32"), ("bf16", "bf16"), ("f16", "f16")])
@pytest.mark.parametrize("columns", [176, 1100, 2100])
def test_a_row_gets_the_same_numbers_alone_and_in_company(
    kernels: ModuleType, level: str, columns: int, stored: str, precision: str
) -> None:
    weight, x = draw(203, columns, seed=1, dtype=TYPES[stored]), draw(250, columns, seed=2)
    for tokens in (2, 3, 4, 9, 21, 70, 250):
        together = torch.full((tokens, 203), NAN)
        kernels.linear(level, 2, precision, x[:tokens].clone(), weight, together)
        assert relative_error(together, x[:tokens].double() @ weight.double().T) < ROUNDING[precision]
        for token in {0, tokens // 2, tokens - 1}:
            alone = torch.full((1, 203), NAN)
            kernels.linear(level, 1, precision, x[token : token + 1].clone(), weight, alone)
            assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e30])
def test_float16_takes_activations_of_any_size(kernels: ModuleType, level: str, size: float) -> None:
    weight, x = draw(40, 200, seed=1, dtype=torch.float16), with_outliers(draw(30, 200, seed=2)) * size
    out = torch.full((30, 40), NAN)
    kernels.linear(level, 2, "f16", x, weight, out)
    assert relative_error(out / size, (x.double() / size) @ weight.double().T) < ROUNDING["f16"]


def test_what_is_not_a_number_stays_visible(kernels: ModuleType, level: str) -> None:
    for precision in ("f32", "f16"):
        weight, x = draw(40, 64, seed=1, dtype=TYPES[precision]), draw(3, 64, seed=2)
        weight[7, 13] = NAN
        x[1, 5] = float("inf")
        out = torch.zeros(3, 40)
        kernels.linear(level, 2, precision, x, weight, out)
        assert out[:, 7].isnan().all()
        assert not out[1].isfinite().any()
    gated = torch.zeros(9)
    kernels.gate(level, 0, torch.tensor([NAN] + [1.0] * 8), torch.ones(9), gated)
    assert gated[0].isnan()
    assert not gated[1:].isnan().any()


SHAPES = [(64, 64), (48, 576), (17, 96), (100, 70), (1, 33), (259, 160), (33, 1), (40, 2048)]


def quantise(layout: str, quantised: Quantised, rows: int, columns: int) -> tuple[Any, Tensor, Tensor]:
    """A matrix as the store keeps it, the values that it stands for, and how large the terms of each value are."""
    data = pack_codes(layout, (rows, columns), quantised)
    terms = Quantised(np.abs(quantised.codes.astype(np.int16)), tuple(np.abs(part) for part in quantised.scales))
    sizes = coding_of(layout, columns).dequantise(terms)  # minimums of nested scales count against it
    values = torch.from_numpy(unpack(layout, "f32", (rows, columns), memoryview(data)))
    return data, values, torch.from_numpy(np.abs(sizes)) + values.abs()


@lru_cache(maxsize=16)
def drawn(layout: str, rows: int, columns: int, seed: int = 1) -> tuple[Any, Tensor, Tensor]:
    return quantise(layout, random_codes(layout, rows, columns, seed), rows, columns)


def digit_step(x: Tensor) -> Tensor:
    """Of each token: distance between two numbers that its digits can say."""
    size = x.double().abs()
    most, common = size.amax(1), 8 * size.mean(1)
    return torch.minimum(most / 127, torch.maximum(common / 127, most / (127 * 128)))


def with_outliers(x: Tensor) -> Tensor:
    """As activations are: in a few columns much larger, in one token far beyond all."""
    x = x.clone()
    x[:, ::29] *= 60.0
    x[0, 0] *= 1000.0
    return x


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("layout", READABLE_LAYOUTS)
def test_a_quantised_product_errs_by_no_more_than_its_activations_were_rounded(
    kernels: ModuleType, level: str, layout: str, rows: int, columns: int
) -> None:
    data, weight, terms = drawn(layout, rows, columns)
    sizes = weight.double().abs().sum(1)
    for tokens in (1, 2, 3, 4, 5, 8, 15, 17, 33, 64):
        plain = draw(tokens, columns, seed=2)
        for x in (plain, with_outliers(plain)):
            out = torch.full((tokens, rows), NAN)
            kernels.linear_quantised(level, 2, x, data, layout, out)
            reference = x.double() @ weight.double().T
            allowed = digit_step(x)[:, None] * sizes / 2 * 1.001 + 1e-6 * (x.double().abs() @ terms.double().T)
            # Sums that run on over 256 columns are kept to a few units of codes times digits.
            allowed += digit_step(x)[:, None] * terms.double().amax(1) * 0.02 * -(-columns // 256)
            assert not out.isnan().any(), f"an output was not written, of {tokens} tokens"
            within = ((out.double() - reference).abs() <= allowed).all()
            assert within, f"of {tokens} tokens, {'with outliers' if x is not plain else 'without outliers'}"


@pytest.mark.parametrize("outliers", ["none", "few", "many"])
@pytest.mark.parametrize("layout", READABLE_LAYOUTS)
def test_a_quantised_row_gets_the_same_numbers_alone_and_in_company(
    kernels: ModuleType, level: str, layout: str, outliers: str
) -> None:
    data, _, _ = drawn(layout, 203, 336)
    drawn_x = draw(70, 336, seed=2)
    x = {"none": drawn_x, "few": with_outliers(drawn_x), "many": drawn_x**5}[outliers]
    together, alone = torch.empty(70, 203), torch.empty(1, 203)
    kernels.linear_quantised(level, 2, x, data, layout, together)
    for token in (0, 5, 16, 47, 69):
        kernels.linear_quantised(level, 1, x[token : token + 1].clone(), data, layout, alone)
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("layout", READABLE_LAYOUTS)
def test_quantised_products_are_the_same_numbers_on_every_level(kernels: ModuleType, layout: str) -> None:
    data, _, _ = drawn(layout, 83, 352)
    x = with_outliers(draw(21, 352, seed=2))
    found = [torch.empty(21, 83) for _ in LEVELS]
    for level, out in zip(LEVELS, found, strict=True):
        kernels.linear_quantised(level, 2, x, data, layout, out)
    assert all(torch.equal(found[0], out) for out in found)


@pytest.mark.parametrize("tokens", [1, 8, 37])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_lowest_code_of_four_bits_is_multiplied_as_any_other(
    kernels: ModuleType, level: str, tokens: int, sign: int
) -> None:
    """-8, which becomes -128 in a byte, by digits as large as they get: the sums are whole numbers and exact."""
    codes = np.full((40, 352), -8, np.int8)
    codes[:, ::5] = 7
    quantised = Quantised(codes, (np.full((40, 11), -0.5, np.float16),))
    data = pack_codes("int4-g32", (40, 352), quantised)
    x, out = torch.full((tokens, 352), sign * 3.0), torch.full((tokens, 40), float("nan"))
    x[:, 1::2] *= -1
    kernels.linear_quantised(level, 2, x, data, "int4-g32", out)
    wanted = x.double() @ torch.from_numpy(codes * -0.5).double().T
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("bad", [NAN, float("inf"), float("-inf")])
@pytest.mark.parametrize("layout", READABLE_LAYOUTS)
def test_digits_do_not_hide_what_is_not_a_number(kernels: ModuleType, level: str, layout: str, bad: float) -> None:
    data, _, _ = drawn(layout, 40, 70)
    x = draw(6, 70, seed=2)
    x[1, 69] = bad
    x[2] = 0.0
    x[3] *= 1e33
    x[4] *= 1e-37
    out = torch.full((6, 40), NAN)
    kernels.linear_quantised(level, 2, x, data, layout, out)
    assert out[1].isnan().all()
    assert (out[2] == 0.0).all()
    assert out[[0, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("layout", READABLE_LAYOUTS)
def test_sums_of_digits_do_not_overflow(kernels: ModuleType, level: str, layout: str) -> None:
    columns = 32768
    largest = Quantised(*random_codes(layout, 5, columns))
    largest.codes[:] = 7 if coding_of(layout, columns).form.bits == 4 else 127
    for part in largest.scales:
        part[:] = 127 if part.dtype.kind == "u" else 1  # an exponent of 127 says 1
    data, weight, _ = quantise(layout, largest, 5, columns)
    x = torch.ones(3, columns)
    x[1, ::2] = 1000.0
    x[2, : columns // 8] = 1000.0  # as many high digits as the scale admits
    out = torch.full((3, 5), NAN)
    kernels.linear_quantised(level, 2, x, data, layout, out)
    reference = x.double() @ weight.double().T
    assert ((out - reference).abs() <= digit_step(x)[:, None] * weight.double().abs().sum(1)).all()


def stored_as_codes(kernels: ModuleType, level: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n, d + 4] of codes and scale, and the values that they stand for."""
    rows = torch.full((len(x), x.shape[1] + 4), 85, dtype=torch.int8)
    kernels.store_codes(level, x, rows)
    scales = rows[:, x.shape[1] :].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return rows, rows[:, : x.shape[1]] * scales


def paged_cache(
    kernels: ModuleType, level: str, head_dim: int, dtype: torch.dtype, length: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """[blocks, 2, 16, width] with keys and values of so many tokens at random places, their table, and the numbers that
    they stand for. What nobody wrote must not be read: it is no number, of codes their scales are none."""
    size, blocks = 16, -(-length // 16)
    table = torch.tensor(random.Random(length).sample(range(blocks + 3), blocks), dtype=torch.int32)
    if dtype == torch.int8:
        parts = [stored_as_codes(kernels, level, draw(length, head_dim, seed=seed)) for seed in (3, 4)]
    else:
        parts = [(x, x) for x in (draw(length, head_dim, seed=seed, dtype=dtype) for seed in (3, 4))]
    width, unwritten = parts[0][0].shape[1], -1 if dtype == torch.int8 else NAN
    cache, at = torch.full((blocks + 3, 2, size, width), unwritten, dtype=dtype), torch.arange(length)
    for part, (rows, _) in enumerate(parts):
        cache[:, part].index_put_((table[at // size], at % size), rows)
    return cache, table, [values for _, values in parts]


ATTENTION_CASES = [
    (1, 1, 1, 0, 0.0),
    (16, 1, 3, 0, 0.0),
    (17, 17, 2, 0, 0.0),
    (63, 5, 7, 0, 30.0),
    (65, 1, 4, 12, 0.0),
    (200, 16, 3, 40, 50.0),
    (8000, 1, 6, 0, 0.0),
    (3000, 9, 4, 1000, 0.0),
]


def attention_reference(q: Tensor, k: Tensor, v: Tensor, position: int, window: int, cap: float) -> Tensor:
    tokens, _, d = q.shape
    scores = torch.einsum("thd,kd->thk", q.double(), k.double()) * d**-0.5
    if cap:
        scores = torch.tanh(scores / cap) * cap
    distance = (position + torch.arange(tokens))[:, None] - torch.arange(len(k))
    seen = (distance >= 0) & ((distance < window) if window else torch.tensor(True))
    weights = torch.softmax(scores.masked_fill(~seen[:, None], float("-inf")), dim=-1)
    return torch.einsum("thk,kd->thd", weights, v.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_attention_is_right_for_every_head_size_and_length(
    kernels: ModuleType, level: str, head_dim: int, dtype: torch.dtype
) -> None:
    for case in ATTENTION_CASES:
        length, tokens, heads, window, cap = case
        cache, table, (k, v) = paged_cache(kernels, level, head_dim, dtype, length)
        q = draw(tokens, heads, head_dim, seed=5)
        out = torch.full_like(q, NAN)
        position = length - tokens
        kernels.attend(level, q, cache, table, position, window, head_dim**-0.5, cap, out)
        rounds = level == "amx" and dtype == torch.bfloat16  # queries and weights become bf16 there
        allowed = ROUNDING["bf16"] if rounds else 1e-5 if cap else 2e-6
        assert relative_error(out, attention_reference(q, k, v, position, window, cap)) < allowed, f"of {case}"


@pytest.mark.parametrize("head_dim", [2, 8, 16, 20, 64, 80, 96, 128, 256])
def test_attention_over_a_cache_of_int8_is_right_for_every_head_size_and_length(
    kernels: ModuleType, level: str, head_dim: int
) -> None:
    for case in ATTENTION_CASES:
        length, tokens, heads, window, cap = case
        cache, table, meant = paged_cache(kernels, level, head_dim, torch.int8, length)
        q = draw(tokens, heads, head_dim, seed=5)
        out = torch.full_like(q, NAN)
        position = length - tokens
        kernels.attend(level, q, cache, table, position, window, head_dim**-0.5, cap, out)
        in_bytes = level in ("dotprod", "i8mm") and head_dim % 16 == 0  # queries and weights have 15 bits there
        allowed = 3e-4 if in_bytes else 1e-5 if cap else 2e-6
        assert relative_error(out, attention_reference(q, *meant, position, window, cap)) < allowed, f"of {case}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize(("length", "tokens", "heads", "window"), [(19, 16, 1, 0), (131, 6, 7, 0), (700, 9, 3, 600)])
def test_a_query_gets_the_same_numbers_alone_and_in_company(
    kernels: ModuleType,
    level: str,
    head_dim: int,
    dtype: torch.dtype,
    length: int,
    tokens: int,
    heads: int,
    window: int,
) -> None:
    if level == "amx" and dtype == torch.bfloat16:
        pytest.skip("its tiles round the weights of more than eight queries to bf16")
    cache, table, _ = paged_cache(kernels, level, head_dim, dtype, length)
    q, position = draw(tokens, heads, head_dim, seed=5), length - tokens
    together, alone = torch.full_like(q, NAN), torch.full((1, heads, head_dim), NAN)
    kernels.attend(level, q, cache, table, position, window, head_dim**-0.5, 0.0, together)
    for token in range(tokens):
        one = q[token : token + 1].clone()
        kernels.attend(level, one, cache, table, position + token, window, head_dim**-0.5, 0.0, alone)
        assert torch.equal(alone[0], together[token])


@pytest.mark.parametrize("count", [1, 2, 20, 64, 80, 256])
def test_codes_of_a_cache_are_the_nearest_and_hide_nothing(kernels: ModuleType, level: str, count: int) -> None:
    x = draw(6, count, seed=1) * torch.tensor([1.0, 1e-20, 1e20, 0.0, 1e-38, 3.0])[:, None]
    rows, values = stored_as_codes(kernels, level, x)
    largest = x.abs().amax(1, keepdim=True)
    assert ((values - x).abs() <= largest / 254 * 1.001 + 1e-28).all()
    assert (rows[3, :count] == 0).all()
    for bad in (NAN, float("inf"), float("-inf")):
        x[0, -1] = bad
        assert stored_as_codes(kernels, level, x)[1][0].isnan().all()


@pytest.mark.parametrize("count", [1, 3, 16, 33, 576, 1000])
def test_norms_and_gates_are_right(kernels: ModuleType, level: str, count: int) -> None:
    x, weight = draw(count, seed=1), draw(count, seed=2)
    out = torch.full((count,), NAN)
    kernels.norm(level, x, weight, 1e-6, out)
    reference = x.double() / (x.double().square().mean() + 1e-6).sqrt() * weight.double()
    assert relative_error(out, reference) < 1e-6
    gates = (
        torch.nn.functional.silu,
        torch.nn.functional.gelu,
        lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
        torch.nn.functional.relu,
    )
    wide = x * 20.0
    for index, activation in enumerate(gates):
        out.fill_(NAN)
        kernels.gate(level, index, wide, weight, out)
        reference = activation(wide.double()) * weight.double()
        assert relative_error(out, reference + 1e-30) < 2e-6


def test_the_largest_is_found_and_a_nan_reported(kernels: ModuleType, level: str) -> None:
    for count in (1, 7, 64, 49157):
        x = draw(count, seed=count)
        assert kernels.argmax(level, x) == int(x.argmax())
        for at in {0, count // 2, count - 1}:
            poisoned = x.clone()
            poisoned[at] = NAN
            assert kernels.argmax(level, poisoned) == -1
    barred = torch.full((100,), float("-inf"))
    barred[41] = -3.0
    assert kernels.argmax(level, barred) == 41
    assert kernels.argmax(level, torch.zeros(50)) == 0
