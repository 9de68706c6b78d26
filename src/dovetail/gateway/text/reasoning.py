"""What a model thinks aloud before it answers, apart from the answer: `reasoning_content`, and a budget for it."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.gateway.text.reading import Parts, PlainReader, Reader
from dovetail.gateway.text.tools.harmony import THOUGHTS, is_harmony
from dovetail.gateway.text.tools.held import could_become, split_held


@dataclass(frozen=True)
class ThinkMarks:
    opening: str
    closing: str


_KNOWN = (ThinkMarks("<think>", "</think>"), ThinkMarks("[THINK]", "[/THINK]"))


def think_marks(template: str) -> ThinkMarks | None:
    """Of a model whose chat template speaks of thoughts."""
    if is_harmony(template):
        return ThinkMarks(*THOUGHTS)
    return next((marks for marks in _KNOWN if marks.closing in template), None)


class ThinkingReader:
    """Thoughts come first, if at all: after the opening mark, or at once where the prompt has it already."""

    def __init__(self, marks: ThinkMarks, answer: Reader | None = None, *, is_open: bool) -> None:
        self._marks = marks
        self._answer = answer or PlainReader()
        self._state = "thinking" if is_open else "start"
        self._buffer = ""
        self._is_fresh = True  # no word of this part was shown: white space before it is dropped

    def feed(self, text: str) -> Parts:
        if self._state == "answering" and not self._is_fresh:
            return self._answer.feed(text)
        self._buffer += text
        parts = Parts()
        if self._state == "start":
            self._read_start(parts)
        if self._state == "thinking":
            self._read_thought(parts)
        if self._state == "answering":
            self._read_answer(parts)
        return parts

    def flush(self) -> Parts:
        parts = Parts()
        if self._state == "thinking":
            parts.reasoning = self._buffer.strip() if self._is_fresh else self._buffer.rstrip()
        else:
            parts.add(self._answer.feed(self._buffer))
        self._buffer = ""
        parts.add(self._answer.flush())
        return parts

    def _read_start(self, parts: Parts) -> None:
        text = self._buffer.lstrip()
        if text.startswith(self._marks.opening):
            self._state, self._buffer = "thinking", text[len(self._marks.opening) :]
        elif text and not could_become(text, (self._marks.opening,)):
            self._state, self._is_fresh = "answering", False
            text, self._buffer = self._buffer, ""
            parts.add(self._answer.feed(text))

    def _read_thought(self, parts: Parts) -> None:
        if self._is_fresh:
            self._buffer = self._buffer.lstrip()
        thought, mark, rest = self._buffer.partition(self._marks.closing)
        if mark:
            parts.reasoning += thought.rstrip()
            self._state, self._buffer, self._is_fresh = "answering", rest, True
            return
        shown, _ = split_held(thought, (self._marks.closing,))
        shown = shown.rstrip()  # white space may stand before the mark
        self._buffer = thought[len(shown) :]
        self._is_fresh &= not shown
        parts.reasoning += shown

    def _read_answer(self, parts: Parts) -> None:
        if self._is_fresh:
            self._buffer = self._buffer.lstrip()
            self._is_fresh = not self._buffer
        text, self._buffer = self._buffer, ""
        parts.add(self._answer.feed(text))
