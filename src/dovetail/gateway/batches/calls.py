"""One line of a batch as a request: the same endpoint, with the same limits, as for a client's, called in this process
and as best effort."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Any, Never

import msgspec
from starlette.types import ASGIApp, Message, Scope

from dovetail.gateway.admin.keys import Caller
from dovetail.gateway.clients import current_client

_HOST = b"localhost"


@dataclass(frozen=True)
class LineAnswer:
    """Of one line."""

    status: int
    request_id: str
    body: bytes  # one line of JSON
    retry_after_s: float | None = None


async def ask(app: ASGIApp, endpoint: str, body: bytes, owner: str) -> LineAnswer:
    """Cancel to have it end: nothing of it runs afterwards."""
    request_id = uuid.uuid4().hex
    current_client.set(f"batches of {owner}")  # beside what the owner asks by itself
    collected = _Collected()
    sent = asyncio.Event()

    async def receive() -> Message:
        if sent.is_set():
            await _forever()
        sent.set()
        return {"type": "http.request", "body": body, "more_body": False}

    await app(_scope(endpoint, owner, request_id), receive, collected.send)
    return LineAnswer(collected.status, request_id, _one_line(collected.body), collected.retry_after_s)


def _scope(endpoint: str, owner: str, request_id: str) -> Scope:
    state: dict[str, Any] = {
        "request_id": request_id,
        "arrived_s": time.monotonic(),
        "caller": Caller(),  # limits of a key are for its requests, and batches have their own
        "is_batch": True,
    }
    if owner:
        state["key"] = owner
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": endpoint,
        "raw_path": endpoint.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", _HOST), (b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": state,
    }


class _Collected:
    """An answer as the endpoint sends it."""

    def __init__(self) -> None:
        self.status = 500
        self.retry_after_s: float | None = None
        self._body: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            for name, value in message.get("headers", ()):
                if name.lower() == b"retry-after":
                    self.retry_after_s = float(value)
        else:
            self._body.append(message.get("body", b""))

    @property
    def body(self) -> bytes:
        return b"".join(self._body)


def _one_line(body: bytes) -> bytes:
    """JSON without line breaks between its values."""
    return body if b"\n" not in body and body else msgspec.json.encode(msgspec.json.decode(body or b"null"))


async def _forever() -> Never:
    """A client that never goes away."""
    while True:
        await asyncio.Event().wait()
