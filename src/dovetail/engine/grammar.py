"""Structured output: which tokens a request's grammar allows next, by llguidance.

A matcher is a function of the generated tokens: it catches up with them like the KV cache does, so a request that was
preempted or migrated needs nothing special. llguidance is imported with the first constrained request.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.errors import Unprocessable
from dovetail.sched.turn import TurnRow
from dovetail.types import Grammar


@dataclass
class _State:
    matcher: Any  # llguidance.LLMatcher
    num_consumed: int = 0  # generated tokens it has seen


class Grammars:
    """Matchers of one model's constrained sequences."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: Any = None
        self._states: dict[int, _State] = {}
        self._bitmask = np.zeros((vocab_size + 31) // 32, dtype=np.int32)

    def constrain(self, row: TurnRow, logits: Tensor) -> None:
        """Set the logits [vocab] of tokens that the grammar forbids here to minus infinity, in place."""
        state = self._caught_up(row)
        state.matcher.unsafe_compute_mask_ptr(self._bitmask.ctypes.data, self._bitmask.nbytes)
        self._check(state)
        allowed = np.unpackbits(self._bitmask.view(np.uint8), bitorder="little", count=self._vocab_size)
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), float("-inf"))

    def is_complete_after(self, row: TurnRow, token: int) -> bool:
        """Whether the text is whole with this token, so that nothing may follow."""
        state = self._states[row.sequence]
        state.matcher.consume_token(token)
        state.num_consumed += 1
        self._check(state)
        return bool(state.matcher.is_stopped())

    def forget(self, sequence: int) -> None:
        self._states.pop(sequence, None)

    def _caught_up(self, row: TurnRow) -> _State:
        state = self._states.get(row.sequence)
        if state is None:
            assert row.sampling.grammar is not None
            state = self._states[row.sequence] = _State(self._compile(row.sampling.grammar))
        missing = row.tokens[row.num_prompt + state.num_consumed :]
        if missing:
            state.matcher.consume_tokens(missing)
            state.num_consumed += len(missing)
            self._check(state)
        return state

    def _compile(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher, LLTokenizer

        if self._tokenizer is None:
            eos = list(self._eos_token_ids) or None
            self._tokenizer = LLTokenizer(str(self._tokenizer_file), n_vocab=self._vocab_size, eos_token=eos)
        matcher = LLMatcher(self._tokenizer, grammar_text(grammar), log_level=0)
        if matcher.is_error():
            raise Unprocessable(f"{grammar.kind}: {_first_line(matcher.get_error())}")
        return matcher

    def _check(self, state: _State) -> None:
        if state.matcher.is_error():
            raise Unprocessable(f"grammar: {in_words(state.matcher.get_error())}")


def grammar_text(grammar: Grammar) -> str:
    """llguidance's own form of a grammar."""
    from llguidance import LLMatcher

    compact = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    try:
        if grammar.kind == "json_object":
            return str(LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=compact))
        if grammar.kind == "json_schema":
            return str(LLMatcher.grammar_from_json_schema(grammar.text, overrides=compact))
        if grammar.kind == "regex":
            return str(LLMatcher.grammar_from_regex(grammar.text))
        return str(LLMatcher.grammar_from_lark(grammar.text))
    except ValueError as error:
        raise Unprocessable(f"{grammar.kind}: {_first_line(str(error))}") from error


def in_words(problem: str) -> str:
    """llguidance names a dead end by its internal reason."""
    if "NoExtension" in problem:
        return "no text fits it: it contradicts itself, or refers to itself without an end"
    return _first_line(problem)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "cannot be compiled"
