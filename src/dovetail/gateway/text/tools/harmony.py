"""The channels of gpt-oss, taken apart: what it thinks (analysis), which functions it calls (commentary to one of them)
and what it says (final, and commentary to nobody).

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>

The library `openai-harmony` reads token ids of its own vocabulary, which it downloads; here text arrives in pieces, of
whatever tokenizer the model came with.
"""  # noqa: E501

from __future__ import annotations

import re
from typing import Literal

from dovetail.gateway.text.reading import CallDelta, Parts, SteppingReader
from dovetail.gateway.text.tools.held import could_become, find_first, split_held

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)
THOUGHTS = (f"{CHANNEL}analysis{MESSAGE}", END)  # what stands around them
FINAL = f"{CHANNEL}final{MESSAGE}"

# How an answer begins whose prompt ends with `<|start|>assistant`; anything else is text.
_HEADS = (CHANNEL, START, MESSAGE, "to=")
_HEAD_ENDS = (MESSAGE, END, CALL, RETURN)
_BODY_ENDS = (END, CALL, RETURN, START, CHANNEL)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTION = "functions."

Kind = Literal["content", "reasoning", "call", "hidden"]


def is_harmony(template: str) -> bool:
    return CHANNEL in template and MESSAGE in template


class HarmonyReader(SteppingReader):
    """Reads messages one after the other.

    start ─mark─▶ head ─<|message|>─▶ body ─<|end|>─▶ head of the next; start ─anything else─▶ body, as text
    """

    def __init__(self, *, reads_calls: bool) -> None:
        super().__init__()
        self._reads_calls = reads_calls  # if not, nobody has offered functions: a call is text
        self._state: Literal["start", "head", "body"] = "start"
        self._kind: Kind = "hidden"
        self._is_empty = True  # nothing of this message was given
        self._given: set[Kind] = set()  # parts that have a message already
        self._num_calls = 0

    def flush(self) -> Parts:
        parts = Parts()
        if self._state == "start" or (self._state == "head" and self._is_plain()):
            self._begin(parts, "content")
        if self._state == "body":
            self._give(parts, self._buffer)
            self._end(parts)
        self._buffer = ""  # else a head that was cut short
        return parts

    def _is_plain(self) -> bool:
        return not self._given and not self._num_calls and find_first(self._buffer, MARKS) is None

    def _step(self, parts: Parts) -> bool:
        match self._state:
            case "start":
                return self._read_start(parts)
            case "head":
                return self._read_head(parts)
            case "body":
                return self._read_body(parts)

    def _read_start(self, parts: Parts) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(_HEADS):
            self._state = "head"
        elif text and not could_become(text, _HEADS):
            self._begin(parts, "content")
        else:
            return False
        return True

    def _read_head(self, parts: Parts) -> bool:
        found = find_first(self._buffer, _HEAD_ENDS)
        if found is None:
            return False
        at, mark = found
        head, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
        if mark == MESSAGE:
            self._begin_with(parts, head)
        return True

    def _begin_with(self, parts: Parts, head: str) -> None:
        role, _, channel = head.rpartition(START)[2].partition(CHANNEL)
        recipient = _RECIPIENT.search(head)
        if role.strip() and not role.strip().startswith(("assistant", "to=")):
            self._begin(parts, "hidden")  # it plays somebody else
        elif recipient is not None and recipient[1].startswith(_FUNCTION):
            self._begin(parts, "call" if self._reads_calls else "content", recipient[1].removeprefix(_FUNCTION))
        elif recipient is not None or channel.strip().startswith("analysis"):
            self._begin(parts, "reasoning")
        else:
            self._begin(parts, "content")

    def _begin(self, parts: Parts, kind: Kind, name: str = "") -> None:
        self._state, self._kind, self._is_empty = "body", kind, True
        if kind == "call":
            parts.add(Parts(calls=[CallDelta(self._num_calls, name)]))
            self._num_calls += 1

    def _read_body(self, parts: Parts) -> bool:
        found = find_first(self._buffer, _BODY_ENDS)
        if found is None:
            shown, self._buffer = split_held(self._buffer, _BODY_ENDS)
            self._give(parts, shown)
            return False
        at, mark = found
        self._give(parts, self._buffer[:at])
        self._end(parts)
        self._buffer = self._buffer[at:].removeprefix("" if mark in (START, CHANNEL) else mark)
        self._state = "head"
        return True

    def _give(self, parts: Parts, text: str) -> None:
        if not text or self._kind == "hidden":
            return
        if self._kind == "call":
            parts.add(Parts(calls=[CallDelta(self._num_calls - 1, None, text)]))
        else:
            text = "\n" + text if self._is_empty and self._kind in self._given else text
            parts.add(Parts(reasoning=text) if self._kind == "reasoning" else Parts(text))
            self._given.add(self._kind)
        self._is_empty = False

    def _end(self, parts: Parts) -> None:
        if self._kind == "call" and self._is_empty:
            self._give(parts, "{}")  # a function without arguments
