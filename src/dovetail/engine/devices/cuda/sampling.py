"""Samples on the device: the parameters of each row, and what its text has so far, in memory that the kernels of
`choose` read. What depends on the text and is decided on the host (a grammar, the end of thoughts, words of several
tokens) comes as a bitmask, made while the iteration before it computes.

Memory: for each token of the vocabulary 2 bytes of a sequence with penalties, 4 of one with biases and a bit of a row
that bars tokens, and `Scratch`; nothing of it is made before a request asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dovetail.engine.devices.cuda import choose as kernels
from dovetail.engine.devices.cuda.choose import PARAMETERS, PROMPT, Scratch, choose
from dovetail.engine.devices.cuda.transfer import send, to_device
from dovetail.engine.draw import least_offset, sharpness
from dovetail.engine.grammar import Grammars
from dovetail.engine.sampler import repetition
from dovetail.engine.token_mask import TokenMask
from dovetail.sched.sequence import mix64
from dovetail.sched.turn import TurnRow
from dovetail.types import SamplingParams, TokenLogprob, TokenLogprobs

_SLAB_ROWS = 16
_COMPILED: set[tuple[int, torch.dtype]] = set()  # vocabularies and types of this process
_REPORTED_ROWS = 32  # whose log-probabilities are computed at the same time

RunStep = Callable[[Callable[[], None]], None]  # kernel by kernel, or as a graph


class _Slabs:
    """Rows of one width and type that sequences take and give back. They never move: graphs know none of them, but an
    iteration that is under way may still read one."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._width, self._dtype, self._device = width, dtype, device
        self._free: list[Tensor] = []
        self.num_bytes = 0

    def take(self) -> Tensor:
        """Zeros."""
        if not self._free:
            slab = torch.empty(_SLAB_ROWS, self._width, dtype=self._dtype, device=self._device)
            self.num_bytes += slab.numel() * slab.element_size()
            self._free = list(slab.unbind())
        return self._free.pop().zero_()

    def give(self, row: Tensor) -> None:
        self._free.append(row)


@dataclass
class _Known:
    """What the device's memory has of a sequence."""

    column: np.ndarray  # its parameters, [PARAMETERS]
    mixed_seed: int  # the seed's part of the draws
    mask: TokenMask | None  # None = nothing is barred, whatever the text
    counts: Tensor | None = None  # [vocab] int16
    counted: int = -1  # leading tokens of the text that are in `counts`; -1 = it has to be filled
    bias: Tensor | None = None  # [vocab] float32


class Reported:
    """Log-probabilities of an iteration, on the host once its event is."""

    def __init__(self) -> None:
        self._parts: list[tuple[list[int], Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, places: list[int], chosen: Tensor, values: Tensor, tokens: Tensor, told: Tensor) -> None:
        self._parts.append((places, chosen, values, tokens, told))

    def take(self, rows: Sequence[TurnRow], drawn: Sequence[int]) -> dict[int, TokenLogprobs]:
        """By place of the row."""
        found: dict[int, TokenLogprobs] = {}
        for places, chosen, values, tokens, told in self._parts:
            for i, place in enumerate(places):
                sampling = rows[place].sampling
                logprob = float(chosen[i])
                if sampling.logprob_token_ids:
                    ids = {*sampling.logprob_token_ids}
                    named = dict(zip(sampling.logprob_token_ids, told[i].tolist(), strict=False))
                    named[drawn[place]] = logprob
                    pairs = [TokenLogprob(token, named[token]) for token in {*ids, drawn[place]}]
                    top = tuple(sorted(pairs, key=lambda each: (-each.logprob, each.token)))
                else:
                    count = min(sampling.logprobs or 0, values.shape[1])
                    pairs_of = zip(tokens[i, :count].tolist(), values[i, :count].tolist(), strict=True)
                    top = tuple(TokenLogprob(token, value) for token, value in pairs_of)
                found[place] = TokenLogprobs(logprob, top)
        return found


class DeviceSampler:
    """Of one executor; all calls from the thread of its iterations, on their stream."""

    def __init__(
        self,
        vocab: int,
        max_batch: int,
        device: torch.device,
        grammars: Grammars,
        dtype: torch.dtype = torch.bfloat16,  # of the logits
    ) -> None:
        self._dtype = dtype
        self._vocab, self._max_batch, self._device, self._grammars = vocab, max_batch, device, grammars
        self._words = -(-vocab // 32)
        self._known: dict[int, _Known] = {}  # by sequence
        self._columns = np.zeros((PARAMETERS, max_batch), np.int64)
        self._mixed = np.zeros(max_batch, np.uint64)
        self._owners: list[_Known | None] = [None] * max_batch  # of the columns; None = a neutral one
        self._counts = _Slabs(vocab, torch.int16, device)
        self._biases = _Slabs(vocab, torch.float32, device)
        self._parameters: Tensor | None = None
        self._masks: Tensor | None = None
        self._scratch: Scratch | None = None

    @property
    def num_bytes(self) -> int:
        fixed = sum(0 if one is None else one.numel() * one.element_size() for one in (self._parameters, self._masks))
        scratch = 0 if self._scratch is None else self._scratch.num_bytes
        return fixed + scratch + self._counts.num_bytes + self._biases.num_bytes

    def compile(self) -> None:
        """What the first request that draws would wait for, once in a process for each size of vocabulary and type; by
        the thread that loads, on a stream of its own."""
        if not self._is_cuda or (self._vocab, self._dtype) in _COMPILED:
            return
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(self._device)):
            logits = torch.zeros(1, self._vocab, dtype=self._dtype, device=self._device)
            parameters = torch.zeros(PARAMETERS, self._max_batch, dtype=torch.int64, device=self._device)
            chosen = torch.zeros(1, dtype=torch.int32, device=self._device)
            choose(logits, parameters, chosen, Scratch(self._max_batch, self._vocab, self._device), chosen)
            kernels.scatter(torch.full_like(parameters[0, :1], chosen.data_ptr()), chosen)
            torch.cuda.current_stream().synchronize()
        _COMPILED.add((self._vocab, self._dtype))

    def admit(self, rows: Sequence[TurnRow]) -> None:
        """Sequences that are about to be sampled; known until they are forgotten."""
        for row in rows:
            if row.sequence not in self._known:
                self._known[row.sequence] = self._make_known(row)

    def forget(self, sequence: int) -> None:
        known = self._known.pop(sequence, None)
        if known is None:
            return
        if known.counts is not None:
            self._counts.give(known.counts)
        if known.bias is not None:
            self._biases.give(known.bias)

    def reset(self, grammars: Grammars) -> None:
        """Every sequence is forgotten; those to come have these grammars."""
        for sequence in list(self._known):
            self.forget(sequence)
        for at in range(self._max_batch):
            self._own(at, None)
        self._grammars = grammars

    def needs_text(self, rows: Sequence[TurnRow]) -> bool:
        """Whether the host has to know the text of one of them before it can be sampled."""
        return any(known.mask is not None and known.mask.needs_text for known in map(self._of, rows) if known)

    def forget_counts(self, rows: Sequence[TurnRow]) -> None:
        """Drops the counts of tokens that were chosen by an iteration whose result is discarded."""
        for known in map(self._of, rows):
            if known is not None:
                known.counted = -1

    def choose(
        self, rows: Sequence[TurnRow], logits: Tensor, chosen: Tensor, inputs: Tensor | None, run: RunStep
    ) -> dict[int, str]:
        """A token for each row, into chosen [at least rows]; logits [at least rows, vocab]. `inputs`: on the device,
        the tokens that rows were computed with, where the host may not know them. Returns what is wrong with a row's
        own request, by place."""
        count = len(logits)
        assert len(rows) <= count <= self._max_batch
        parameters, scratch = self._make_memory()
        failures = self._fill(rows, count, inputs is not None)
        host = torch.from_numpy(self._columns).pin_memory() if self._is_cuda else torch.from_numpy(self._columns.copy())
        send(host, parameters)
        tokens = chosen if inputs is None else inputs
        run(lambda: choose(logits, parameters, tokens, scratch, chosen))
        return failures

    def choose_first(self, rows: Sequence[TurnRow], logits: Tensor) -> tuple[Tensor, dict[int, str]]:
        """The same after prompts, for any number of rows: their tokens, and what is wrong with them by place."""
        tokens: list[Tensor] = []
        failures: dict[int, str] = {}
        for first in range(0, len(rows), self._max_batch):
            some, part = rows[first : first + self._max_batch], logits[first : first + self._max_batch]
            chosen = torch.empty(len(some), dtype=torch.int32, device=self._device)
            problems = self.choose(some, part, chosen, None, lambda choose: choose())
            failures |= {first + at: problem for at, problem in problems.items()}
            tokens.append(chosen)
        return torch.cat(tokens), failures

    def report(self, rows: Sequence[TurnRow], logits: Tensor, chosen: Tensor) -> Reported | None:
        """Log-probabilities of the model, for rows that want them."""
        wanted = [at for at, row in enumerate(rows) if row.sampling.logprobs is not None]
        if not wanted:
            return None
        reported = Reported()
        for first in range(0, len(wanted), _REPORTED_ROWS):
            places = wanted[first : first + _REPORTED_ROWS]
            sampling = [rows[place].sampling for place in places]
            at = self._on_device(torch.tensor(places))
            some = logits[at]
            log_total = torch.logsumexp(some.float(), dim=-1, keepdim=True)
            own = some.gather(1, chosen[at].long().clamp_(min=0)[:, None]).float() - log_total
            most = min(max(0 if one.logprob_token_ids else one.logprobs or 0 for one in sampling), self._vocab)
            values, tokens = some.topk(most)
            told = self._told(sampling, some) - log_total
            parts = (own[:, 0], values.float() - log_total, tokens, told)
            reported.add(places, *(self._to_host(part) for part in parts))
        return reported

    # Parameters

    def _of(self, row: TurnRow) -> _Known | None:
        return self._known.get(row.sequence)

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"

    def _make_memory(self) -> tuple[Tensor, Scratch]:
        if self._parameters is None or self._scratch is None:
            self._parameters = torch.zeros(PARAMETERS, self._max_batch, dtype=torch.int64, device=self._device)
            self._scratch = Scratch(self._max_batch, self._vocab, self._device)
        return self._parameters, self._scratch

    def _make_known(self, row: TurnRow) -> _Known:
        sampling = row.sampling
        known = _Known(_column_of(sampling, self._vocab), mix64(sampling.seed), TokenMask.of(sampling, self._vocab))
        if sampling.has_penalties:
            known.counts = self._counts.take()
            known.column[kernels.COUNTS] = known.counts.data_ptr()
        bias = {token: value for token, value in sampling.logit_bias.items() if token < self._vocab}
        if bias:
            known.bias = self._biases.take()
            known.bias[self._on_device(torch.tensor(list(bias)))] = self._on_device(
                torch.tensor(list(bias.values()), dtype=torch.float32)
            )
            known.column[kernels.BIAS] = known.bias.data_ptr()
        return known

    def _fill(self, rows: Sequence[TurnRow], count: int, from_inputs: bool) -> dict[int, str]:
        columns, owners = self._columns, self._owners
        fresh: list[tuple[_Known, TurnRow]] = []
        masks: list[np.ndarray] = []
        failures: dict[int, str] = {}
        for at in range(len(rows), count):
            if owners[at] is not None:
                self._own(at, None)
        for at, row in enumerate(rows):
            known = self._known.get(row.sequence)
            if known is None:  # it has ended meanwhile
                self._own(at, None)
                continue
            if owners[at] is not known:  # a sequence may have been forgotten and come again
                self._own(at, known)
            if known.counts is not None:
                columns[kernels.COUNTED, at] = self._count(known, row, from_inputs, fresh)
            if known.mask is not None:
                words, problem = known.mask.words(row, self._grammars)
                if problem is not None:
                    failures[at] = problem
                columns[kernels.MASK, at] = 0 if words is None else 1 + len(masks)
                masks += [] if words is None else [words]
        num = len(rows)
        positions = np.fromiter((row.end for row in rows), np.uint64, num)
        columns[kernels.DRAW, :num] = _draws(self._mixed[:num], positions)
        if fresh:
            self._fill_counts(fresh)
        if masks:
            self._fill_masks(masks, num)
        return failures

    def _own(self, at: int, known: _Known | None) -> None:
        self._owners[at] = known
        self._columns[:, at] = 0 if known is None else known.column
        self._mixed[at] = 0 if known is None else known.mixed_seed

    def _count(self, known: _Known, row: TurnRow, from_inputs: bool, fresh: list[tuple[_Known, TurnRow]]) -> int:
        """What the kernel is to add to the counts before it reads them: 1 + a token, -1 = the row's input."""
        if known.counted == row.end:
            return 0
        last = -1 if from_inputs else 1 + row.tokens[row.end - 1]
        if known.counted != row.end - 1:
            fresh.append((known, row))
            if len(row.tokens) >= row.end:
                last = 0  # all of it is filled in
        known.counted = row.end
        return last

    def _fill_counts(self, fresh: list[tuple[_Known, TurnRow]]) -> None:
        addresses, values = [], []
        for known, row in fresh:
            assert known.counts is not None
            known.counts.zero_()
            text = np.array(row.tokens[: row.end], np.int64)
            text = text[text < self._vocab]
            tokens, marks = _counted(text[: row.num_prompt], text[row.num_prompt :])
            addresses.append(known.counts.data_ptr() + 2 * tokens)
            values.append(marks)
        places = self._on_device(torch.from_numpy(np.concatenate(addresses)))
        marks_on = self._on_device(torch.from_numpy(np.concatenate(values)))
        kernels.scatter(places, marks_on)

    def _fill_masks(self, masks: list[np.ndarray], num: int) -> None:
        if self._masks is None:
            self._masks = torch.zeros(self._max_batch, self._words, dtype=torch.int32, device=self._device)
        host = torch.from_numpy(np.stack(masks).view(np.int32))
        send(host.pin_memory() if self._is_cuda else host, self._masks[: len(masks)])
        which = self._columns[kernels.MASK, :num]
        used = which > 0
        which[used] = self._masks.data_ptr() + (which[used] - 1) * (4 * self._words)

    # Copies

    def _on_device(self, values: Tensor) -> Tensor:
        return to_device(values.pin_memory(), self._device) if self._is_cuda else values

    def _to_host(self, values: Tensor) -> Tensor:
        return values.to("cpu", non_blocking=True)

    def _told(self, sampling: Sequence[SamplingParams], some: Tensor) -> Tensor:
        """Logits of the tokens that requests name, [rows, the most of them]."""
        width = max(len(one.logprob_token_ids) for one in sampling)
        ids = torch.zeros(len(sampling), width, dtype=torch.int64)
        for at, one in enumerate(sampling):
            ids[at, : len(one.logprob_token_ids)] = torch.tensor(one.logprob_token_ids, dtype=torch.int64)
        return some.gather(1, self._on_device(ids)).float()


def _column_of(sampling: SamplingParams, vocab: int) -> np.ndarray:
    column = np.zeros(PARAMETERS, np.int64)
    column[kernels.PENALTY], column[kernels.INVERSE] = map(_bits, repetition(sampling))
    column[kernels.PRESENCE], column[kernels.FREQUENCY] = map(
        _bits, (sampling.presence_penalty, sampling.frequency_penalty)
    )
    if sampling.is_greedy:
        return column
    column[kernels.SHARPNESS], column[kernels.LEAST] = _bits(sharpness(sampling)), _bits(least_offset(sampling))
    column[kernels.TOP_K] = sampling.top_k if 0 < sampling.top_k < vocab else 0
    column[kernels.TOP_P] = np.float64(min(sampling.top_p, 1.0)).view(np.int64)
    return column


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _counted(prompt: np.ndarray, output: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a text, each once, and their marks: how often the output has them, and whether the prompt does."""
    made, times = np.unique(output, return_counts=True)
    given = np.unique(prompt)
    tokens = np.union1d(made, given)
    marks = np.zeros(len(tokens), np.int32)
    marks[np.searchsorted(tokens, made)] = np.minimum(times, 32767)
    marks[np.searchsorted(tokens, given)] += PROMPT
    return tokens, marks


def _draws(mixed: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The numbers of `engine.draw.uniform`, times 2^53: `mix64` from the seed's part on."""
    state = mixed + positions + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    draws: np.ndarray = (state >> np.uint64(11)).astype(np.int64)
    return draws
