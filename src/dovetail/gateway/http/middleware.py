"""Around every request, as plain ASGI: its id and its line in the log, who may call, and how much they may send."""

from __future__ import annotations

import re
import secrets
import time
from collections import Counter
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dovetail.errors import Overloaded, PayloadTooLarge, RequestError
from dovetail.gateway.admin.keys import ApiKeys
from dovetail.gateway.clients import current_client
from dovetail.gateway.http.problems import problem_response

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}", re.ASCII)


class RequestIds:
    """Echoes X-Request-Id where it is a plain word and gives one where not; reports the status of each answer when it
    begins, and when it is over that and the bytes sent (status 0: the client left before there was an answer)."""

    def __init__(
        self, app: ASGIApp, on_status: Callable[[Scope, int], None], on_end: Callable[[Scope, int, int], None]
    ) -> None:
        self._app = app
        self._on_status = on_status
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        scope["state"]["arrived_s"] = time.monotonic()
        status = num_bytes = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                status = message["status"]
                scope["state"]["started_s"] = time.monotonic()
                self._on_status(scope, status)
            num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._on_end(scope, status, num_bytes)


class Auth:
    """Lets in whoever the keys let in, and says who it is."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                caller = self._keys.check(scope)
            except RequestError as error:
                return await problem_response(error, scope)(scope, receive, send)
            state = scope.setdefault("state", {})
            state["caller"] = caller
            account = caller.account
            if account is not None and (len(self._keys) > 1 or account.max_unfinished):
                state["key"] = account.name  # one key alone shares with nobody
            current_client.set(state.get("key") or (scope.get("client") or ("",))[0])
        await self._app(scope, receive, send)


class BodyMemory:
    """Bytes of bodies that were received and not yet read. A client may have as many as are left for the others, so
    that one alone gets half, and a newcomer always finds room."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._used: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self._used.total()

    def take(self, client: str, count: int) -> None:
        if count and self._used[client] + count > self._limit() - self.total:
            raise Overloaded("too many request bodies are being received", code="bodies_full", retry_after_s=1)
        self._used[client] += count

    def give_back(self, client: str, count: int) -> None:
        self._used[client] -= count
        assert self._used[client] >= 0
        if not self._used[client]:
            del self._used[client]


class BodyLimit:
    """Refuses a body over the limit: at once when its length is announced, else as soon as it goes over; and bodies
    that together take more memory than all may have. Those that are streamed to disk have a limit of their own."""

    def __init__(
        self,
        app: ASGIApp,
        limit: Callable[[], int],
        memory: BodyMemory,
        streamed_limit: Callable[[Scope], int | None] = lambda scope: None,
    ) -> None:
        self._app = app
        self._limit = limit
        self._memory = memory
        self._streamed_limit = streamed_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        announced = Headers(scope=scope).get("content-length", "0")
        streamed = self._streamed_limit(scope)
        limit, key = (self._limit(), "server.max_body_bytes") if streamed is None else (streamed, "batch.max_file")
        if announced.isascii() and announced.isdigit() and int(announced[:20]) > limit:
            return await problem_response(_too_large(limit, key), scope)(scope, receive, send)
        client, received, held = current_client.get(), 0, 0

        async def receive_limited() -> Message:
            nonlocal received, held
            message = await receive()
            count = len(message.get("body", b""))
            received += count
            if received > limit:
                raise _too_large(limit, key)
            if streamed is None:
                self._memory.take(client, count)
                held += count
            return message

        def give_back() -> None:
            nonlocal held
            self._memory.give_back(client, held)
            held = 0

        async def send_and_give_back(message: Message) -> None:
            give_back()  # there is an answer: the body was read
            await send(message)

        try:
            await self._app(scope, receive_limited, send_and_give_back)
        finally:
            give_back()
            scope.setdefault("state", {})["received"] = received


def _too_large(limit: int, key: str) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than {limit} bytes ({key})", code="payload_too_large")
