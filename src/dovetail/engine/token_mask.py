"""Which tokens a row may not have, as a bitmask for a device that samples by itself: those that are not allowed, that
would end the text too early or complete a bad word, that a grammar forbids, or that are not the next of a forced mark.

It says the same as the steps of `sampler` that set logits to minus infinity.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dovetail.engine.grammar import Grammars
from dovetail.engine.sampler import ends_of_bad_words, forced_token
from dovetail.errors import Unprocessable
from dovetail.sched.turn import TurnRow
from dovetail.types import SamplingParams


class TokenMask:
    """Of one sequence. Bit t % 32 of word t // 32 is set where token t may be chosen."""

    def __init__(self, sampling: SamplingParams, vocab: int) -> None:
        self._sampling, self._vocab = sampling, vocab
        self._has_long_words = any(len(word) > 1 for word in sampling.bad_words)
        self.needs_text = sampling.grammar is not None or sampling.thinking is not None or self._has_long_words
        self._always: np.ndarray | None = None  # what no text changes; None = everything is open
        if sampling.allowed_token_ids:
            self._always = self._only(sampling.allowed_token_ids)
        short = [word[0] for word in sampling.bad_words if len(word) == 1]
        if short:
            self._always = self._without(self._always, short)

    @staticmethod
    def of(sampling: SamplingParams, vocab: int) -> TokenMask | None:
        """None = nothing is ever barred."""
        barred = sampling.allowed_token_ids or sampling.bad_words or sampling.grammar or sampling.thinking
        bars_ends = sampling.min_tokens > 0 and bool(sampling.stop_token_ids)
        return TokenMask(sampling, vocab) if barred or bars_ends else None

    def words(self, row: TurnRow, grammars: Grammars) -> tuple[np.ndarray | None, str | None]:
        """uint32, not to be written to; None = nothing is barred now. And what is wrong with the row's grammar."""
        sampling, words = self._sampling, self._always
        if row.end - row.num_prompt < sampling.min_tokens and len(sampling.allowed_token_ids) != 1:
            words = self._without(words, sampling.stop_token_ids)
        if self._has_long_words:
            words = self._without(words, ends_of_bad_words(row, self._vocab))
        if sampling.grammar is not None:
            try:
                allowed = grammars.allowed(row)
            except Unprocessable as error:
                return words, str(error)
            words = allowed if words is None else words & allowed
        forced = forced_token(row) if sampling.thinking is not None else None
        if forced is not None and (sampling.grammar is None or words is None or _has(words, forced)):
            words = self._only((forced,))
        return words, None

    def _only(self, tokens: Iterable[int]) -> np.ndarray:
        return self._without(None, tokens) ^ np.uint32(0xFFFFFFFF)

    def _without(self, words: np.ndarray | None, tokens: Iterable[int]) -> np.ndarray:
        size = -(-self._vocab // 32)
        changed = np.full(size, 0xFFFFFFFF, np.uint32) if words is None else words.copy()
        barred = np.fromiter((token for token in tokens if 0 <= token < self._vocab), np.int64)
        np.bitwise_and.at(changed, barred >> 5, ~(np.uint32(1) << (barred & 31).astype(np.uint32)))
        return changed


def _has(words: np.ndarray, token: int) -> bool:
    return bool(words[token >> 5] >> np.uint32(token & 31) & np.uint32(1))
