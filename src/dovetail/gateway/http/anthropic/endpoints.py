"""`/v1/messages` and `/v1/messages/count_tokens`, and models as Anthropic lists them."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from dovetail.gateway.http.anthropic.answer import MessageShape
from dovetail.gateway.http.anthropic.request import CountTokensRequest, MessagesRequest, anthropic_chat
from dovetail.gateway.http.build_request import build_chat
from dovetail.gateway.http.endpoint import documented, read_body, request_body
from dovetail.gateway.http.problems import AnthropicErrorBody
from dovetail.gateway.http.respond import until_disconnect
from dovetail.gateway.http.shaped import ShapedResponse
from dovetail.gateway.models import ServedModel
from dovetail.gateway.service import Service
from dovetail.gateway.text.chat_prompt import chat_prompt

_ERRORS = (400, 401, 404, 413, 415, 422, 429, 500, 503)


def make_anthropic_router(service: Service) -> APIRouter:
    endpoints = AnthropicEndpoints(service)
    router = APIRouter()
    for path, handler, body in (
        ("/v1/messages", endpoints.create, MessagesRequest),
        ("/v1/messages/count_tokens", endpoints.count, CountTokensRequest),
    ):
        extra = {"requestBody": request_body(body)}
        answers = documented(_ERRORS, AnthropicErrorBody, streams=body is MessagesRequest)
        router.add_api_route(path, handler, methods=["POST"], openapi_extra=extra, responses=answers)
    return router


class AnthropicEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        """Answer a conversation, as Anthropic does."""
        self._service.check_admission()
        body = await read_body(MessagesRequest, request)
        model = await self._service.models.choose(body.model)
        chat = anthropic_chat(body, thinks=_thinks(model))
        asked = build_chat(self._service, request, chat, model, warnings=body.warnings())
        job = await until_disconnect(request.receive, asked)
        shape = MessageShape(job, max_tokens=body.max_tokens)
        return ShapedResponse(self._service, job, shape, stream=bool(body.stream))

    async def count(self, request: Request) -> Response:
        """Tokens of a conversation, without answering it."""
        body = await read_body(CountTokensRequest, request)
        model = await self._service.models.choose(body.model)
        await model.prepare()
        prompt = await until_disconnect(
            request.receive, chat_prompt(anthropic_chat(body, thinks=_thinks(model)), model)
        )
        account = request.state.caller.account
        if account is not None:
            account.add_tokens(len(prompt.tokens), time.monotonic())
        return JSONResponse({"input_tokens": len(prompt.tokens)})


def _thinks(model: ServedModel) -> bool:
    return model.card.chat_template is not None and model.template.think_marks is not None


def model_record(name: str, model: ServedModel) -> dict[str, Any]:
    """As Anthropic's clients read it."""
    created = datetime.fromtimestamp(model.card.created, UTC).isoformat()
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


def model_list(found: list[tuple[str, ServedModel]]) -> dict[str, Any]:
    records = [model_record(*pair) for pair in found]
    first, last = (records[0]["id"], records[-1]["id"]) if records else (None, None)
    return {"data": records, "has_more": False, "first_id": first, "last_id": last}
