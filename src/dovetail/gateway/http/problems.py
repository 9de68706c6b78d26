"""Errors as HTTP responses, each in the shape of the API that was called: OpenAI's, Anthropic's or Ollama's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Literal

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from dovetail.errors import RequestError
from dovetail.gateway.admin.keys import is_of_ollama
from dovetail.gateway.http.replies import ErrorBody, ErrorDetail


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


Api = Literal["openai", "anthropic", "ollama"]

MESSAGES_PATH = "/v1/messages"
VERSION_HEADER = "anthropic-version"  # sent by Anthropic's clients, whatever they ask

# Where Anthropic has another word than OpenAI.
_ANTHROPIC_KINDS = {404: "not_found_error", 413: "request_too_large", 500: "api_error"}


def api_of(scope: Scope) -> Api:
    """Whose clients read the answer."""
    path = scope.get("path", "")
    if is_of_ollama(path):
        return "ollama"
    if path.startswith(MESSAGES_PATH) or VERSION_HEADER in Headers(scope=scope):
        return "anthropic"
    return "openai"


def openai_problem(error: RequestError, request_id: str = "") -> bytes:
    detail = ErrorDetail(message=error.message, type=error.kind, param=error.param, code=error.code)
    return ErrorBody(error=detail).model_dump_json().encode()


def anthropic_problem(error: RequestError, request_id: str = "") -> bytes:
    kind = _ANTHROPIC_KINDS.get(error.status, error.kind)
    named = error.param is not None and error.param not in error.message
    message = f"{error.param}: {error.message}" if named else error.message
    detail = AnthropicErrorDetail(type=kind, message=message)
    return AnthropicErrorBody(type="error", error=detail, request_id=request_id or None).model_dump_json().encode()


def ollama_problem(error: RequestError, request_id: str = "") -> bytes:
    """Its clients read a text."""
    return json.dumps({"error": error.message}, ensure_ascii=False).encode()


_SHAPES: Mapping[Api, Callable[[RequestError, str], bytes]] = {
    "openai": openai_problem,
    "anthropic": anthropic_problem,
    "ollama": ollama_problem,
}


def problem_response(error: RequestError, scope: Scope) -> Response:
    """The one place where an error becomes an HTTP response."""
    headers = {}
    scope.setdefault("state", {})["error_code"] = error.code  # for the log
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413) or error.code == "bodies_full":
        headers["connection"] = "close"  # the rest of the body is not read
    api, request_id = api_of(scope), scope.get("state", {}).get("request_id", "")
    if api == "anthropic" and request_id:
        headers["request-id"] = request_id
    return Response(_SHAPES[api](error, request_id), error.status, headers, media_type="application/json")
