"""Turns logits into tokens. Each row is decided by its own parameters, its own history and one number drawn from
(seed, position), so a request's text does not depend on what else is in the batch or on when it was preempted.

Order of steps: log-probabilities of the raw model for the report; penalties, bias, barred tokens and grammar;
then the draw (`draw.py`). What the device's own sampler (`devices.cuda.sampling`) does is this, to the bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from dovetail.engine.draw import LARGEST, draw
from dovetail.engine.grammar import Grammars
from dovetail.errors import Unprocessable
from dovetail.sched.turn import RowOutcome, TurnRow
from dovetail.types import SamplingParams, TokenLogprob, TokenLogprobs


@dataclass(frozen=True)
class _Failure:
    error: str
    unprocessable: bool = True  # the request's own fault


def sample(
    logits: Tensor,
    rows: list[TurnRow],
    grammars: Grammars,
    best: Sequence[int] | None = None,
    kernels: ModuleType | None = None,
) -> list[RowOutcome]:
    """logits [rows, vocab], written to; one outcome per row, in order. `best`: where each row's largest is (-1 if one
    is not a number), if whoever computed them has looked already. `kernels` find a row's candidates faster."""
    if best is None:
        best = _find_best(logits)
    raw = logits.clone() if any(row.sampling.logprobs is not None and is_shaped(row) for row in rows) else logits
    failures = {at: failure for at, row in enumerate(rows) if (failure := _shape(logits[at], row, grammars))}
    for at, token in enumerate(best):
        if token < 0:
            failures[at] = _Failure("the model computed a value that is not a number", unprocessable=False)
    tokens = _choose(logits, rows, best, kernels)
    outcomes = []
    for at, row in enumerate(rows):
        if at in failures:
            outcomes.append(_failed(row, failures[at]))
        else:
            outcomes.append(_outcome(row, tokens[at], raw[at], grammars))
    return outcomes


# Shaping one row's logits, in place

_LATE_TOKENS = 3  # that the mark may come after its time: a character has up to four bytes, each perhaps a token


def is_shaped(row: TurnRow) -> bool:
    """Its logits are changed before one is chosen."""
    sampling = row.sampling
    barred = bool(sampling.stop_token_ids) and len(row.tokens) - row.num_prompt < sampling.min_tokens
    limited = sampling.allowed_token_ids or sampling.bad_words or forced_token(row) is not None
    return bool(sampling.has_penalties or sampling.logit_bias or sampling.grammar or limited or barred)


def _shape(logits: Tensor, row: TurnRow, grammars: Grammars) -> _Failure | None:
    if not is_shaped(row):
        return None
    sampling = row.sampling
    if sampling.has_penalties:
        _penalize(logits, row)
    if sampling.logit_bias:
        logits[list(sampling.logit_bias)] += _like(logits, list(sampling.logit_bias.values()))
    if len(row.tokens) - row.num_prompt < sampling.min_tokens:
        logits[[token for token in sampling.stop_token_ids if token < len(logits)]] = float("-inf")
    if sampling.allowed_token_ids:
        _allow_only(logits, sampling.allowed_token_ids)
    if sampling.bad_words:
        logits[ends_of_bad_words(row, len(logits))] = float("-inf")
    if sampling.grammar is not None:
        try:
            grammars.constrain(row, logits)
        except Unprocessable as error:
            return _Failure(str(error))
    forced = forced_token(row)
    # A grammar may want the rest of a character first.
    if forced is not None and (sampling.grammar is None or logits[forced] > float("-inf")):
        _allow_only(logits, (forced,))
    return None


def forced_token(row: TurnRow) -> int | None:
    """The next token of the mark that ends thoughts, once they have had their tokens."""
    limit = row.sampling.thinking
    made = len(row.tokens) - row.num_prompt
    if limit is None or not limit.max_tokens <= made < limit.max_tokens + len(limit.closing) + _LATE_TOKENS:
        return None
    output, size = tuple(row.tokens[row.num_prompt :]), len(limit.closing)
    ended = any(output[at : at + size] == limit.closing for at in range(len(output)))
    if ended or output[: len(limit.opening)] != limit.opening:
        return None
    over = output[limit.max_tokens :]
    there = next(k for k in range(min(size - 1, len(over)), -1, -1) if over[len(over) - k :] == limit.closing[:k])
    return limit.closing[there]


def _penalize(logits: Tensor, row: TurnRow) -> None:
    sampling = row.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.tokens)), device=logits.device)
        values = logits[seen]
        penalty, inverse = repetition(sampling)
        logits[seen] = torch.where(values > 0, values * inverse, values * penalty).clamp(-LARGEST, LARGEST)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = Counter(row.tokens[row.num_prompt :])
        if counts:
            made = torch.tensor(list(counts), device=logits.device)
            often = _like(logits, list(counts.values()))
            logits[made] -= sampling.presence_penalty + sampling.frequency_penalty * often


def repetition(sampling: SamplingParams) -> tuple[float, float]:
    """What logits below and above zero are multiplied by, of tokens that the text has."""
    penalty = sampling.repetition_penalty
    return min(penalty, LARGEST), min(1.0 / penalty, LARGEST)


def _allow_only(logits: Tensor, tokens: Sequence[int]) -> None:
    allowed = torch.tensor(tokens, device=logits.device)
    values = logits[allowed]
    # One token alone is chosen also where the model gives it no chance.
    values = values if len(tokens) > 1 else torch.zeros_like(values)
    logits.fill_(float("-inf"))
    logits[allowed] = values


def ends_of_bad_words(row: TurnRow, vocab: int) -> list[int]:
    """Tokens that would complete a word which the output already has but for its last token."""
    tokens, made = row.tokens, len(row.tokens) - row.num_prompt
    last = tokens[-1] if made else -1
    return [
        word[-1]
        for word in row.sampling.bad_words  # thousands, for every token: nearly all differ in the last one already
        if (len(word) == 1 or (word[-2] == last and len(word) <= made + 1 and _ends_with(tokens, word[:-1])))
        and word[-1] < vocab
    ]


def _ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    return list(tokens[-len(end) :]) == list(end)


# Choosing


def _find_best(logits: Tensor) -> list[int]:
    return torch.where(logits.isnan().any(dim=-1), -1, logits.argmax(dim=-1)).tolist()


def _choose(logits: Tensor, rows: list[TurnRow], best: Sequence[int], kernels: ModuleType | None) -> list[int]:
    tokens = [int(logits[at].argmax()) if is_shaped(row) else best[at] for at, row in enumerate(rows)]
    drawn = [at for at, row in enumerate(rows) if not row.sampling.is_greedy]
    for at, token in zip(drawn, draw(logits, drawn, [rows[at] for at in drawn], kernels), strict=True):
        tokens[at] = token
    return tokens


def _like(logits: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=logits.dtype, device=logits.device)


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
    if sampling.logprob_token_ids:
        return TokenLogprobs(chosen, _told_of([*{token, *sampling.logprob_token_ids}], logprobs))
    if sampling.logprobs == 0:
        return TokenLogprobs(chosen)
    values, tokens = logprobs.topk(min(sampling.logprobs, len(logprobs)))
    top = tuple(TokenLogprob(t, v) for t, v in zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(chosen, top)


def _told_of(tokens: list[int], logprobs: Tensor) -> tuple[TokenLogprob, ...]:
    """Of these, the likeliest first."""
    found = map(TokenLogprob, tokens, logprobs[tokens].tolist())
    return tuple(sorted(found, key=lambda each: (-each.logprob, each.token)))
