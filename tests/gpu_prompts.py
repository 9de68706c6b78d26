"""What tests of models on a GPU ask of an executor, of whichever device."""

from __future__ import annotations

from typing import Any

import torch
from tiny import VOCAB_SIZE

from dovetail.sched.turn import Turn, TurnRow
from dovetail.types import SamplingParams

GREEDY = SamplingParams(max_tokens=1000, seed=0, temperature=0.0)


def prompts(lengths: list[int]) -> Turn:
    """Prompts of these lengths in one iteration."""
    rows, first = [], 0
    for index, length in enumerate(lengths):
        tokens = [(31 * index + 7 * at) % VOCAB_SIZE for at in range(length)]
        blocks = list(range(first, first + -(-length // 16)))
        rows.append(TurnRow(index, tokens, 0, length, blocks, length, GREEDY, samples=True))
        first += len(blocks)
    return Turn(tuple(rows))


def logits(executor: Any, lengths: list[int]) -> torch.Tensor:
    """After each of these prompts, by an executor that is closed then."""
    executor.resize(executor.max_blocks)
    try:
        found = executor.logits(prompts(lengths))
        return torch.stack([found[index].float().cpu() for index in range(len(lengths))])
    finally:
        executor.close()
