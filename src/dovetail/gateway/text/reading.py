"""An answer's text as its parts: what the model thought, what it says, and which tools it calls.

A reader is fed the text of one choice as it comes and gives what is new of each part; how the text is cut up does not
matter, so that a streamed answer is the whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class CallDelta:
    """What is new in one call of a tool. The first of a call has its name."""

    index: int  # of the call within the answer
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class Parts:
    """What is new, by part."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, other: Parts) -> None:
        self.content += other.content
        self.reasoning += other.reasoning
        for call in other.calls:
            self._add_call(call)

    def _add_call(self, call: CallDelta) -> None:
        """Pieces of one call that come together are one piece."""
        if self.calls and self.calls[-1].index == call.index:
            self.calls[-1].arguments += call.arguments
        else:
            self.calls.append(CallDelta(call.index, call.name, call.arguments))

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class Reader(Protocol):
    def feed(self, text: str) -> Parts: ...

    def flush(self) -> Parts:
        """The text has ended: what was held back."""


class SteppingReader:
    """One that keeps what it cannot tell of yet, and takes something from that with each step."""

    def __init__(self) -> None:
        self._buffer = ""

    def feed(self, text: str) -> Parts:
        self._buffer += text
        parts = Parts()
        while self._buffer and self._step(parts):
            pass
        return parts

    def _step(self, parts: Parts) -> bool:
        """Take something from the buffer; False if more is needed first."""
        raise NotImplementedError


class PlainReader:
    """All of it is what the model says."""

    def feed(self, text: str) -> Parts:
        return Parts(text)

    def flush(self) -> Parts:
        return Parts()


MakeReader = Callable[[], Reader]
