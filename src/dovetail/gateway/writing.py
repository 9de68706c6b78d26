"""Long answers as JSON, in pieces: pydantic writes a record in one go, and holds the interpreter for all of that time.

Log-probabilities make answers long (a megabyte for a thousand tokens). Their records are made and written by a thread,
which lets the event loop in between two pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

_GROUP = 256  # items of a list that are written together


def json_pieces(record: BaseModel) -> Iterator[bytes]:
    """What `model_dump_json(exclude_unset=True)` gives. Records in lists of more than a group are written with all of
    their fields."""
    separator = b"{"
    for name in type(record).model_fields:
        if name in record.model_fields_set:
            yield separator + to_json(name) + b":"
            yield from _value(getattr(record, name))
            separator = b","
    yield b"{}" if separator == b"{" else b"}"


def _value(value: Any) -> Iterator[bytes]:
    if isinstance(value, BaseModel):
        yield from json_pieces(value)
    elif isinstance(value, list):
        yield from _items(value)
    else:
        yield to_json(value)


def _items(items: list[Any]) -> Iterator[bytes]:
    if len(items) <= _GROUP:
        pieces = [_value(item) for item in items]
    else:
        pieces = [_group(items[at : at + _GROUP]) for at in range(0, len(items), _GROUP)]
    separator = b"["
    for piece in pieces:
        yield separator
        yield from piece
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _group(items: list[Any]) -> Iterator[bytes]:
    yield to_json(items)[1:-1]
