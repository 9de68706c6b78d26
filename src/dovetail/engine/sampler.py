"""Turns logits into tokens. Each row is decided by its own parameters, its own history and one number drawn from
(seed, position), so a request's text does not depend on what else is in the batch or on when it was preempted.

Order of steps: log-probabilities of the raw model for the report; penalties, bias, barred tokens and grammar;
temperature; top-k, top-p, min-p; one draw by inverse cumulative probability.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from dovetail.engine.grammar import Grammars
from dovetail.errors import Unprocessable
from dovetail.sched.sequence import mix64
from dovetail.sched.turn import RowOutcome, TurnRow
from dovetail.types import SamplingParams, TokenLogprob, TokenLogprobs

_CANDIDATES = 256  # top-p usually needs fewer than this many; if not, the whole vocabulary is sorted
_MORE_CANDIDATES = 4096  # before that, where they are found fast


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


def uniform(seed: int, position: int) -> float:
    """In [0, 1): the only randomness there is."""
    return (mix64(seed, position) >> 11) * 2.0**-53


# Shaping one row's logits, in place

_LATE_TOKENS = 3  # that the mark may come after its time: a character has up to four bytes, each perhaps a token


def is_shaped(row: TurnRow) -> bool:
    """Its logits are changed before one is chosen."""
    sampling = row.sampling
    barred = bool(sampling.stop_token_ids) and len(row.tokens) - row.num_prompt < sampling.min_tokens
    limited = sampling.allowed_token_ids or sampling.bad_words or _forced_token(row) is not None
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
        logits[_ends_of_bad_words(row, len(logits))] = float("-inf")
    if sampling.grammar is not None:
        try:
            grammars.constrain(row, logits)
        except Unprocessable as error:
            return _Failure(str(error))
    forced = _forced_token(row)
    # A grammar may want the rest of a character first.
    if forced is not None and (sampling.grammar is None or logits[forced] > float("-inf")):
        _allow_only(logits, (forced,))
    return None


def _forced_token(row: TurnRow) -> int | None:
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
        penalty = sampling.repetition_penalty
        largest = torch.finfo(logits.dtype).max
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty).clamp(-largest, largest)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counts = Counter(row.tokens[row.num_prompt :])
        if counts:
            made = torch.tensor(list(counts), device=logits.device)
            often = _like(logits, list(counts.values()))
            logits[made] -= sampling.presence_penalty + sampling.frequency_penalty * often


def _allow_only(logits: Tensor, tokens: Sequence[int]) -> None:
    allowed = torch.tensor(tokens, device=logits.device)
    values = logits[allowed]
    # One token alone is chosen also where the model gives it no chance.
    values = values if len(tokens) > 1 else torch.zeros_like(values)
    logits.fill_(float("-inf"))
    logits[allowed] = values


def _ends_of_bad_words(row: TurnRow, vocab: int) -> list[int]:
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
    for wide in (False, True):  # rows whose filter ends within the candidates, and the others
        chosen = [at for at in drawn if _keeps_all(rows[at].sampling) == wide]
        if chosen:
            those = [rows[at] for at in chosen]
            if wide:
                draws = _draw(_probabilities(logits[chosen], those), None, those)
            else:
                draws = _draw(*_filtered(_Rows(logits, chosen, those, kernels)), those)
            tokens = [draws.pop(0) if at in chosen else token for at, token in enumerate(tokens)]
    return tokens


def _keeps_all(sampling: SamplingParams) -> bool:
    return sampling.top_k == 0 and sampling.top_p >= 1.0


def _like(logits: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=logits.dtype, device=logits.device)


def _column(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]


def _probabilities(logits: Tensor, rows: list[TurnRow]) -> Tensor:
    """[rows, vocab], of logits [rows, vocab]."""
    temperature = _column([row.sampling.temperature for row in rows], logits.device)
    # Below the likeliest, so that no temperature, however small, leads beyond the largest number.
    scaled = (logits - logits.max(dim=-1, keepdim=True).values).double() / temperature
    return torch.softmax(scaled, dim=-1)


def _draw(probabilities: Tensor, order: Tensor | None, rows: list[TurnRow]) -> list[int]:
    """`order`: the tokens that the probabilities belong to, if they are not all of them as they come."""
    min_p = _column([row.sampling.min_p for row in rows], probabilities.device)
    likeliest = probabilities.max(dim=-1, keepdim=True).values
    probabilities = probabilities.masked_fill(probabilities < min_p * likeliest, 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    draws = _column([uniform(row.sampling.seed, len(row.tokens)) for row in rows], probabilities.device)
    picks = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    last = (probabilities > 0).int().cumsum(dim=-1).argmax(dim=-1, keepdim=True)  # the last one that may be picked
    picks = torch.minimum(picks, last)
    return (picks if order is None else order.gather(1, picks))[:, 0].tolist()


@dataclass(frozen=True)
class _Rows:
    """Some rows of an iteration's logits, which are not copied until all of a row is needed."""

    logits: Tensor  # [all rows, vocab]
    at: list[int]
    rows: list[TurnRow]
    kernels: ModuleType | None

    @property
    def is_native(self) -> bool:
        return self.kernels is not None and self.logits.dtype == torch.float32

    def likeliest(self, width: int) -> tuple[Tensor, Tensor]:
        """Probabilities, largest first, and their tokens, [rows, width] each."""
        if self.kernels is None or not self.is_native:
            values, order = _probabilities(self.logits[self.at], self.rows).topk(width, dim=-1)
            return values, order
        found = torch.empty(len(self.at), width)
        order, totals = torch.empty_like(found, dtype=torch.int64), torch.empty(len(self.at), 1, dtype=torch.float64)
        temperature = _column([row.sampling.temperature for row in self.rows], self.logits.device)
        sharpness = (1.0 / temperature).float().clamp(max=torch.finfo(torch.float32).max)[:, 0]
        at = np.array(self.at, dtype=np.int32)
        self.kernels.candidates(torch.get_num_threads(), self.logits, at, sharpness, found, order, totals)
        return torch.exp((found - found[:, :1]).double() / temperature) / totals, order

    def ranked(self, some: Tensor) -> tuple[Tensor, Tensor]:
        """The same of the whole vocabulary, for some of the rows."""
        chosen = some.nonzero()[:, 0].tolist()
        whole = _probabilities(self.logits[[self.at[i] for i in chosen]], [self.rows[i] for i in chosen])
        values, order = whole.sort(dim=-1, descending=True)
        return values, order


def _filtered(some: _Rows) -> tuple[Tensor, Tensor]:
    """Top-k and top-p: the kept probabilities, likeliest first and zero behind, and their tokens."""
    vocab = some.logits.shape[1]
    device = some.logits.device
    top_k = torch.tensor([row.sampling.top_k or vocab for row in some.rows], device=device)[:, None]
    top_p = _column([row.sampling.top_p for row in some.rows], device)
    values, order = _ranked(some, top_k, top_p)
    rank = torch.arange(values.shape[1], device=device)
    values = values.masked_fill(rank >= top_k, 0.0)
    # top-p counts within what top-k left; a token stays if those before it have not reached p yet
    reached = values.cumsum(dim=-1)
    enough = top_p * torch.where(top_k < vocab, reached[:, -1:], 1.0)
    return values.masked_fill((reached - values >= enough) & (rank > 0), 0.0), order


def _ranked(some: _Rows, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, as many as its filters can keep; zeros where another row needs more.

    Whether a row is sorted whole is decided by the row alone, because the two ways order equal values differently."""
    count, vocab = len(some.rows), some.logits.shape[1]
    for most in (_CANDIDATES, _MORE_CANDIDATES) if some.is_native else (_CANDIDATES,):
        width = min(most, vocab)
        values, order = some.likeliest(width)
        covered = (top_k >= vocab) & (values.cumsum(dim=-1)[:, -1:] >= top_p)
        beyond = ~(covered | (top_k <= width))[:, 0]
        if width == vocab or not bool(beyond.any()):
            return values, order
    values = torch.cat((values, values.new_zeros(count, vocab - width)), dim=-1)
    order = torch.cat((order, order.new_zeros(count, vocab - width)), dim=-1)
    values[beyond], order[beyond] = some.ranked(beyond)
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
