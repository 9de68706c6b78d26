"""How much a JSON body may hold, found out before anything is made of it; and how strictly its fields are read.

Parsing keeps the interpreter to itself for as long as there are values: two megabytes of "[],[],…" take a second, of
text milliseconds. Counting what stands outside of strings takes milliseconds for either.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from dovetail.errors import InvalidRequest

_SMALL_BYTES = 8 * 1024  # parsed sooner than counted
MAX_CONTAINERS = 16 * 1024  # lists and objects: 4,096 messages with parts, tools, schemas
MAX_STRINGS = 32 * 1024  # keys included
MAX_VALUES = 160 * 1024  # numbers mostly: token ids, of a context of 128k at most


class StrictBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False, populate_by_name=True)


def check_json_size(body: bytes) -> None:
    """Raises InvalidRequest for a body of more values than any request needs. Says nothing on whether it is JSON."""
    if len(body) <= _SMALL_BYTES:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # now every quote begins or ends a string
    _check(plain.count(b'"') // 2, MAX_STRINGS, "strings")
    outside = b"".join(plain.split(b'"')[::2])
    _check(outside.count(b"[") + outside.count(b"{"), MAX_CONTAINERS, "lists and objects")
    _check(outside.count(b","), MAX_VALUES, "values")


def _check(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise InvalidRequest(f"the body has {count} {what}, more than {limit}", code="body_too_complex")
