"""A running job as an answer of an API that has a shape of its own. The shape is pure: parts of the answer in, bytes
out. Running, accounting, waiting and errors are the same for all of them, and are here.

A whole answer is fed to its shape as a streamed one is, so that both say the same.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dovetail.errors import RequestError
from dovetail.gateway.generation_task import Delta, Waits
from dovetail.gateway.http.replies import Usage
from dovetail.gateway.http.respond import EVENTS, EventStream, Taken, accounted, until_disconnect
from dovetail.gateway.http.waits import HeldStream, headers_of
from dovetail.gateway.service import Service
from dovetail.gateway.text.reading import Parts
from dovetail.gateway.text.translate import GenerationRequest
from dovetail.types import FinishReason


@dataclass(frozen=True)
class AnswerEnd:
    """What is known of an answer that is over."""

    finish: FinishReason | None
    stop_reason: str | int | None  # the stop string or token that ended it
    usage: Usage
    waits: Waits | None
    total_s: float


class AnswerShape(Protocol):
    """One answer in an API's form."""

    headers: list[tuple[bytes, bytes]]  # of a stream

    def add(self, parts: Parts, delta: Delta, usage: Usage) -> bytes:
        """What a stream says of these parts; empty while that is nothing."""

    def end(self, ended: AnswerEnd) -> bytes:
        """The end of a stream."""

    def problem(self, error: RequestError) -> bytes:
        """The end of a stream that fails."""

    def whole(self, ended: AnswerEnd) -> bytes:
        """The whole answer, after all parts were added."""


class ShapedResponse(Response):
    """Runs the job when the server is ready to send."""

    def __init__(self, service: Service, job: GenerationRequest, shape: AnswerShape, *, stream: bool) -> None:
        super().__init__()
        self._service = service
        self._job = job
        self._shape = shape
        self._stream = stream
        self._began_s = time.monotonic()
        self._waits: Waits | None = None
        self._last = Delta(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with accounted(scope, self._job) as taken:
            if self._stream:
                await until_disconnect(receive, self._send_stream(taken, send))
                return
            body = await until_disconnect(receive, self._whole(taken))
        headers = {key.decode(): value.decode() for key, value in headers_of(self._waits)}
        await Response(body, headers=headers, media_type="application/json")(scope, receive, send)

    async def _whole(self, taken: Taken) -> bytes:
        async with aclosing(self._pieces(taken, None)) as pieces:
            async for _ in pieces:
                pass
        return self._shape.whole(self._ended(taken))

    async def _send_stream(self, taken: Taken, send: Send) -> None:
        """The status line waits for the first text."""
        out = EventStream(send, self._shape.headers)
        has_comments = self._shape.headers is EVENTS
        held = HeldStream(lambda: self._service.standing(taken.job), out.send) if has_comments else None
        try:
            async with aclosing(self._pieces(taken, held)) as pieces:
                async for piece in pieces:
                    await out.start(self._waits)
                    if piece:
                        await out.send(piece)
            await out.send(self._shape.end(self._ended(taken)), more=False)
        except RequestError as error:
            if not out.has_started:
                raise
            await out.send(self._shape.problem(error), more=False)

    async def _pieces(self, taken: Taken, held: HeldStream | None) -> AsyncGenerator[bytes, None]:
        reader = taken.job.make_reader()
        run = self._service.run(taken.job, taken.origin)
        async with aclosing(held.over(run) if held is not None else run) as deltas:
            async for delta in deltas:
                self._waits = self._waits or delta.waits
                taken.usage.add(delta)
                parts = reader.feed(delta.text)
                if delta.finish is not None:
                    self._last = delta
                    parts.add(reader.flush())
                yield self._shape.add(parts, delta, taken.usage.total())

    def _ended(self, taken: Taken) -> AnswerEnd:
        total_s = time.monotonic() - self._began_s
        return AnswerEnd(self._last.finish, self._last.stop_reason, taken.usage.total(), self._waits, total_s)
