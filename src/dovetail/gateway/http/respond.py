"""A running job as an HTTP answer: whole or as server-sent events, given up as soon as the client goes away.

The status line waits for the first text, so that a schema that does not compile is a 422 and a model that cannot be
loaded a 500 for streams too; what fails later is an error event that ends the stream.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dovetail.errors import RequestError
from dovetail.gateway.generation_task import Delta, Origin, Waits
from dovetail.gateway.http.accounts import KeyAccount
from dovetail.gateway.http.answers import CollectedChoice, UsageCount
from dovetail.gateway.http.chat_reply import ChatReply
from dovetail.gateway.http.problems import openai_problem
from dovetail.gateway.http.text_reply import TextReply
from dovetail.gateway.http.waits import HeldStream, headers_of
from dovetail.gateway.http.writing import json_pieces
from dovetail.gateway.service import Service
from dovetail.gateway.text.translate import GenerationRequest, with_class, with_tenant
from dovetail.gateway.tracing import RequestTrace

Result = TypeVar("Result")

Reply = ChatReply | TextReply
RunGeneration = Callable[[GenerationRequest, Origin], AsyncGenerator[Delta, None]]
INLINE_REPORTS = 512  # log-probabilities that are written in a few milliseconds

# A client that keeps its connection but stops reading holds a place in the queue; after this long it loses it.
SEND_TIMEOUT_S = 60.0

_JSON = [(b"content-type", b"application/json")]
EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies pass each event on at once
]


@dataclass(frozen=True)
class Taken:
    """A job as its caller's."""

    job: GenerationRequest
    origin: Origin
    usage: UsageCount  # what it says is added here

    def next_round(self, job: GenerationRequest) -> Taken:
        """The same request with another prompt, which counts too."""
        self.usage.add_prompt(job.num_prompt_tokens)
        origin = dataclasses.replace(self.origin, arrived_s=time.monotonic(), trace=None)
        job = with_tenant(job, origin.key)
        return dataclasses.replace(self, job=with_class(job, origin.serves_as(job.service_class)), origin=origin)


def origin_of(scope: Scope) -> Origin:
    """When and from whom a request came in."""
    state, account = scope.get("state", {}), _account_of(scope)
    limit = account.max_unfinished if account is not None else None
    trace: RequestTrace | None = state.get("trace")
    is_batch = bool(state.get("is_batch"))
    is_best_effort = is_batch or (account is not None and account.is_best_effort)
    may_go_first = not is_batch and (account is None or account.may_go_first)
    arrived_s, key = state.get("arrived_s") or time.monotonic(), state.get("key", "")
    return Origin(arrived_s, key, limit, trace, is_batch, is_best_effort, may_go_first)


def _account_of(scope: Scope) -> KeyAccount | None:
    account: KeyAccount | None = getattr(scope.get("state", {}).get("caller"), "account", None)
    return account


@contextmanager
def accounted(scope: Scope, job: GenerationRequest) -> Iterator[Taken]:
    """While the job runs: charged to its caller before it does, and for what it has said however it ends."""
    state, origin, account = scope.get("state", {}), origin_of(scope), _account_of(scope)
    trace = origin.trace
    job = with_tenant(job, origin.key, traced=trace is not None)
    job = with_class(job, origin.serves_as(job.service_class))
    if account is not None:
        account.charge(job.num_answers, job.num_prompt_tokens, time.monotonic())
    usage = UsageCount(job.num_prompt_tokens)
    if trace is not None:
        trace.watch(job)
    try:
        yield Taken(job, origin, usage)
    finally:
        if trace is not None:
            trace.unwatch(job, usage)
        said = usage.total()
        state["usage"] = {"model": job.model.name, "answers": job.num_answers}
        state["usage"] |= {"prompt_tokens": said.prompt_tokens, "completion_tokens": said.completion_tokens}
        if job.warnings:
            state["usage"]["warnings"] = list(job.warnings)
        if account is not None:
            later = said.prompt_tokens - job.num_prompt_tokens  # of rounds after the first
            account.add_tokens(later + said.completion_tokens, time.monotonic())


class GenerationResponse(Response):
    """Runs the job when the server is ready to send."""

    def __init__(
        self,
        service: Service,
        job: GenerationRequest,
        reply: Reply,
        *,
        stream: bool,
        include_usage: bool,
        run: RunGeneration | None = None,
    ) -> None:
        """`run`: what makes the text of the job, unless the service does as it stands."""
        super().__init__()
        self._service = service
        self._run = run or service.run
        self._job = job
        self._reply = reply
        self._stream = stream
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_all = self._send_events if self._stream else self._send_whole
        with accounted(scope, self._job) as taken:
            self._job = taken.job
            await until_disconnect(receive, send_all(send, taken.origin, taken.usage))

    async def _send_whole(self, send: Send, origin: Origin, usage: UsageCount) -> None:
        answers = [CollectedChoice() for request in self._job.requests for _ in range(request.num_choices)]
        waits: Waits | None = None
        async with aclosing(self._run(self._job, origin)) as deltas:
            async for delta in deltas:
                waits = waits or delta.waits
                delta = self._reply.shown(delta)
                answers[delta.index].add(delta)
                usage.add(delta)
        body = await self._written(answers, usage)
        length = [(b"content-length", str(len(body)).encode())]
        headers = _JSON + length + headers_of(waits)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _written(self, answers: Sequence[CollectedChoice], usage: UsageCount) -> bytes:
        count, total = sum(answer.num_reports for answer in answers), usage.total()
        return await self._json(count, lambda: self._reply.whole(answers, total)) or b""

    async def _json(self, num_reports: int, make: Callable[[], BaseModel | bytes | None]) -> bytes | None:
        """What it makes as JSON; by a thread, where the loop would stand still for it."""
        if num_reports <= INLINE_REPORTS:
            record = make()
            return record.model_dump_json(exclude_unset=True).encode() if isinstance(record, BaseModel) else record

        def work() -> bytes | None:
            record = make()
            return b"".join(json_pieces(record)) if isinstance(record, BaseModel) else record

        return await self._service.models.executors.write.run(work)

    async def _send_events(self, send: Send, origin: Origin, usage: UsageCount) -> None:
        stream = EventStream(send)
        held = HeldStream(lambda: self._service.standing(self._job), stream.send)
        try:
            async with aclosing(held.over(self._run(self._job, origin))) as deltas:
                async for delta in deltas:
                    if delta.waits is not None:
                        await stream.start(delta.waits)
                        usage.waits = delta.waits if held.has_spoken else None
                    delta = self._reply.shown(delta)
                    usage.add(delta)
                    chunk = await self._json(delta.num_reports, partial(self._reply.chunk, delta, usage))
                    if chunk is not None:
                        await stream.send_event(chunk)
            if self._include_usage:
                await stream.send_event(await self._json(0, lambda: self._reply.usage_chunk(usage.total())) or b"")
        except RequestError as error:
            if not stream.has_started:
                raise
            await stream.send_event(openai_problem(error))
        await stream.send_event(b"[DONE]", more=False)


class EventStream:
    """Server-sent events, or lines of another type; the status line goes out with the first word."""

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]] = EVENTS) -> None:
        self._send = send
        self._headers = headers
        self.has_started = False

    async def start(self, waits: Waits | None = None) -> None:
        if not self.has_started:
            self.has_started = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": self._headers + headers_of(waits)}
            )

    async def send_event(self, data: bytes, *, more: bool = True) -> None:
        await self.send(b"data: " + data + b"\n\n", more=more)

    async def send(self, piece: bytes, *, more: bool = True) -> None:
        await self.start()
        await send_piece(self._send, piece, more=more)


async def send_piece(send: Send, body: bytes, *, more: bool = True) -> None:
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work unless the client goes away first; then it is cancelled, and has ended when this raises
    ClientDisconnect."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for unfinished in (task, watcher):
            unfinished.cancel()  # does nothing to a task that is done
        await asyncio.gather(task, watcher, return_exceptions=True)
    if task.cancelled():
        raise ClientDisconnect
    return task.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
