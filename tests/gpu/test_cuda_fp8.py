"""Matrices of 8-bit floats on a GPU: products against the same numbers in float64, whole models against bf16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_prompts import logits

from dovetail.engine.executor import ExecutorConfig
from dovetail.modelspec import FP8, is_fp8_matrix
from dovetail.store import Catalogue, open_checkpoint

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(not HAS_FP8, reason="no GPU with products of 8-bit floats")
if HAS_FP8:
    from dovetail.engine.devices.cuda.device import CudaDevice
    from dovetail.engine.devices.cuda.fp8 import Fp8Matrix, round_rows
    from dovetail.engine.devices.cuda.products import gated_linear, linear


@pytest.fixture(scope="module")
def device() -> Any:
    return CudaDevice("cuda:0")


def make_matrix(rows: int, columns: int) -> Any:
    values = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * torch.rand(rows, 1, device="cuda")
    return Fp8Matrix(*round_rows(values.bfloat16()))


def wide(rounded: Any) -> torch.Tensor:
    return rounded.values.double() * rounded.scales.double()[:, None]


@pytest.mark.parametrize("columns", [16, 80, 896, 4096, 14336])
def test_a_row_is_rounded_so_that_its_largest_stays(device: Any, columns: int) -> None:
    x = torch.randn(9, columns, device="cuda", dtype=torch.bfloat16) * 3
    x[4] = 0
    rounded = round_rows(x)
    wanted = (x.float() / rounded.scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert (rounded.values.float() - wanted.float()).abs().max() <= 32, "at most a tie rounded the other way"
    largest = x.float().abs().max(dim=1).values
    assert torch.allclose(wide(rounded).float().abs().max(dim=1).values, largest, rtol=1e-3)
    assert (wide(rounded) - x.double()).abs().max() <= largest.max() * 0.04


@pytest.mark.parametrize("count", [1, 2, 7, 17, 100, 130])
@pytest.mark.parametrize("shape", [(48, 64), (896, 4864), (6144, 4096)], ids=str)
def test_products_are_those_of_the_rounded_numbers(device: Any, count: int, shape: tuple[int, int]) -> None:
    matrix = make_matrix(*shape)
    x = torch.randn(count, shape[1], device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(shape[0], device="cuda", dtype=torch.bfloat16)
    given = x.double() if count == 1 else wide(round_rows(x))
    wanted = given @ wide(matrix).T
    for own, ours in ((0.0, linear(x, matrix, None)), (bias.double(), linear(x, matrix, bias))):
        assert (ours.double() - wanted - own).abs().max() < 0.012 * wanted.abs().max()


@pytest.mark.parametrize("count", [1, 5, 40])
def test_gated_products_too(device: Any, count: int) -> None:
    matrix, x = make_matrix(2 * 160, 96), torch.randn(count, 96, device="cuda", dtype=torch.bfloat16)
    given = x.double() if count == 1 else wide(round_rows(x))
    gate, up = (given @ wide(matrix).T).chunk(2, dim=1)
    wanted = torch.nn.functional.silu(gate) * up
    assert (gated_linear(x, matrix, "silu").double() - wanted).abs().max() < 0.02 * wanted.abs().max()


def distribution(executor: Any, lengths: list[int]) -> torch.Tensor:
    return logits(executor, lengths).double().log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
@pytest.mark.parametrize("lengths", [[9], [40, 1, 5], [150, 70]], ids=str)
def test_a_model_says_nearly_what_it_says_in_bf16(
    family: str, lengths: list[int], tiny_folder: Callable[[str], Path], tmp_path: Path, device: Any
) -> None:
    card = Catalogue(tmp_path / "store").pull(str(tiny_folder(family)), name="m")
    config = {"kv_bytes": 1 << 24, "max_batch": 16}
    plain = device.executor(open_checkpoint(Path(card.path)), ExecutorConfig(dtype="bf16", **config))
    rounded = device.executor(open_checkpoint(Path(card.path)), ExecutorConfig(dtype=FP8, **config))
    spec = rounded.spec
    assert any(is_fp8_matrix(*one) for one in spec.tensors()), "this model has no matrix to round"
    assert rounded.weight_bytes < plain.weight_bytes
    assert abs(rounded.weight_bytes - spec.weight_bytes(FP8)) <= 256 * 2 * len(list(spec.tensors()))
    theirs, ours = distribution(plain, lengths), distribution(rounded, lengths)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1)
    assert divergence.max() < 0.05
    assert (theirs - ours).abs().max() > 0, "nothing was rounded"
