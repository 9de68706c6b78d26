"""A job's answer as Ollama's clients read it: one JSON object, or one per line while it comes."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from dovetail.errors import RequestError
from dovetail.gateway.answers import UsageCount
from dovetail.gateway.reading import Parts
from dovetail.gateway.respond import Taken, accounted, send_piece, until_disconnect
from dovetail.gateway.run import Waits
from dovetail.gateway.service import Service
from dovetail.gateway.translate import Job
from dovetail.types import FinishReason

Kind = Literal["chat", "generate"]
_LINES = [(b"content-type", b"application/x-ndjson")]


def problem(error: RequestError) -> Response:
    """Its clients read a text, where OpenAI's read an object."""
    return JSONResponse({"error": error.message}, error.status)


def told_as_text(
    handler: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestError as error:
            return problem(error)

    return handle


def ended(kind: Kind, model: str, reason: str, figures: dict[str, int] | None = None) -> dict[str, Any]:
    return {**_head(model), **_said(kind, Parts()), "done": True, "done_reason": reason, **(figures or {})}


class OllamaResponse(Response):
    """Runs the job when the server is ready to send."""

    def __init__(self, service: Service, job: Job, kind: Kind, *, stream: bool) -> None:
        super().__init__()
        self._service = service
        self._job = job
        self._kind = kind
        self._stream = stream
        self._began_s = time.monotonic()
        self._usage = UsageCount(job.num_prompt_tokens)  # the account's, once it runs
        self._waits: Waits | None = None
        self._finish: FinishReason | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with accounted(scope, self._job) as taken:
            self._usage = taken.usage
            if self._stream:
                await until_disconnect(receive, self._send_lines(taken, scope, receive, send))
                return
            try:
                answer: Response = JSONResponse(await until_disconnect(receive, self._whole(taken)))
            except RequestError as error:
                answer = problem(error)
        await answer(scope, receive, send)

    async def _whole(self, taken: Taken) -> dict[str, Any]:
        whole = Parts()
        async with aclosing(self._parts(taken)) as found:
            async for parts in found:
                whole.add(parts)
        return self._ended() | _said(self._kind, whole)

    async def _send_lines(self, taken: Taken, scope: Scope, receive: Receive, send: Send) -> None:
        """The status line waits for the first text. A call is told of when it is whole."""
        has_started, calls = False, Parts()
        try:
            async with aclosing(self._parts(taken)) as found:
                async for parts in found:
                    calls.add(Parts(calls=parts.calls))
                    if not has_started:
                        has_started = True
                        await send({"type": "http.response.start", "status": 200, "headers": _LINES})
                    if parts.content or parts.reasoning:
                        await self._send(send, _said(self._kind, Parts(parts.content, parts.reasoning)))
            if calls:
                await self._send(send, _said(self._kind, calls))
            await send_piece(send, _line(self._ended()), more=False)
        except RequestError as error:
            if not has_started:
                await problem(error)(scope, receive, send)
                return
            await send_piece(send, _line({"error": error.message}), more=False)

    async def _send(self, send: Send, said: dict[str, Any]) -> None:
        await send_piece(send, _line({**_head(self._job.model.name), **said, "done": False}))

    async def _parts(self, taken: Taken) -> AsyncGenerator[Parts, None]:
        reader = taken.job.make_reader()
        async with aclosing(self._service.run(taken.job, taken.origin)) as deltas:
            async for delta in deltas:
                self._waits = self._waits or delta.waits
                self._usage.add(delta)
                parts = reader.feed(delta.text)
                if delta.finish is not None:
                    self._finish = delta.finish
                    parts.add(reader.flush())
                yield parts

    def _ended(self) -> dict[str, Any]:
        """The last line, with durations in nanoseconds."""
        total_s = time.monotonic() - self._began_s
        first_s, load_s = (self._waits.first_token, self._waits.load) if self._waits else (0.0, 0.0)
        used = self._usage.total()
        figures = {
            "total_duration": _nanoseconds(total_s),
            "load_duration": _nanoseconds(load_s),
            "prompt_eval_count": used.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first_s - load_s),
            "eval_count": used.completion_tokens,
            "eval_duration": _nanoseconds(total_s - first_s),
        }
        reason = "length" if self._finish is FinishReason.LENGTH else "stop"
        return ended(self._kind, self._job.model.name, reason, figures)


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(UTC).isoformat()}


def _said(kind: Kind, parts: Parts) -> dict[str, Any]:
    thoughts = {"thinking": parts.reasoning} if parts.reasoning else {}
    if kind == "generate":
        return {"response": parts.content, **thoughts}
    calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in _calls(parts)]
    return {
        "message": {"role": "assistant", "content": parts.content, **thoughts}
        | ({"tool_calls": calls} if calls else {})
    }


def _calls(parts: Parts) -> list[tuple[str, dict[str, Any]]]:
    """One that was cut short is not told of: its clients read objects."""
    names = {call.index: call.name for call in parts.calls if call.name is not None}
    found = []
    for index, name in names.items():
        text = "".join(call.arguments for call in parts.calls if call.index == index)
        try:
            arguments = json.loads(text or "{}")
        except ValueError:
            continue
        if isinstance(arguments, dict):
            found.append((name, arguments))
    return found


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def _nanoseconds(seconds: float) -> int:
    return int(max(seconds, 0.0) * 1e9)
