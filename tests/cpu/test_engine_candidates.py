"""Candidates that the native code finds: those of torch, so that the same seed draws the same token."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from drive import make_row

from dovetail.engine.grammar import Grammars
from dovetail.engine.sampler import sample
from dovetail.native.dispatch import load_kernels
from dovetail.sched.turn import TurnRow
from dovetail.types import SamplingParams

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="the native kernels were not built")
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.3, "top_k": 100, "top_p": 0.5},
    {"temperature": 0.01, "top_p": 0.9},
    {"temperature": 1e-30, "top_p": 0.9},
    {"temperature": 5.0, "top_p": 0.99},  # more than the candidates
    {"temperature": 1.0, "top_k": 700},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.1, "top_p": 0.9, "repetition_penalty": 1.3, "logit_bias": {3: 4.0, 5: -100.0}},
    {"temperature": 1.0},
    {"temperature": 0.0},
]


@pytest.fixture
def kernels() -> ModuleType:
    module = load_kernels()
    assert module is not None
    return module


def make_rows(count: int, seed: int) -> list[TurnRow]:
    return [
        make_row(i, [1, 3, 5], 2, 1, [0], sampling=SamplingParams(max_tokens=5, seed=seed + i, **WAYS[i % len(WAYS)]))
        for i in range(count)
    ]


@pytest.mark.parametrize("vocab", [12, 256, 257, 5000, 49_152])
@pytest.mark.parametrize("spread", [0.3, 3.0, 12.0])
def test_the_same_seed_draws_the_same_token(kernels: ModuleType, vocab: int, spread: float) -> None:
    grammars = Grammars(Path("none"), vocab, ())
    for round in range(4):
        generator = torch.Generator().manual_seed(round)
        logits = torch.randn(2 * len(WAYS), vocab, generator=generator) * spread + 7.0
        rows = make_rows(len(logits), seed=1000 * round)
        wanted = [outcome.token for outcome in sample(logits.clone(), rows, grammars)]
        assert [outcome.token for outcome in sample(logits.clone(), rows, grammars, None, kernels)] == wanted


def find(kernels: ModuleType, logits: torch.Tensor, width: int, sharpness: float = 1.0) -> tuple[Any, Any, Any]:
    at = np.arange(len(logits), dtype=np.int32)
    values, tokens = torch.full((len(logits), width), 7.0), torch.full((len(logits), width), -1)
    totals = torch.full((len(logits),), -1.0, dtype=torch.float64)
    kernels.candidates(2, logits, at, torch.full((len(logits),), sharpness), values, tokens, totals)
    return values, tokens, totals


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 1000, 16_384, 16_500, 49_157])
def test_the_largest_are_found_in_order_and_all_are_summed_up(kernels: ModuleType, vocab: int) -> None:
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    logits[1] = torch.arange(vocab) % 7  # many equals
    logits[2, (vocab + 1) // 2 :] = float("-inf")
    logits[3] = torch.arange(vocab).flip(0) * 1e-3
    for width in {1, min(vocab, 5), min(vocab, 256)}:
        values, tokens, totals = find(kernels, logits, width, 0.7)
        wanted = [sorted(range(vocab), key=lambda i, row=row: (-row[i], i))[:width] for row in logits.tolist()]
        finite = values > float("-inf")
        assert torch.equal(tokens[finite], torch.tensor(wanted)[finite])
        assert torch.equal(values, logits.gather(1, torch.tensor(wanted)))
        exact = torch.exp((logits.double() - logits.double().amax(1, keepdim=True)) * 0.7).sum(1)
        assert ((totals - exact).abs() / exact < 1e-6).all()


def test_what_is_not_a_number_neither_hides_nor_breaks_anything(kernels: ModuleType) -> None:
    logits = torch.randn(3, 5000)
    logits[0] = float("nan")
    logits[1, random.Random(0).sample(range(5000), 4900)] = float("nan")
    _, tokens, totals = find(kernels, logits, 256)
    assert totals[:2].isnan().all()
    assert totals[2].isfinite()
    assert ((tokens >= 0) & (tokens < 5000)).all()
    with pytest.raises(ValueError, match="no such row"):
        kernels.candidates(
            1, logits, np.array([3], dtype=np.int32), torch.ones(1), torch.ones(1, 4),
            torch.ones(1, 4, dtype=torch.int64), torch.ones(1, dtype=torch.float64),
        )  # fmt: skip
