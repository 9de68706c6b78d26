"""One call written as a JSON object, read character by character: its arguments are shown while they are written."""

from __future__ import annotations

import json

_ARGUMENTS = ("arguments", "parameters")  # Hermes, Qwen and Mistral; Llama 3


class JsonValue:
    """Follows one JSON value to its end, without building it."""

    def __init__(self) -> None:
        self.text = ""
        self.is_done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, char: str) -> bool:
        """False: the value had ended before this character, which is not part of it (a bare number or word)."""
        if self._is_bare and char in ",}] \t\r\n":
            self.is_done = True
            return False
        self.text += char
        if self._in_string:
            self._feed_string(char)
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_done = self._depth <= 0
        return True

    @property
    def _is_bare(self) -> bool:
        return bool(self.text) and self._depth == 0 and not self._in_string

    def _feed_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            self.is_done = self._depth == 0


class JsonCall:
    """`{"name": …, "arguments": {…}}` in either order, with whatever else is in it. After `is_done`, `name` says
    whether it was a call at all."""

    def __init__(self) -> None:
        self.raw = ""  # all of it, for an object that turns out to be no call
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False  # no JSON object
        self._key: str | None = None
        self._value: JsonValue | None = None
        self._arguments = ""
        self._num_shown = 0

    def feed(self, char: str) -> None:
        self.raw += char
        if self._value is None:
            self._between(char)
        elif not self._value.feed(char):
            self._end_value()
            self._between(char)
        else:
            self._follow_value()

    @property
    def is_call(self) -> bool:
        """Enough is known to tell of it: a name, and arguments that have begun or will not come."""
        return self.name is not None and (self.is_done or bool(self._arguments))

    def take_arguments(self) -> str:
        """What is new of them."""
        if self.is_done and not self._arguments:
            self._arguments = "{}"  # a function without parameters
        new = self._arguments[self._num_shown :]
        self._num_shown = len(self._arguments)
        return new

    def _between(self, char: str) -> None:
        """Outside any value: the braces, commas and colons of the object itself."""
        if self.raw.strip() in ("", "{"):
            return
        if self.raw.lstrip()[0] != "{":
            self.is_broken = True
        elif char in " \t\r\n:,":
            return
        elif char == "}":
            self.is_done = True
        elif self._key is None and char != '"':
            self.is_broken = True
        else:
            self._value = JsonValue()
            self._value.feed(char)
            self._follow_value()

    def _follow_value(self) -> None:
        assert self._value is not None
        if self._key in _ARGUMENTS and self._value.text.startswith("{"):
            self._arguments = self._value.text
        if self._value.is_done:
            self._end_value()

    def _end_value(self) -> None:
        assert self._value is not None
        text, self._value = self._value.text, None
        if self._key is None:
            self._key = _string(text)
            self.is_broken |= self._key is None
            return
        if self._key == "name":
            self.name = _string(text)
            self.is_broken |= self.name is None
        elif self._key in _ARGUMENTS and not self._arguments:
            self._arguments = _string(text) or ""  # some models write them as text
        self._key = None


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
