"""Long answers as JSON, in pieces: pydantic writes a record in one go, and holds the interpreter for all of that time.

Log-probabilities make answers long (a megabyte for a thousand tokens). Their records are made and written by a thread,
which lets the event loop in between two pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

_GROUP = 256  # items of a list that are written together


def json_pieces(value: Any, *, exclude_unset: bool = True) -> Iterator[bytes]:
    """What `model_dump_json` gives of a record, also of one within plain dicts and lists. Records in lists of more than
    a group are written with all of their fields."""
    if isinstance(value, BaseModel):
        names = (name for name in type(value).model_fields if not exclude_unset or name in value.model_fields_set)
        yield from _object(((name, getattr(value, name)) for name in names), exclude_unset)
    elif isinstance(value, dict):
        yield from _object(value.items(), exclude_unset)
    elif isinstance(value, list):
        yield from _items(value, exclude_unset)
    else:
        yield to_json(value, by_alias=False)


def _object(fields: Iterable[tuple[str, Any]], exclude_unset: bool) -> Iterator[bytes]:
    separator = b"{"
    for name, value in fields:
        yield separator + to_json(name) + b":"
        yield from json_pieces(value, exclude_unset=exclude_unset)
        separator = b","
    yield b"{}" if separator == b"{" else b"}"


def _items(items: list[Any], exclude_unset: bool) -> Iterator[bytes]:
    if len(items) <= _GROUP:
        pieces = [json_pieces(item, exclude_unset=exclude_unset) for item in items]
    else:
        pieces = [_group(items[at : at + _GROUP]) for at in range(0, len(items), _GROUP)]
    separator = b"["
    for piece in pieces:
        yield separator
        yield from piece
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _group(items: list[Any]) -> Iterator[bytes]:
    yield to_json(items, by_alias=False)[1:-1]
