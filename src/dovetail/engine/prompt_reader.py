"""What a prompt's own tokens come to: their log-probabilities, or the states of which an embedding is made.

Prompts arrive in chunks, so that what was read of one is kept until its last. Any model that gives states and logits of
every token of a row can be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from dovetail.engine.grammar import Grammars
from dovetail.engine.kv_cache import KVCache
from dovetail.engine.preemption import PreemptionPoint
from dovetail.engine.sampler import sample
from dovetail.sched.turn import RowOutcome, TurnRow
from dovetail.types import TokenLogprob, TokenLogprobs

PIECE_TOKENS = 64  # whose logits are in memory at the same time
FEW_TOKENS = 2  # whose log-probabilities are found without a break


class ReadableModel(Protocol):
    """Both compute keys and values of the row's tokens as an iteration does."""

    def states(self, row: TurnRow, cache: KVCache) -> Tensor:
        """[count, hidden] behind the final norm."""

    def all_logits(self, row: TurnRow, cache: KVCache) -> Iterator[Tensor]:
        """[some, vocab] in the order of the row's tokens, float32."""


def reads_prompt(row: TurnRow) -> bool:
    """Of a request that goes on after its worker died the prompt was read before."""
    wants_logprobs = row.sampling.prompt_logprobs is not None and len(row.tokens) == row.num_prompt
    return row.sampling.pooling is not None or wants_logprobs


def single_tokens(row: TurnRow) -> Iterator[TurnRow]:
    """The row as one row per token, each of which samples: what it says is what every token says."""
    for position in range(row.start, row.end):
        yield msgspec.structs.replace(row, start=position, count=1, samples=True)


@dataclass
class _Read:
    """Of one sequence so far."""

    num_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the tokens after the first
    total: Tensor | None = None  # sum of the states


class PromptReader:
    def __init__(self) -> None:
        self._read: dict[int, _Read] = {}

    def run(
        self,
        row: TurnRow,
        model: ReadableModel,
        cache: KVCache,
        grammars: Grammars,
        preemption: PreemptionPoint | None = None,
    ) -> RowOutcome | None:
        """None while more of the prompt is to come."""
        if row.sampling.pooling is not None:
            return self._embed(row, model.states(row, cache))
        return self._score(row, model.all_logits(row, cache), grammars, preemption)

    def forget(self, sequence: int) -> None:
        self._read.pop(sequence, None)

    def _state(self, row: TurnRow) -> _Read:
        """Anew where the row begins at its first token: it was preempted, and all of it is computed again."""
        if row.start == 0:
            self._read[row.sequence] = _Read()
        return self._read.setdefault(row.sequence, _Read())

    def _embed(self, row: TurnRow, states: Tensor) -> RowOutcome | None:
        if row.sampling.pooling == "mean":
            read = self._state(row)
            total = states.float().sum(dim=0)
            read.total = total if read.total is None else read.total + total
            read.num_tokens += row.count
            pooled = read.total / read.num_tokens
            assert read.num_tokens == row.end, "every token of the prompt was read once"
        else:
            pooled = states[-1].float()
        if not row.samples:
            return None
        if not bool(pooled.isfinite().all()):
            return RowOutcome(row.sequence, token=0, error="the model computed a value that is not a number")
        return RowOutcome(row.sequence, token=0, embedding=pooled.cpu().contiguous().numpy().tobytes())

    def _score(
        self, row: TurnRow, pieces: Iterator[Tensor], grammars: Grammars, preemption: PreemptionPoint | None
    ) -> RowOutcome | None:
        read, position = self._state(row), row.start
        last: Tensor | None = None
        for logits in chain.from_iterable(piece.split(FEW_TOKENS if preemption else PIECE_TOKENS) for piece in pieces):
            following = row.tokens[position + 1 : position + 1 + len(logits)]
            read.logprobs += _logprobs_of(logits[: len(following)], following, row.sampling.prompt_logprobs or 0)
            position += len(logits)
            last = logits
            if preemption is not None:
                preemption.preempt_if_due()
        assert position == row.end
        if not row.samples:
            return None
        assert last is not None
        (outcome,) = sample(last[-1:].clone(), [row], grammars)
        return msgspec.structs.replace(outcome, prompt_logprobs=tuple(read.logprobs))


def _logprobs_of(logits: Tensor, tokens: list[int], count: int) -> list[TokenLogprobs]:
    """logits [tokens, vocab]: what the model thought of each of these tokens when it came."""
    if not tokens:
        return []
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    values, order = logprobs.topk(min(count, logprobs.shape[1]), dim=-1)
    return [
        TokenLogprobs(value, tuple(TokenLogprob(*pair) for pair in zip(ids, tops, strict=True)), rank)
        for value, rank, ids, tops in zip(
            chosen[:, 0].tolist(), ranks.tolist(), order.tolist(), values.tolist(), strict=True
        )
    ]
