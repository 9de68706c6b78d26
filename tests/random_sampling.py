"""Random mixtures of sampling parameters, over texts and logits that have ties: for samplers that have to agree."""

from __future__ import annotations

import random
from typing import Any

import torch

from dovetail.sched.turn import TurnRow
from dovetail.types import SamplingParams, ThinkingLimit


def random_sampling(chance: random.Random, vocab: int) -> SamplingParams:
    options: dict[str, Any] = {"temperature": chance.choice([0.0, 0.01, 0.3, 0.7, 1.0, 1.0, 1.0, 1.7, 30.0])}
    extras: dict[str, Any] = {
        "top_k": chance.choice([1, 2, 40, 1000, vocab - 1, vocab, vocab + 5]),
        "top_p": chance.choice([1e-9, 0.1, 0.5, 0.9, 0.9999, 1.0]),
        "min_p": chance.choice([0.001, 0.2, 1.0]),
        "repetition_penalty": chance.choice([0.8, 1.1, 2.0, 1e-300]),
        "presence_penalty": chance.choice([-1.0, 0.3, 2.0]),
        "frequency_penalty": chance.choice([-0.5, 0.1, 1.5]),
        "logit_bias": {chance.randrange(vocab): chance.choice([-100.0, 0.5, 7.0]) for _ in range(5)},
        "allowed_token_ids": tuple(chance.randrange(vocab) for _ in range(chance.choice([1, 30, 3000]))),
        "bad_words": (*((chance.randrange(vocab),) for _ in range(9)), (3, 5), (4, 4, 6), (5, vocab + 7)),
        "stop_token_ids": (0, 2, vocab + 9),
    }
    for name in chance.sample(sorted(extras), chance.randrange(6)):
        options[name] = extras[name]
    if "stop_token_ids" in options:
        options["min_tokens"] = chance.choice([0, 3, 50])
    if chance.random() < 0.1:
        options["thinking"] = ThinkingLimit(chance.choice([1, 4, 100]), (3,), (5, 4))
    return SamplingParams(max_tokens=1000, seed=chance.getrandbits(63), **options)


def random_row(chance: random.Random, vocab: int, sequence: int, sampling: SamplingParams) -> TurnRow:
    """Texts of few different tokens, so that they are repeated and words begin in them."""
    num_prompt, made = chance.randrange(1, 20), chance.randrange(12)
    tokens = [chance.choice([2, 3, 4, 5, 6, chance.randrange(vocab)]) for _ in range(num_prompt + made)]
    return TurnRow(sequence, tokens, len(tokens) - 1, 1, [0] * 8, num_prompt, sampling, samples=True)


def random_logits(chance: random.Random, rows: int, vocab: int) -> torch.Tensor:
    """bfloat16: flat, peaked, with many ties, and all equal."""
    generator = torch.Generator().manual_seed(chance.getrandbits(31))
    logits = torch.randn(rows, vocab, generator=generator)
    for row in logits:
        row *= chance.choice([0.0, 0.01, 1.3, 1.3, 4.0, 12.0])
        row += chance.choice([0.0, 5.0, -20.0])
    return logits.bfloat16()
