"""Prompt lookup: what followed when the last tokens of a text occurred in it before.

An index of one sequence's pairs of tokens that grows with it. A look costs a bounded number of comparisons, whatever
the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MIN_MATCH = 2  # tokens: one alone is followed by anything
MAX_MATCH = 16  # beyond that a longer match says no more
MAX_TRIES = 8  # earlier occurrences that are compared, the latest first
MAX_TEXT = 32_768  # tokens before the answer that are indexed, the last ones


class Match(NamedTuple):
    length: int  # of the last tokens, how many occurred before
    tokens: list[int]  # what followed there


class LookupIndex:
    """Over what a text may repeat (a prediction, if there is one, then prompt and answer).

    text  |---- prediction ----|- -1 -|--------- prompt ---------|------ answer -----|
                                  a token that is none: no match reaches across
    """

    def __init__(self, prediction: Sequence[int] = ()) -> None:
        self._text = [*prediction[-MAX_TEXT:], -1] if prediction else []
        self._latest: dict[tuple[int, int], int] = {}  # pair -> where it ended last
        self._before: list[int] = []  # by position: where the pair that ends there ended the time before; -1 = never
        self._num_known = 0  # tokens of the sequence that are in the text, or too far back for it
        self._index()

    def extend(self, tokens: Sequence[int]) -> None:
        """All tokens of the sequence; those that are new are indexed. The last pair is found by later ones only."""
        if not self._num_known:
            self._num_known = max(len(tokens) - MAX_TEXT, 0)
        self._text += tokens[self._num_known :]
        self._num_known = len(tokens)
        self._index()

    def _index(self) -> None:
        text, before, latest = self._text, self._before, self._latest
        if text and not before:
            before.append(-1)
        for position in range(len(before), len(text)):
            pair = (text[position - 1], text[position])
            before.append(latest.get(pair, -1))
            latest[pair] = position

    def find(self, count: int) -> Match | None:
        """Up to `count` tokens that followed the longest of the latest matches."""
        text = self._text
        place = self._before[-1] if self._before else -1
        best, best_length = -1, 0
        for _ in range(MAX_TRIES):
            if place < 0:
                break
            length = self._match_length(place)
            if length > best_length:
                best, best_length = place, length
            if length >= MAX_MATCH:
                break
            place = self._before[place]
        if best_length < MIN_MATCH:
            return None
        return Match(best_length, self._following(best, count)) if text[best + 1] >= 0 else None

    def _following(self, place: int, count: int) -> list[int]:
        """Where the text ends within them, it is taken to go on as it did from there: a period repeats itself."""
        text, period = self._text, len(self._text) - 1 - place
        found: list[int] = []
        for step in range(count):
            token = text[place + 1 + step % period]
            if token < 0:
                break
            found.append(token)
        return found

    def _match_length(self, place: int) -> int:
        text, end = self._text, len(self._text) - 1
        length = 0
        while length < MAX_MATCH and length <= place and text[place - length] == text[end - length]:
            if text[end - length] < 0:
                break
            length += 1
        return length
