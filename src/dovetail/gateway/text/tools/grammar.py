"""Grammars that hold an answer to well-formed calls: which functions, and arguments by their schemas.

Written as Lark for llguidance, with the schemas as they are. What the model may not write, it cannot write.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dovetail.gateway.text.tools.formats import ToolFormat
from dovetail.gateway.text.tools.schema import Tool, Wanted

# As models are trained to write JSON; without it a small model may write spaces without end.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MAX_CALLS = 32  # of one forced answer
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "if", "not", "patternProperties", "unevaluatedProperties")

Mark = Callable[[str], str | None]  # how a text is written in a grammar if it is one special token


class CallGrammar:
    """Rules for the calls of one request, in the form of one family."""

    def __init__(self, format: ToolFormat, wanted: Wanted, mark: Mark, *, lenient: bool = False) -> None:
        self._format = format
        self._wanted = wanted
        self._mark = mark
        self._lenient = lenient
        self._rules: list[str] = []

    def forced(self) -> str:
        """The rule `calls`: the whole answer, or its end."""
        format = self._format
        several = f" ({self._text(format.separator)} call){{0,{_MAX_CALLS - 1}}}" if self._wanted.parallel else ""
        return self._grammar(f"calls: {self._text(format.opening)} call{several} {self._text(format.end)}")

    def free(self) -> str:
        """The rule `answer`: text in which calls may stand, each of them well-formed."""
        assert self._format.form.openings, "calls that are a whole answer need no text around them"
        opening = self._format.form.openings[0]
        pattern = escaped(opening)
        rules = [
            "answer: (lead call)* TAIL",
            f"lead[lazy]: /(?s:.*){pattern}/",
            f"TAIL: ~/(?s:.*{pattern}.*)/",
        ]
        item = self._format.item[0].removeprefix(opening)
        return self._grammar(*rules, item=item)

    def _grammar(self, *heads: str, item: str | None = None) -> str:
        start = self._format.item[0] if item is None else item
        bodies = " | ".join(f"call_{index}" for index, _ in enumerate(self._wanted.callable))
        self._rules = [*heads, f"call: {self._text(start)} ({bodies}) {self._text(self._format.item[1])}"]
        for index, tool in enumerate(self._wanted.callable):
            self._add_call(index, tool)
        return "\n".join(self._rules)

    def _add_call(self, index: int, tool: Tool) -> None:
        format, name = self._format, tool.function.name
        # Arguments are an object, whether the schema says so or not.
        schema = {"type": "object"} | (tool.function.parameters or {"properties": {}})
        self._rules.append(
            f"call_{index}: {self._text(format.call_head(name))} arguments_{index} {self._text(format.call_tail())}"
        )
        if format.form.body == "python":
            self._add_keywords(index, schema)
        else:
            self._rules.append(f"arguments_{index}: {self._json(schema)}")

    def _add_keywords(self, index: int, schema: Mapping[str, Any]) -> None:
        """`key=value, …` in the schema's order, those that may be left out left out.

        arguments_i_k: from the k-th on, nothing written yet; more_i_k: something is."""
        properties = schema.get("properties")
        if not isinstance(properties, dict) or any(key in schema for key in _COMBINING):
            self._rules.append(f'arguments_{index}: "**" {self._json(schema)}')
            return
        required, count = schema.get("required") or (), len(properties)
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        self._rules.append(f"arguments_{index}: arguments_{index}_0")
        for k, (key, value) in enumerate(properties.items()):
            self._rules.append(f"value_{index}_{k}: {literal(key + '=')} {self._json(_with(value, shared))}")
            skip = "" if key in required else f" | arguments_{index}_{k + 1}"
            self._rules.append(f"arguments_{index}_{k}: value_{index}_{k} more_{index}_{k + 1}{skip}")
            written = f'", " value_{index}_{k} more_{index}_{k + 1}'
            skip = "" if key in required else f" | more_{index}_{k + 1}"
            self._rules.append(f"more_{index}_{k}: {written}{skip}")
        self._rules += [f'arguments_{index}_{count}: ""', f'more_{index}_{count}: ""']

    def _json(self, schema: Any) -> str:
        closed = closed_schema(schema)
        if isinstance(closed, dict):
            options = COMPACT | ({"lenient": True} if self._lenient else {})
            closed = {**closed, "x-guidance": options}
        return f"%json {json.dumps(closed)}"

    def _text(self, text: str) -> str:
        return marked_text(text, self._format.markers, self._mark)


def marked_text(text: str, markers: Iterable[str], mark: Mark) -> str:
    """A text as Lark, its markers as the tokens that they are."""
    pieces = [text]
    for marker in markers:
        pieces = [part for piece in pieces for part in _cut(piece, marker)]
    return " ".join(mark(piece) or literal(piece) for piece in pieces if piece) or '""'


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def closed_schema(schema: Any) -> Any:
    """Objects that name their properties have no others. JSON schemas allow more unless told, and a model that may
    invent keys does; whatever fits this fits the schema as it was."""
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed_part(key, value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not any(key in schema for key in _COMBINING):
        closed.setdefault("additionalProperties", False)
    return closed


def _closed_part(key: str, value: Any) -> Any:
    if key in ("properties", "$defs", "definitions") and isinstance(value, dict):
        return {name: closed_schema(part) for name, part in value.items()}
    if key in ("anyOf", "oneOf", "prefixItems") and isinstance(value, list):
        return [closed_schema(part) for part in value]
    return closed_schema(value) if key in ("items", "additionalProperties") else value


def _with(schema: Any, shared: Mapping[str, Any]) -> Any:
    return {**schema, **shared} if isinstance(schema, dict) else schema


def _cut(text: str, marker: str) -> Iterable[str]:
    for index, piece in enumerate(text.split(marker)):
        if index:
            yield marker
        yield piece


def escaped(text: str) -> str:
    """A text as a regular expression."""
    return "".join(f"\\{char}" if char in r"\.+*?()|[]{}^$/" else char for char in text)
