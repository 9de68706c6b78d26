"""Mixtures of experts, sinks and latents on the native levels, where tiny models of the families do not reach: many
tokens of one expert, routers that fail, contexts whose attention is computed in parts, quantised matrices of heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from drive import logits_of, make_row
from tried import tried

from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.layouts import unpack
from dovetail.modelspec import MlaSpec, ModelSpec, MoeSpec
from dovetail.native import levels
from dovetail.node.ports import HostTensor
from dovetail.sched.turn import Turn
from dovetail_bench.iterations import RandomCheckpoint

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


@pytest.mark.parametrize("level", tried(LEVELS))
@pytest.mark.parametrize("stored", ["f32", "bf16"])
@pytest.mark.parametrize("count", [1, 48, 49, 200])
def test_more_tokens_of_an_expert_than_fit_into_a_block(level: str, stored: str, count: int) -> None:
    checkpoint = make_checkpoint(stored)
    exact = run(checkpoint, "torch", count)
    assert (run(checkpoint, level, count) - exact).norm() / exact.norm() < 1e-5


@pytest.mark.parametrize("level", tried(LEVELS))
def test_a_router_that_is_not_a_number_does_not_go_unseen(level: str) -> None:
    assert run(make_checkpoint("f32", float("nan")), level, 20).isnan().all()


SINKS = ModelSpec(
    "gpt_oss", 64, 64, 2, 4, 2, 16, 32, 1024, qkv_bias=True, attention_sinks=True, windows=(0, 40),
    moe=MoeSpec(5, 2, 24, True, biases=True, alpha=1.7, limit=0.5),
)  # fmt: skip
LATENTS = ModelSpec(
    "deepseek_v2", 64, 64, 2, 4, 1, 40, 32, 1024, mla=MlaSpec(32, 8, 12, 16), dense_layers=(0,),
    moe=MoeSpec(6, 2, 24, True, shared_size=40, scale=1.5, groups=3, groups_per_token=2),
)  # fmt: skip


def decoded(checkpoint: RandomCheckpoint, level: str, chunks: Sequence[int] = (600, 1)) -> torch.Tensor:
    """Of the last token of so many, whose attention is merged of two parts where it is alone."""
    executor = CpuExecutor(checkpoint, ExecutorConfig(kv_bytes=1 << 24, dtype="f32", level=level))
    executor.resize(executor.max_blocks)
    tokens = [(7 * i) % 64 for i in range(sum(chunks))]
    logits = logits_of(executor, tokens, list(chunks))[-1]
    executor.close()
    return logits


@pytest.mark.parametrize("level", tried(LEVELS))
@pytest.mark.parametrize("spec", [SINKS, LATENTS], ids=lambda spec: spec.family)
def test_a_token_behind_a_long_context_is_the_same_alone_and_in_a_part_of_a_prompt(spec: ModelSpec, level: str) -> None:
    """Byte for byte: an answer that is computed again elsewhere goes on as it would have gone on."""
    torch.manual_seed(0)
    checkpoint = RandomCheckpoint(spec, "f32", "plain")
    alone = decoded(checkpoint, level, [500, *[1] * 101])
    for chunks in ([601], [64] * 9 + [25], [598, 3], [520, 32, 48, 1]):
        assert torch.equal(decoded(checkpoint, level, chunks), alone), chunks


@pytest.mark.parametrize("level", tried(LEVELS))
@pytest.mark.parametrize(("layout", "tolerance"), [("plain", 1e-5), ("int8", 0.02)])
@pytest.mark.parametrize("spec", [SINKS, LATENTS], ids=lambda spec: spec.family)
def test_a_long_context_gives_the_logits_of_the_torch_level(
    spec: ModelSpec, layout: str, tolerance: float, level: str
) -> None:
    torch.manual_seed(0)
    checkpoint = RandomCheckpoint(spec, "f32", layout)
    exact = decoded(checkpoint, "torch")
    assert (decoded(checkpoint, level) - exact).norm() / exact.norm() < tolerance
