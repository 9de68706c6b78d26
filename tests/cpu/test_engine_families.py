"""Every family against transformers, on every level of kernels that this machine can run: logits in float32 within
1e-4, and 64 greedy tokens identical (16 from mapped weights on torch's level)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from drive import Engine, logits_of, make_executor, make_request, make_row
from tiny import TINY_CONFIGS, VOCAB_SIZE
from tried import tried

from dovetail.engine.executor import CpuExecutor
from dovetail.native import levels
from dovetail.sched.turn import Turn

TOLERANCE = 1e-4
FAMILIES = sorted(TINY_CONFIGS)
LENGTH = 40


def make_tokens(seed: int, length: int = LENGTH) -> list[int]:
    return [random.Random(seed + i).randrange(VOCAB_SIZE) for i in range(length)]


@pytest.fixture(params=FAMILIES, scope="module")
def folder(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder(request.param)


@pytest.fixture(params=tried(levels()), scope="module")
def level(request: pytest.FixtureRequest) -> str:
    return request.param


class Reference:
    """What transformers says, each thing computed once for all levels of kernels."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._model.eval()
        self.logits = cache(self._logits)

    def _logits(self, tokens: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            return self._model(torch.tensor([tokens])).logits[0].float()

    def continues(self, prompt: list[int], text: list[int]) -> bool:
        """Whether this is the greedy text: each token is the likeliest after those before it, which one pass over all
        of them shows."""
        likeliest = self.logits((*prompt, *text[:-1]))[len(prompt) - 1 :].argmax(dim=-1)
        return likeliest.tolist() == text


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def executor(folder: Path, level: str) -> Iterator[CpuExecutor]:
    made = make_executor(folder, level=level)
    assert made.level == level
    yield made
    made.close()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, where: str = "") -> None:
    difference = (ours - theirs).abs().max().item()
    assert difference < TOLERANCE, f"logits differ by {difference:.2e} {where}"


CHUNKS = {
    "whole": [LENGTH],
    "token by token": [1] * LENGTH,
    "odd chunks": [7, 20, 13],
    "even chunks": [16, 16, 8],
    "one decode": [39, 1],
    "ten decodes": [30] + [1] * 10,
}


def test_logits_equal_transformers_in_any_chunking(reference: Reference, executor: CpuExecutor) -> None:
    tokens = make_tokens(1)
    theirs = reference.logits(tuple(tokens))
    for name, chunks in CHUNKS.items():
        ends = [sum(chunks[: i + 1]) - 1 for i in range(len(chunks))]
        for end, ours in zip(ends, logits_of(executor, tokens, chunks), strict=True):
            assert_close(ours, theirs[end], f"at {end}, {name}")


def test_logits_of_a_mixed_batch_equal_each_alone(reference: Reference, executor: CpuExecutor) -> None:
    """Prefills, chunks and decodes of different lengths in one iteration, on scattered blocks."""
    lengths, counts = [40, 23, 23, 9, 1, 31], [1, 1, 5, 9, 1, 1]
    tables = [[i * 12 + 11 - j for j in range(12)] for i in range(len(lengths))]
    sequences = [make_tokens(100 + i, length) for i, length in enumerate(lengths)]
    for i, (tokens, count) in enumerate(zip(sequences, counts, strict=True)):
        if len(tokens) > count:
            executor.run(Turn((make_row(i, tokens, 0, len(tokens) - count, tables[i]),)))
    rows = tuple(
        make_row(i, tokens, len(tokens) - count, count, tables[i])
        for i, (tokens, count) in enumerate(zip(sequences, counts, strict=True))
    )
    ours = executor.logits(Turn(rows))
    for i, tokens in enumerate(sequences):
        assert_close(ours[i], reference.logits(tuple(tokens))[-1])


@pytest.mark.parametrize("kind", ["resident", "mapped"])
def test_greedy_text_equals_transformers(folder: Path, reference: Reference, level: str, kind: str) -> None:
    prompts = [make_tokens(7, 5), make_tokens(8, 33), make_tokens(9, 70)]
    executor = make_executor(folder, weights=kind, level=level)
    count = 16 if (level, kind) == ("torch", "mapped") else 64  # the same operators as resident, and the slowest
    requests = [make_request(prompt, id=str(i), max_tokens=count) for i, prompt in enumerate(prompts)]
    ours = Engine(executor, max_turn_tokens=24).run(*requests)
    for i, prompt in enumerate(prompts):
        assert len(ours[str(i), 0]) == count
        assert reference.continues(prompt, ours[str(i), 0])
    executor.close()
