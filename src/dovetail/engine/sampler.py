"""Turns logits into tokens. Each row is decided by its own parameters, its own history and one number drawn from
(seed, position), so a request's text does not depend on what else is in the batch or on when it was preempted.

Order of steps: log-probabilities of the raw model for the report; penalties, bias, barred tokens and grammar;
temperature; top-k, top-p, min-p; one draw by inverse cumulative probability.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.engine.grammar import Grammars
from dovetail.errors import Unprocessable
from dovetail.sched.sequence import mix64
from dovetail.sched.turn import RowOutcome, TurnRow
from dovetail.types import SamplingParams, TokenLogprob, TokenLogprobs

_CANDIDATES = 256  # top-p usually needs fewer than this many; if not, the whole vocabulary is sorted


@dataclass(frozen=True)
class _Failure:
    error: str
    unprocessable: bool = True  # the request's own fault


def sample(
    logits: Tensor, rows: list[TurnRow], grammars: Grammars, best: Sequence[int] | None = None
) -> list[RowOutcome]:
    """logits [rows, vocab], written to; one outcome per row, in order. `best`: where each row's largest is (-1 if one
    is not a number), if whoever computed them has looked already."""
    if best is None:
        best = _find_best(logits)
    raw = logits.clone() if any(row.sampling.logprobs is not None and _is_shaped(row) for row in rows) else logits
    failures = {at: failure for at, row in enumerate(rows) if (failure := _shape(logits[at], row, grammars))}
    for at, token in enumerate(best):
        if token < 0:
            failures[at] = _Failure("the model computed a value that is not a number", unprocessable=False)
    tokens = _choose(logits, rows, best)
    outcomes = []
    for at, row in enumerate(rows):
        if at in failures:
            outcomes.append(_failed(row, failures[at]))
        else:
            outcomes.append(_outcome(row, tokens[at], raw[at], grammars))
    return outcomes


def uniform(seed: int, position: int) -> float:
    """In [0, 1): the only randomness there is."""
    return (mix64(seed, position) >> 11) * 2.0**-53


# Shaping one row's logits, in place


def _is_shaped(row: TurnRow) -> bool:
    sampling = row.sampling
    barred = len(row.tokens) - row.num_prompt < sampling.min_tokens
    return bool(sampling.has_penalties or sampling.logit_bias or sampling.grammar or barred)


def _shape(logits: Tensor, row: TurnRow, grammars: Grammars) -> _Failure | None:
    if not _is_shaped(row):
        return None
    sampling = row.sampling
    if sampling.has_penalties:
        _penalize(logits, row)
    if sampling.logit_bias:
        logits[list(sampling.logit_bias)] += torch.tensor(list(sampling.logit_bias.values()), dtype=logits.dtype)
    if len(row.tokens) - row.num_prompt < sampling.min_tokens:
        logits[[token for token in sampling.stop_token_ids if token < len(logits)]] = float("-inf")
    if sampling.grammar is not None:
        try:
            grammars.constrain(row, logits)
        except Unprocessable as error:
            return _Failure(str(error))
    return None


def _penalize(logits: Tensor, row: TurnRow) -> None:
    sampling = row.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.tokens)))
        values = logits[seen]
        penalty = sampling.repetition_penalty
        largest = torch.finfo(logits.dtype).max
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty).clamp(-largest, largest)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = Counter(row.tokens[row.num_prompt :])
        if counts:
            made = torch.tensor(list(counts))
            often = torch.tensor(list(counts.values()), dtype=logits.dtype)
            logits[made] -= sampling.presence_penalty + sampling.frequency_penalty * often


# Choosing


def _find_best(logits: Tensor) -> list[int]:
    return torch.where(logits.isnan().any(dim=-1), -1, logits.argmax(dim=-1)).tolist()


def _choose(logits: Tensor, rows: list[TurnRow], best: Sequence[int]) -> list[int]:
    tokens = [int(logits[at].argmax()) if _is_shaped(row) else best[at] for at, row in enumerate(rows)]
    drawn = [at for at, row in enumerate(rows) if not row.sampling.is_greedy]
    for wide in (False, True):  # rows whose filter ends within the candidates, and the others
        chosen = [at for at in drawn if _keeps_all(rows[at].sampling) == wide]
        if chosen:
            draws = _draw(logits[chosen], [rows[at] for at in chosen], wide)
            tokens = [draws.pop(0) if at in chosen else token for at, token in enumerate(tokens)]
    return tokens


def _keeps_all(sampling: SamplingParams) -> bool:
    return sampling.top_k == 0 and sampling.top_p >= 1.0


def _draw(logits: Tensor, rows: list[TurnRow], whole: bool) -> list[int]:
    temperature = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float64)[:, None]
    # Below the likeliest, so that no temperature, however small, leads beyond the largest number.
    scaled = (logits - logits.max(dim=-1, keepdim=True).values).double() / temperature
    probabilities = torch.softmax(scaled, dim=-1)  # [rows, vocab]
    order: Tensor | None = None
    if not whole:
        probabilities, order = _filtered(probabilities, rows)
    min_p = torch.tensor([row.sampling.min_p for row in rows], dtype=torch.float64)[:, None]
    likeliest = probabilities.max(dim=-1, keepdim=True).values
    probabilities = probabilities.masked_fill(probabilities < min_p * likeliest, 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    draws = torch.tensor([uniform(row.sampling.seed, len(row.tokens)) for row in rows], dtype=torch.float64)
    picks = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True)
    last = (probabilities > 0).int().cumsum(dim=-1).argmax(dim=-1, keepdim=True)  # the last one that may be picked
    picks = torch.minimum(picks, last)
    return (picks if order is None else order.gather(1, picks))[:, 0].tolist()


def _filtered(probabilities: Tensor, rows: list[TurnRow]) -> tuple[Tensor, Tensor]:
    """Top-k and top-p: the kept probabilities, likeliest first and zero behind, and their tokens."""
    vocab = probabilities.shape[1]
    top_k = torch.tensor([row.sampling.top_k or vocab for row in rows])[:, None]
    top_p = torch.tensor([row.sampling.top_p for row in rows], dtype=torch.float64)[:, None]
    values, order = _ranked(probabilities, top_k, top_p)
    rank = torch.arange(values.shape[1])
    values = values.masked_fill(rank >= top_k, 0.0)
    # top-p counts within what top-k left; a token stays if those before it have not reached p yet
    reached = values.cumsum(dim=-1)
    enough = top_p * torch.where(top_k < vocab, reached[:, -1:], 1.0)
    return values.masked_fill((reached - values >= enough) & (rank > 0), 0.0), order


def _ranked(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, as many as its filters can keep; zeros where another row needs more.

    Whether a row is sorted whole is decided by the row alone, because the two ways order equal values differently."""
    count, vocab = probabilities.shape
    width = min(_CANDIDATES, vocab)
    values, order = probabilities.topk(width, dim=-1)
    covered = (top_k >= vocab) & (values.cumsum(dim=-1)[:, -1:] >= top_p)
    beyond = ~(covered | (top_k <= width))[:, 0]
    if width == vocab or not bool(beyond.any()):
        return values, order
    values = torch.cat((values, values.new_zeros(count, vocab - width)), dim=-1)
    order = torch.cat((order, order.new_zeros(count, vocab - width)), dim=-1)
    values[beyond], order[beyond] = probabilities[beyond].sort(dim=-1, descending=True)
    return values, order


# Reporting


def _outcome(row: TurnRow, token: int, raw: Tensor, grammars: Grammars) -> RowOutcome:
    ends = False
    if row.sampling.grammar is not None:
        try:
            ends = grammars.is_complete_after(row, token)
        except Unprocessable as error:
            return _failed(row, _Failure(str(error)))
    return RowOutcome(row.sequence, token, _logprobs(row.sampling, token, raw), ends)


def _failed(row: TurnRow, failure: _Failure) -> RowOutcome:
    return RowOutcome(row.sequence, token=0, error=failure.error, unprocessable=failure.unprocessable)


def _logprobs(sampling: SamplingParams, token: int, raw: Tensor) -> TokenLogprobs | None:
    if sampling.logprobs is None:
        return None
    logprobs = torch.log_softmax(raw.double(), dim=-1)
    chosen = float(logprobs[token])
    if sampling.logprobs == 0:
        return TokenLogprobs(chosen)
    values, tokens = logprobs.topk(min(sampling.logprobs, len(logprobs)))
    top = tuple(TokenLogprob(t, v) for t, v in zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(chosen, top)
