"""What endpoints share: a JSON body in, a record out, and how both are documented."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from dovetail.errors import RequestTimeout, UnsupportedMediaType
from dovetail.gateway.http.api import parse_body
from dovetail.gateway.http.replies import ErrorBody

_INLINE_BYTES = 32 * 1024  # parsed in a millisecond or two, whatever is in them

Responses = dict[int | str, dict[str, Any]]
Handler = Callable[..., Awaitable[Response]]
Body = TypeVar("Body", bound=BaseModel)


def request_body(kind: type[BaseModel]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def responses(answer: type[BaseModel], errors: Sequence[int] = ()) -> Responses:
    return {
        200: {"model": answer, "description": "OK"},
        **{status: {"model": ErrorBody, "description": "error"} for status in errors},
    }


def documented(errors: Sequence[int], error: type[BaseModel] = ErrorBody, *, streams: bool = False) -> Responses:
    """Of an answer whose fields are another API's: JSON, or events."""
    answer: dict[str, Any] = {"description": "OK"}
    if streams:
        answer["content"] = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}
    return {200: answer, **{status: {"model": error, "description": "error"} for status in errors}}


async def read_body(kind: type[Body], request: Request) -> Body:
    """The body as a record. Not `request.body()`, which would be kept for as long as the answer takes."""
    _check_media_type(request.headers.get("content-type", ""))
    settings, executors = request.app.state.settings, request.app.state.executors
    timeout_s = settings.config.server.body_timeout
    try:
        async with asyncio.timeout(timeout_s):
            body = b"".join([piece async for piece in request.stream()])
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {timeout_s:g} s", code="timeout") from None
    if len(body) <= _INLINE_BYTES:
        return parse_body(kind, body)
    executors.note(len(body))
    parsed: Body = await executors.parse.run(lambda: parse_body(kind, body))
    return parsed


def _check_media_type(content_type: str) -> None:
    """Also keeps pages of other origins out: what a browser sends them without asking first is never JSON."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType(
            f"unsupported content type {media_type[:100]!r}: send 'Content-Type: application/json'",
            code="unsupported_media_type",
        )


def json_response(record: BaseModel, status: int = 200) -> Response:
    return Response(record.model_dump_json(by_alias=True), status, media_type="application/json")
