"""`/v1/responses`: answers one request, whole or as events, and keeps what it said."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dovetail.errors import InvalidRequest, Overloaded, RequestError, ResponseNotFound
from dovetail.gateway.generation_task import Delta, Waits
from dovetail.gateway.http.answers import TokenNames, UsageCount
from dovetail.gateway.http.api import Message
from dovetail.gateway.http.build_request import build_chat, further_chat
from dovetail.gateway.http.endpoint import documented, json_response, read_body, request_body, responses
from dovetail.gateway.http.replies import Usage
from dovetail.gateway.http.respond import INLINE_REPORTS, EventStream, Taken, accounted, origin_of, until_disconnect
from dovetail.gateway.http.responses.background import BackgroundResponses
from dovetail.gateway.http.responses.builder import Event, OutputBuilder
from dovetail.gateway.http.responses.compaction import CompactionShape
from dovetail.gateway.http.responses.conversations import Conversations, make_conversations_router
from dovetail.gateway.http.responses.items import (
    IncompleteDetails,
    InputDetails,
    InputItems,
    McpListTools,
    OutputDetails,
    OutputItem,
    OutputMessage,
    Reasoning,
    ResponseDeleted,
    ResponseError,
    ResponseRecord,
    ResponseUsage,
    Status,
)
from dovetail.gateway.http.responses.request import (
    CompactRequest,
    Item,
    ResponsesRequest,
    compaction_chat,
    responses_chat,
    responses_messages,
)
from dovetail.gateway.http.responses.rounds import ToolRounds, with_mcp_tools
from dovetail.gateway.http.responses.store import (
    ResponseStore,
    StoredResponse,
    append_messages,
    decode_messages,
    encode_items,
    encode_messages,
)
from dovetail.gateway.http.responses.tools import ResponsesTool
from dovetail.gateway.http.shaped import ShapedResponse
from dovetail.gateway.http.tiers import tier_of
from dovetail.gateway.http.waits import HeldStream, headers_of
from dovetail.gateway.http.writing import json_pieces
from dovetail.gateway.mcp.servers import McpServers
from dovetail.gateway.service import Service
from dovetail.gateway.text.translate import GenerationRequest
from dovetail.types import FinishReason

_WRITE_RETRY_S = 0.5  # of a response in the background, while too many others are being written
_ERRORS = (400, 401, 404, 413, 415, 422, 429, 500, 503)


def make_responses_router(service: Service, servers: McpServers) -> APIRouter:
    conversations = Conversations()
    endpoints = ResponsesEndpoints(service, ResponseStore(), conversations, servers)
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
    stopped = responses(ResponseRecord, (400, 401, 404))
    router.add_api_route(f"{one}/cancel", endpoints.cancel, methods=["POST"], responses=stopped)
    items = responses(InputItems, (401, 404))
    router.add_api_route(f"{one}/input_items", endpoints.list_items, methods=["GET"], responses=items)
    compact = {"requestBody": request_body(CompactRequest)}
    shorter = documented(_ERRORS)
    path = "/v1/responses/compact"
    router.add_api_route(path, endpoints.compact, methods=["POST"], openapi_extra=compact, responses=shorter)
    servers_named = responses(McpServerList, (401,))
    router.add_api_route("/v1/mcp/servers", endpoints.list_servers, methods=["GET"], responses=servers_named)
    router.include_router(make_conversations_router(conversations))
    return router


class McpServerName(BaseModel):
    name: str


class McpServerList(BaseModel):
    """MCP servers whose tools the caller may have called: `{"type": "mcp", "server_label": NAME}` in `tools`."""

    object: Literal["list"] = "list"
    data: list[McpServerName]


@dataclass(frozen=True)
class _Turn:
    """One response on its way: what was asked, after what, and by whom."""

    body: ResponsesRequest  # without its input, which is kept in fewer bytes
    items: bytes  # what it was asked with, as `input_items` answers it
    said: bytes  # messages before its own
    job: GenerationRequest
    owner: str
    created: int
    grow: Callable[[Sequence[Item]], object] | None = None  # of the conversation that goes on with this, by its output
    rounds: ToolRounds | None = None  # where the server calls tools itself

    @property
    def id(self) -> str:
        return f"resp_{self.job.id}"


class ResponsesEndpoints:
    def __init__(
        self, service: Service, store: ResponseStore, conversations: Conversations, servers: McpServers
    ) -> None:
        self._service = service
        self._servers = servers
        self._store = store
        self._conversations = conversations
        self._background = BackgroundResponses()

    async def create(self, request: Request) -> Response:
        """Answer, after an earlier response if one is named."""
        self._service.check_admission()
        body = await read_body(ResponsesRequest, request)
        owner = request.scope.get("state", {}).get("key", "")
        conversation = self._conversations.get(body.conversation_id, owner) if body.conversation_id else None
        if conversation is not None:
            before = tuple(responses_messages(conversation.parsed))
        else:
            before = self._before(body.previous_response_id, owner)
        model = await self._service.models.choose(body.model)
        offer = await with_mcp_tools(body, self._servers, owner)
        body = offer.body
        warnings = (*offer.warnings, *body.warnings())
        job = await build_chat(self._service, request, responses_chat(body, before), model, warnings=warnings)
        make_job = partial(further_chat, self._service, request, model=model)
        rounds = ToolRounds(self._servers, body, before, make_job) if offer.has_mcp else None
        items, said = encode_items(body.items), encode_messages([*before, *responses_messages(body.items)])
        grow = partial(self._conversations.go_on, conversation, body.items) if conversation is not None else None
        turn = _Turn(body.model_copy(update={"input": ""}), items, said, job, owner, int(time.time()), grow, rounds)
        response = ResponsesResponse(self._service, self._store, turn)
        return self._start(turn, response, request.scope) if body.background else response

    def _start(self, turn: _Turn, response: ResponsesResponse, scope: Scope) -> Response:
        """What cannot be admitted is refused here, not found failed later."""
        size = len(turn.items) + len(turn.said)
        self._background.check_room(turn.owner, size)
        places = ExitStack()
        places.enter_context(self._service.places(turn.job.num_answers, origin_of(scope)))
        work = response.run_alone(scope)
        self._background.start(
            turn.id, turn.owner, size, work, response.record_so_far, lambda: response.is_ending, places
        )
        return json_response(response.record_so_far())

    async def compact(self, request: Request) -> Response:
        """A conversation in fewer words, to go on with."""
        self._service.check_admission()
        body = await read_body(CompactRequest, request)
        before = self._before(body.previous_response_id, _owner(request))
        model = await self._service.models.choose(body.model)
        job = await build_chat(self._service, request, compaction_chat(body, before), model)
        kept = [item.model_dump(exclude_none=True) for item in body.items if item.role == "user"]
        return ShapedResponse(self._service, job, CompactionShape(job.id, kept), stream=False)

    async def list_servers(self, request: Request) -> Response:
        """MCP servers that this key may use."""
        names = self._servers.names_for(_owner(request))
        return json_response(McpServerList(data=[McpServerName(name=name) for name in names]))

    def _before(self, previous: str | None, owner: str) -> tuple[Message, ...]:
        if previous is None:
            return ()
        try:
            return decode_messages(self._store.get(previous, owner).conversation)
        except ResponseNotFound as error:
            raise InvalidRequest(
                error.message, param="previous_response_id", code="previous_response_not_found"
            ) from error

    async def show(self, response_id: str, request: Request) -> Response:
        """A response that is kept, or is being made in the background."""
        running = self._background.find(response_id, _owner(request))
        return json_response(running) if running else _json(self._store.get(response_id, _owner(request)).record)

    async def cancel(self, response_id: str, request: Request) -> Response:
        """End a response that is being made in the background."""
        await self._background.cancel(response_id, _owner(request))
        stored = self._store.get(response_id, _owner(request))
        if not stored.background:
            raise InvalidRequest("Cannot cancel a synchronous response.", param="response_id")
        return _json(stored.record)

    async def delete(self, response_id: str, request: Request) -> Response:
        """Forget a response."""
        await self._background.cancel(response_id, _owner(request))
        self._store.remove(response_id, _owner(request))
        return json_response(ResponseDeleted(id=response_id))

    async def list_items(self, response_id: str, request: Request) -> Response:
        """What a response was asked with."""
        return _json(self._store.get(response_id, _owner(request)).items)


def _owner(request: Request) -> str:
    key: str = request.scope.get("state", {}).get("key", "")
    return key


def _json(text: bytes) -> Response:
    return Response(text, media_type="application/json")


class ResponsesResponse(Response):
    """Runs the job when the server is ready to send."""

    def __init__(self, service: Service, store: ResponseStore, turn: _Turn) -> None:
        super().__init__()
        self._service = service
        self._store = store
        self._turn = turn
        self._builder = OutputBuilder(turn.body.tool_set)
        self._names = TokenNames(turn.job.model.vocabulary, as_ids=False)
        self._usage = UsageCount(turn.job.num_prompt_tokens)  # the account's, once it runs
        self._class = turn.job.service_class  # as its caller's, once it runs
        self._finish: FinishReason | None = None
        self._num_reports = 0  # log-probabilities so far
        self._waits: Waits | None = None
        self.is_ending = False  # all is generated: it can no longer be cancelled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with accounted(scope, self._turn.job) as taken:
            self._usage, self._class = taken.usage, taken.job.service_class
            if self._turn.body.stream:
                await until_disconnect(receive, self._send_events(taken, send))
            else:
                text = await until_disconnect(receive, self._whole(taken))
                headers = {key.decode(): value.decode() for key, value in headers_of(self._waits)}
                await Response(text, headers=headers, media_type="application/json")(scope, receive, send)

    async def run_alone(self, scope: Scope) -> None:
        """While nobody waits; what becomes of it is kept."""
        state = {key: value for key, value in scope.get("state", {}).items() if key != "trace"}  # that has ended
        with accounted({"state": state}, self._turn.job) as taken:
            self._usage, self._class = taken.usage, taken.job.service_class
            try:
                await self._whole(taken, has_places=True)
            except asyncio.CancelledError:
                self.is_ending = True
                list(self._builder.close("incomplete"))
                await self._written_and_kept(self._record("cancelled"))
                raise
            except RequestError as error:
                self.is_ending = True
                await self._written_and_kept(self._failed(error))

    def record_so_far(self) -> ResponseRecord:
        return self._record("in_progress" if self._waits is not None else "queued")

    async def _whole(self, taken: Taken, *, has_places: bool = False) -> bytes:
        async with aclosing(self._events(taken, has_places=has_places)) as events:
            async for _ in events:
                pass
        self.is_ending = True
        list(self._builder.close(self._status))
        return await self._written_and_kept(await self._finished_record())

    async def _written(self, value: Any, num_reports: int) -> bytes:
        """As JSON; by a thread, where there are so many log-probabilities that the loop would stand still."""
        if num_reports <= INLINE_REPORTS:
            return to_json(value, by_alias=False)
        while True:
            try:
                pieces = json_pieces(value, exclude_unset=False)
                return await self._service.models.executors.write.run(partial(b"".join, pieces))
            except Overloaded:
                if not self._turn.body.background:
                    raise
                await asyncio.sleep(_WRITE_RETRY_S)  # nobody waits for it, and it must not be lost

    async def _send_events(self, taken: Taken, send: Send) -> None:
        """The status line waits for the first text, as that of a chat does."""
        stream = _NumberedEvents(EventStream(send), self._written)
        held = HeldStream(lambda: self._service.standing(taken.job), stream.out.send)
        opening = [self._about(kind, "in_progress") for kind in ("response.created", "response.in_progress")]
        try:
            async with aclosing(self._events(taken, held)) as events:
                async for event in events:
                    await stream.out.start(self._waits)
                    await stream.send(*opening, event)
                    opening = []
            closing = [*opening, *self._builder.close(self._status)]
            record = await self._finished_record()
            await self._written_and_kept(record)
            kind = "response.completed" if record.status == "completed" else "response.incomplete"
            await stream.send(*closing, {"type": kind, "response": record}, num_reports=self._num_reports)
        except RequestError as error:
            if not stream.out.has_started:
                raise
            await stream.send({"type": "response.failed", "response": self._failed(error).model_dump()})
        await stream.close()

    async def _events(
        self, taken: Taken, held: HeldStream | None = None, *, has_places: bool = False
    ) -> AsyncGenerator[Event, None]:
        rounds = self._turn.rounds
        if rounds is None:
            async for event in self._round(taken, held, has_places=has_places):
                yield event
            return
        with nullcontext() if has_places else self._service.places(taken.job.num_answers, taken.origin):
            async for event in self._all_rounds(rounds, taken, held):
                yield event

    async def _all_rounds(
        self, rounds: ToolRounds, taken: Taken, held: HeldStream | None
    ) -> AsyncGenerator[Event, None]:
        """Until the model asks for no more of what is done here, or for something that the client has to do."""
        opening = rounds.listed(self._turn.body, self._builder)  # told of when there is something to begin with
        while True:
            async with aclosing(self._round(taken, held, has_places=True)) as events:
                async for event in events:
                    while opening:
                        yield opening.pop(0)
                    yield event
            held = None  # the stream has begun
            for event in self._builder.close(self._status):
                yield event
            calls, is_waiting = self._builder.take_calls(), self._builder.waits_for_client
            async with aclosing(rounds.made(calls, self._builder)) as made:
                async for event in made:
                    yield event
            if not calls or is_waiting:
                return
            job = await rounds.next_job(self._builder.items, calls, self._usage.total().completion_tokens)
            if job is None:
                self._finish = FinishReason.LENGTH
                return
            taken = taken.next_round(job)

    async def _round(self, taken: Taken, held: HeldStream | None, *, has_places: bool) -> AsyncGenerator[Event, None]:
        reader = taken.job.make_reader()
        run = self._service.run(taken.job, taken.origin, has_places=has_places)
        async with aclosing(held.over(run) if held is not None else run) as deltas:
            async for delta in deltas:
                self._waits = self._waits or delta.waits
                self._usage.add(delta)
                self._num_reports += delta.num_reports
                parts = reader.feed(delta.text)
                if delta.finish is not None:
                    self._finish = delta.finish
                    parts.add(reader.flush())
                for event in self._builder.feed(parts, self._logprobs(delta)):
                    yield event

    def _logprobs(self, delta: Delta) -> list[Any]:
        return list(self._names.chat(delta.logprobs).content) if self._turn.body.wants_logprobs else []

    @property
    def _status(self) -> Status:
        return "incomplete" if self._finish is FinishReason.LENGTH else "completed"

    def _about(self, kind: str, status: Status) -> Event:
        return {"type": kind, "response": self._record(status).model_dump()}

    async def _finished_record(self) -> ResponseRecord:
        record = self._record(self._status)
        record.usage = _usage_of(self._usage.total(), await self._reasoning_tokens())
        return record

    async def _written_and_kept(self, record: ResponseRecord) -> bytes:
        """The response as JSON, remembered unless the client does not want it."""
        text = await self._written(record, self._num_reports)
        turn = self._turn
        said = [
            Item.model_validate(_plain_item(item)) for item in self._builder.items if not isinstance(item, McpListTools)
        ]
        if turn.grow is not None:
            turn.grow(said)
        if record.store:
            conversation = append_messages(turn.said, responses_messages(said))
            self._store.add(StoredResponse(turn.id, turn.owner, record.background, text, turn.items, conversation))
        return text

    def _failed(self, error: RequestError) -> ResponseRecord:
        failed = self._record("failed")
        failed.error = ResponseError(code=error.code or error.kind, message=error.message)
        return failed

    async def _reasoning_tokens(self) -> int:
        thoughts = "".join(item.content[0].text for item in self._builder.items if isinstance(item, Reasoning))
        return len(await self._turn.job.model.encode(thoughts, add_special_tokens=False)) if thoughts else 0

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
            tools=[_shown_tool(tool) for tool in body.tools or ()],
            tool_choice=_plain(body.tool_choice),
            text={"format": _plain(body.text.format) if body.text and body.text.format else {"type": "text"}},
            truncation=body.truncation or "disabled",
            service_tier=tier_of(body.service_tier, self._class),
            store=body.store is not False,
            background=bool(body.background),
            max_tool_calls=body.max_tool_calls,
            conversation={"id": body.conversation_id} if body.conversation_id else None,
            warnings=list(self._turn.job.warnings),
        )


def _plain_item(item: OutputItem) -> dict[str, Any]:
    return item.model_dump(exclude={"content": {"__all__": {"logprobs"}}} if isinstance(item, OutputMessage) else None)


def _shown_tool(tool: ResponsesTool) -> dict[str, Any]:
    """As it was sent; what an MCP server has is an item of the output."""
    return tool.model_dump(exclude_none=True, exclude={"tools"} if tool.type == "mcp" else None)


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


class _NumberedEvents:
    def __init__(self, out: EventStream, write: Callable[[Any, int], Awaitable[bytes]]) -> None:
        self.out = out
        self._write = write
        self._number = 0

    async def send(self, *events: Event, num_reports: int = 0) -> None:
        for event in events:
            text = await self._write({"sequence_number": self._number, **event}, num_reports)
            self._number += 1
            await self.out.send(f"event: {event['type']}\ndata: ".encode() + text + b"\n\n")

    async def close(self) -> None:
        await self.out.send(b"", more=False)
