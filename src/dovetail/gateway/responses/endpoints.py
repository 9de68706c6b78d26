"""`/v1/responses`: answers one request, whole or as events, and keeps what it said."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dovetail.errors import InvalidRequest, RequestError, ResponseNotFound
from dovetail.gateway.answers import TokenNames, UsageCount
from dovetail.gateway.api import Message
from dovetail.gateway.endpoint import json_response, read_body, request_body, responses
from dovetail.gateway.replies import Usage
from dovetail.gateway.respond import EVENTS, SEND_TIMEOUT_S, Taken, accounted, until_disconnect
from dovetail.gateway.responses.builder import Event, OutputBuilder
from dovetail.gateway.responses.items import (
    IncompleteDetails,
    InputDetails,
    InputItems,
    OutputDetails,
    Reasoning,
    ResponseDeleted,
    ResponseError,
    ResponseRecord,
    ResponseUsage,
    Status,
)
from dovetail.gateway.responses.request import Item, ResponsesRequest, chat_of, messages_of
from dovetail.gateway.responses.store import ResponseStore, StoredResponse
from dovetail.gateway.run import Delta
from dovetail.gateway.service import Service
from dovetail.gateway.targets import targets_of
from dovetail.gateway.translate import Job, chat_job
from dovetail.types import FinishReason

_ERRORS = (400, 401, 404, 413, 415, 422, 429, 500, 503)


def make_responses_router(service: Service) -> APIRouter:
    endpoints = ResponsesEndpoints(service, ResponseStore())
    router = APIRouter()
    answers = responses(ResponseRecord, _ERRORS)
    answers[200]["content"] = {"text/event-stream": {}}
    extra = {"requestBody": request_body(ResponsesRequest)}
    router.add_api_route("/v1/responses", endpoints.create, methods=["POST"], responses=answers, openapi_extra=extra)
    one = "/v1/responses/{response_id}"
    found = responses(ResponseRecord, (401, 404))
    router.add_api_route(one, endpoints.show, methods=["GET"], responses=found)
    gone = responses(ResponseDeleted, (401, 404))
    router.add_api_route(one, endpoints.delete, methods=["DELETE"], responses=gone)
    items = responses(InputItems, (401, 404))
    router.add_api_route(f"{one}/input_items", endpoints.list_items, methods=["GET"], responses=items)
    return router


@dataclass(frozen=True)
class _Turn:
    """One response on its way: what was asked, after what, and by whom."""

    body: ResponsesRequest
    before: tuple[Message, ...]
    job: Job
    owner: str
    created: int

    @property
    def id(self) -> str:
        return f"resp_{self.job.id}"


class ResponsesEndpoints:
    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service = service
        self._store = store

    async def create(self, request: Request) -> Response:
        """Answer, after an earlier response if one is named."""
        self._service.check_admission()
        body = await read_body(ResponsesRequest, request)
        owner = request.scope.get("state", {}).get("key", "")
        before = self._before(body, owner)
        model = self._service.models.get(body.model)
        context, default = self._service.context_limit(model), self._service.default_max_tokens(model)
        targets = targets_of(request, model)
        job = await chat_job(chat_of(body, before), model, uuid.uuid4().hex, context, targets, default_tokens=default)
        turn = _Turn(body, before, job, owner, int(time.time()))
        return ResponsesResponse(self._service, self._store, turn)

    def _before(self, body: ResponsesRequest, owner: str) -> tuple[Message, ...]:
        if body.previous_response_id is None:
            return ()
        try:
            return self._store.get(body.previous_response_id, owner).conversation
        except ResponseNotFound as error:
            raise InvalidRequest(
                error.message, param="previous_response_id", code="previous_response_not_found"
            ) from error

    async def show(self, response_id: str, request: Request) -> Response:
        """A response that is kept."""
        return json_response(self._store.get(response_id, _owner(request)).record)

    async def delete(self, response_id: str, request: Request) -> Response:
        """Forget a response."""
        self._store.remove(response_id, _owner(request))
        return json_response(ResponseDeleted(id=response_id))

    async def list_items(self, response_id: str, request: Request) -> Response:
        """What a response was asked with."""
        stored = self._store.get(response_id, _owner(request))
        data = [
            {"id": f"item_{at}", "type": "message"} | item.model_dump(exclude_none=True)
            for at, item in enumerate(stored.items)
        ]
        return json_response(InputItems(data=data, first_id="item_0", last_id=f"item_{len(data) - 1}"))


def _owner(request: Request) -> str:
    key: str = request.scope.get("state", {}).get("key", "")
    return key


class ResponsesResponse(Response):
    """Runs the job when the server is ready to send."""

    def __init__(self, service: Service, store: ResponseStore, turn: _Turn) -> None:
        super().__init__()
        self._service = service
        self._store = store
        self._turn = turn
        self._builder = OutputBuilder()
        self._names = TokenNames(turn.job.model.vocabulary, as_ids=False)
        self._usage = UsageCount(turn.job.num_prompt_tokens)  # the account's, once it runs
        self._finish: FinishReason | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with accounted(scope, self._turn.job) as taken:
            self._usage = taken.usage
            if self._turn.body.stream:
                await until_disconnect(receive, self._send_events(taken, send))
            else:
                await until_disconnect(receive, self._collect(taken))
                await json_response(self._kept_record())(scope, receive, send)

    async def _collect(self, taken: Taken) -> None:
        async with aclosing(self._events(taken)) as events:
            async for _ in events:
                pass

    async def _send_events(self, taken: Taken, send: Send) -> None:
        """The status line waits for the first text, as that of a chat does."""
        stream = _EventStream(send)
        opening = [self._about(kind, "in_progress") for kind in ("response.created", "response.in_progress")]
        try:
            async with aclosing(self._events(taken)) as events:
                async for event in events:
                    await stream.send(*opening, event)
                    opening = []
            record = self._kept_record()
            kind = "response.completed" if record.status == "completed" else "response.incomplete"
            await stream.send(*opening, {"type": kind, "response": record.model_dump()})
        except RequestError as error:
            if not stream.has_started:
                raise
            failed = self._record("failed")
            failed.error = ResponseError(code=error.code or error.kind, message=error.message)
            await stream.send({"type": "response.failed", "response": failed.model_dump()})
        await stream.close()

    async def _events(self, taken: Taken) -> AsyncGenerator[Event, None]:
        reader = taken.job.make_reader()
        async with aclosing(self._service.run(taken.job, taken.origin)) as deltas:
            async for delta in deltas:
                self._usage.add(delta)
                parts = reader.feed(delta.text)
                if delta.finish is not None:
                    self._finish = delta.finish
                    parts.add(reader.flush())
                for event in self._builder.feed(parts, self._logprobs(delta)):
                    yield event
        for event in self._builder.close(self._status):
            yield event

    def _logprobs(self, delta: Delta) -> list[Any]:
        return list(self._names.chat(delta.logprobs).content) if self._turn.body.wants_logprobs else []

    @property
    def _status(self) -> Status:
        return "incomplete" if self._finish is FinishReason.LENGTH else "completed"

    def _about(self, kind: str, status: Status) -> Event:
        return {"type": kind, "response": self._record(status).model_dump()}

    def _kept_record(self) -> ResponseRecord:
        """The finished response, remembered unless the client does not want it."""
        record = self._record(self._status)
        record.usage = _usage_of(self._usage.total(), self._reasoning_tokens())
        if record.store:
            said = messages_of([Item.model_validate(item.model_dump()) for item in self._builder.items])
            conversation = (*self._turn.before, *messages_of(self._turn.body.items), *said)
            size = _size_of(conversation) + len(record.model_dump_json())
            items = tuple(self._turn.body.items)
            self._store.add(StoredResponse(record, items, conversation, self._turn.owner, size))
        return record

    def _reasoning_tokens(self) -> int:
        thoughts = "".join(item.content[0].text for item in self._builder.items if isinstance(item, Reasoning))
        tokenizer = self._turn.job.model.tokenizer
        return len(tokenizer.encode(thoughts, add_special_tokens=False).ids) if thoughts else 0

    def _record(self, status: Status) -> ResponseRecord:
        body = self._turn.body
        sampling = self._turn.job.requests[0].sampling
        return ResponseRecord(
            id=self._turn.id,
            created_at=self._turn.created,
            status=status,
            model=self._turn.job.model.name,
            output=self._builder.items,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None,
            instructions=body.instructions,
            previous_response_id=body.previous_response_id,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_output_tokens=body.max_output_tokens,
            tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            tool_choice=_plain(body.tool_choice),
            text={"format": _plain(body.text.format) if body.text and body.text.format else {"type": "text"}},
            truncation=body.truncation or "disabled",
            store=body.store is not False,
        )


def _plain(value: Any) -> Any:
    if value is None:
        return "auto"
    return value if isinstance(value, str) else value.model_dump(exclude_none=True, by_alias=True)


def _usage_of(usage: Usage, reasoning_tokens: int) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(reasoning_tokens=reasoning_tokens),
        total_tokens=usage.total_tokens,
    )


def _size_of(conversation: Iterable[Message]) -> int:
    return sum(len(message.text) + 100 for message in conversation)


class _EventStream:
    """Numbered events; the response begins with the first."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._number = 0
        self.has_started = False

    async def send(self, *events: Event) -> None:
        if not self.has_started:
            self.has_started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        for event in events:
            text = json.dumps({"sequence_number": self._number, **event}, ensure_ascii=False)
            self._number += 1
            body = f"event: {event['type']}\ndata: {text}\n\n".encode()
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def close(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
