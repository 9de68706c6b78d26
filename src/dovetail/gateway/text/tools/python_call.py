"""One call written as Python, `name(key=value, …)`: read to its closing parenthesis, then told as JSON.

Values are literals. Nothing is ever run: the text is parsed, and what is not a literal makes it no call.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

_HEAD = re.compile(r"\s*\[?\s*([A-Za-z_][\w.:/-]*)\s*\(")
_HEAD_PREFIX = re.compile(r"\s*(\[\s*)?([A-Za-z_][\w.:/-]*\s*)?$")
_WORDS = {"true": True, "false": False, "null": None}
_MAX_CHARS = 65536


class PythonCall:
    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self._arguments = ""
        self._start = 0  # of the arguments, behind the opening parenthesis
        self._depth = 0
        self._quote = ""
        self._escaped = False

    @property
    def is_call(self) -> bool:
        return self.is_done and self.name is not None

    def take_arguments(self) -> str:
        arguments, self._arguments = self._arguments, ""
        return arguments

    def feed(self, char: str) -> None:
        self.raw += char
        if self._start == 0:
            self._feed_head()
        elif self._quote:
            self._feed_quoted(char)
        elif char in "'\"":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            if self._depth == 0:
                self._end()
        self.is_broken |= len(self.raw) > _MAX_CHARS

    def _feed_head(self) -> None:
        head = _HEAD.match(self.raw)
        if head is not None:
            self.name, self._start, self._depth = head.group(1), len(self.raw), 1
        elif _HEAD_PREFIX.match(self.raw) is None:
            self.is_broken = True

    def _feed_quoted(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == self._quote:
            self._quote = ""

    def _end(self) -> None:
        try:
            self._arguments = json.dumps(_keywords(self.raw[self._start : -1].strip()), ensure_ascii=False)
            self.is_done = True
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            self.name, self.is_broken = None, True


def _keywords(text: str) -> dict[str, Any]:
    source = f"f({text})"
    call = ast.parse(source, mode="eval").body
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("arguments have names")
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        value = _value(source, keyword.value)
        if keyword.arg is not None:
            found[keyword.arg] = value
        elif isinstance(value, dict):
            found.update(value)
        else:
            raise ValueError("only an object can be spread")
    return found


def _value(source: str, node: ast.expr) -> Any:
    """As JSON where it is JSON, whose escapes and words differ from Python's; else as Python."""
    segment = ast.get_source_segment(source, node) or ""
    try:
        return json.loads(segment)
    except ValueError:
        return _literal(node)


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        return {str(_literal(key)): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, str | int | float | bool):
        raise ValueError("a value that JSON does not have")
    return value
