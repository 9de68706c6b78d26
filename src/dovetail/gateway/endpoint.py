"""What endpoints share: a JSON body in, a record out, and how both are documented."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from dovetail.errors import InvalidRequest, UnsupportedMediaType
from dovetail.gateway.api import parse_body
from dovetail.gateway.replies import ErrorBody

BODY_TIMEOUT_S = 60.0

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


async def read_body(kind: type[Body], request: Request) -> Body:
    _check_media_type(request.headers.get("content-type", ""))
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await request.body()
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s", code="timeout") from None
    return parse_body(kind, body)


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
