"""Stop strings over streamed text. Holds back what may still become one; how the text is cut up does not matter."""

from __future__ import annotations

from collections.abc import Sequence


class Stopper:
    """Watches one choice's text for the first stop string to be complete; of several completed by the same character
    the longest counts."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None  # set once; no text follows it

    def feed(self, text: str) -> str:
        """What may be shown now. Once `matched` is set, the text has ended."""
        if not self._patterns or self.matched is not None:
            return "" if self.matched is not None else text
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            complete = [pattern for pattern in self._patterns if pattern.advance(buffer[position])]
            if complete:
                return self._end(buffer[: position + 1], max((p.text for p in complete), key=len))
        held = max(pattern.reached for pattern in self._patterns)
        self._held = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held]

    def flush(self) -> str:
        """The text ended without a stop string: what was held back is text."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, stop: str) -> str:
        self.matched, self._held = stop, ""
        return text if self._include_stop else text[: len(text) - len(stop)]


class _Pattern:
    """Knuth-Morris-Pratt: `reached` is the length of the longest prefix of `text` that the input so far ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.reached = 0
        self._fallback = _fallback_table(text)

    def advance(self, char: str) -> bool:
        while self.reached and self.text[self.reached] != char:
            self.reached = self._fallback[self.reached - 1]
        if self.text[self.reached] == char:
            self.reached += 1
        return self.reached == len(self.text)


def _fallback_table(text: str) -> list[int]:
    """For every prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(text)
    length = 0
    for position in range(1, len(text)):
        while length and text[position] != text[length]:
            length = table[length - 1]
        if text[position] == text[length]:
            length += 1
        table[position] = length
    return table
