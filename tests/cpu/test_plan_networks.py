"""The wide ResNets as torch modules: as large as they are counted, and the same on shares of their rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dovetail.plan.chains import FLOAT, wide_resnet50
from dovetail.plan.networks import build_layers, run_layers, run_share, shares_of

WIDTH = 1


@pytest.fixture(scope="module")
def image() -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal((1, 3, 224, 224), dtype=np.float32))


def test_modules_have_the_weights_and_outputs_that_the_chain_counts(image: torch.Tensor) -> None:
    chain, x = wide_resnet50(WIDTH), image
    layers = build_layers(WIDTH, 0, len(chain.layers))
    for counted, layer in zip(chain.layers, layers, strict=True):
        assert x.numel() * FLOAT == counted.in_bytes, counted.name
        x = run_layers([layer], x)
        assert x.numel() * FLOAT == counted.out_bytes, counted.name
        assert counted.halo is None or x.shape[2] == counted.rows, counted.name
        weights = sum(parameter.numel() for parameter in layer.parameters()) * FLOAT
        assert weights == counted.weight_bytes, counted.name
    assert torch.isfinite(x).all()


def test_a_layer_has_the_same_weights_in_every_process() -> None:
    alone, together = build_layers(WIDTH, 5, 6)[0], build_layers(WIDTH, 4, 7)[1]
    for left, right in zip(alone.parameters(), together.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(("first", "end", "workers"), [(0, 9, 2), (3, 9, 3), (9, 15, 2)])
def test_workers_together_compute_what_one_does(image: torch.Tensor, first: int, end: int, workers: int) -> None:
    chain = wide_resnet50(WIDTH)
    x = run_layers(build_layers(WIDTH, 0, first), image)
    layers = build_layers(WIDTH, first, end)
    whole = run_layers(layers, x)
    parts = [
        run_share(layers, chain, first, share, x[:, :, share.inputs[0] : share.inputs[1]])
        for share in shares_of(chain, first, end, workers)
    ]
    joined = torch.cat(parts, dim=2)
    assert joined.shape == whole.shape
    assert (joined - whole).abs().max() <= 1e-4 * whole.abs().max()
