"""Structured output: which tokens a request's grammar allows next, by llguidance.

A matcher is a function of the generated tokens: it catches up with them like the KV cache does, so a request that was
preempted or migrated needs nothing special. llguidance is imported with the first constrained request.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.engine.grammar_library import GrammarLibrary
from dovetail.errors import Unprocessable
from dovetail.grammars import TokenizerKey, in_words
from dovetail.sched.turn import TurnRow

MAX_STEP_S = 0.5  # processor time for the tokens that may follow; what the gateway lets through takes less than a fifth
TOO_SLOW = f"more than {MAX_STEP_S} s for one token"


@dataclass
class _State:
    matcher: Any  # llguidance.LLMatcher
    num_consumed: int = 0  # generated tokens it has seen


class Grammars:
    """Matchers of one model's constrained sequences."""

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        library: GrammarLibrary | None = None,
    ) -> None:
        """`library`: what all models of the process have compiled; None = its own."""
        self._key = TokenizerKey(str(tokenizer_file), vocab_size, eos_token_ids)
        self._library = library or GrammarLibrary()
        self._vocab_size = vocab_size
        self._states: dict[int, _State] = {}
        self._bitmask = np.zeros((vocab_size + 31) // 32, dtype=np.int32)

    def constrain(self, row: TurnRow, logits: Tensor) -> None:
        """Set the logits [vocab] of tokens that the grammar forbids here to minus infinity, in place."""
        allowed = np.unpackbits(self.allowed(row).view(np.uint8), bitorder="little", count=self._vocab_size)
        logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), float("-inf"))

    def allowed(self, row: TurnRow) -> np.ndarray:
        """A bit for each token that the grammar allows here, uint32 [words]."""
        state = self._caught_up(row)
        started = time.thread_time()
        state.matcher.unsafe_compute_mask_ptr(self._bitmask.ctypes.data, self._bitmask.nbytes)
        if time.thread_time() - started > MAX_STEP_S:
            self._refuse(row)
        self._check(state)
        return self._bitmask.view(np.uint32).copy()

    @property
    def has_states(self) -> bool:
        return bool(self._states)

    def follows(self, sequence: int) -> bool:
        """It was asked what the grammar of this sequence allows, and the sequence goes on."""
        return sequence in self._states

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
            state = self._states[row.sequence] = _State(self._library.matcher(self._key, row.sampling.grammar))
        missing = row.tokens[row.num_prompt + state.num_consumed :]
        if missing:
            state.matcher.consume_tokens(missing)
            state.num_consumed += len(missing)
            self._check(state)
        return state

    def _refuse(self, row: TurnRow) -> None:
        """A token of this grammar took too long: the grammar is given up, so that no iteration waits for it again."""
        assert row.sampling.grammar is not None
        self._library.refuse(self._key, row.sampling.grammar, TOO_SLOW)
        raise Unprocessable(f"grammar: {TOO_SLOW}")

    def _check(self, state: _State) -> None:
        if state.matcher.is_error():
            raise Unprocessable(f"grammar: {in_words(state.matcher.get_error())}")
