"""Mixtures of experts on the native levels, where tiny models of the families do not reach: many tokens of one expert,
routers that fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drive import make_row

from dovetail.bench.iterations import RandomCheckpoint
from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.layouts import unpack
from dovetail.modelspec import ModelSpec, MoeSpec
from dovetail.native import levels
from dovetail.node.ports import HostTensor
from dovetail.sched.turn import Turn

LEVELS = levels()[1:]
pytestmark = pytest.mark.skipif(not LEVELS, reason="the native kernels were not built")
# So wide that 48 tokens fill a block of activations.
WIDE = ModelSpec("qwen3_moe", 64, 2048, 2, 2, 1, 16, 32, 512, moe=MoeSpec(9, 2, 24, True), dense_layers=(1,))


def make_checkpoint(stored: str, router_row: float = 0.0) -> RandomCheckpoint:
    """Experts 0 and 1 get nearly all tokens; `router_row` is added to the row of expert 5."""
    torch.manual_seed(0)
    checkpoint = RandomCheckpoint(WIDE, stored)
    name = "layers.0.router.weight"
    tensor = checkpoint._tensors[name]
    router = unpack(tensor.layout, tensor.dtype, tensor.shape, tensor.data)
    router[2:] *= 0.2
    router[5] += router_row
    checkpoint._tensors[name] = HostTensor("f32", tensor.shape, memoryview(router.reshape(-1).view(np.uint8)))
    return checkpoint


def run(checkpoint: RandomCheckpoint, level: str, count: int) -> torch.Tensor:
    executor = CpuExecutor(checkpoint, ExecutorConfig(kv_bytes=1 << 24, dtype="f32", level=level))
    executor.resize(executor.max_blocks)
    tokens = [(7 * i) % 64 for i in range(count)]
    logits = executor.logits(Turn((make_row(0, tokens, 0, count, list(range(-(-count // 16)))),)))[0]
    executor.close()
    return logits


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("stored", ["f32", "bf16"])
@pytest.mark.parametrize("count", [1, 48, 49, 200])
def test_more_tokens_of_an_expert_than_fit_into_a_block(level: str, stored: str, count: int) -> None:
    checkpoint = make_checkpoint(stored)
    exact = run(checkpoint, "torch", count)
    assert (run(checkpoint, level, count) - exact).norm() / exact.norm() < 1e-5


@pytest.mark.parametrize("level", LEVELS)
def test_a_router_that_is_not_a_number_does_not_go_unseen(level: str) -> None:
    assert run(make_checkpoint("f32", float("nan")), level, 20).isnan().all()
