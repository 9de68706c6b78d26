"""HTTP/1.1 as uvicorn speaks it, with limits on what a connection may cost before there is a request to look at.

A client gets so much time and so many bytes for its headers; trailers and requests sent ahead are bounded; an answer
that its client does not take goes with the connection; a server with too many connections closes the one that has
waited longest for its client, of the address that has most of them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from dovetail.errors import RequestError
from dovetail.gateway.http.problems import openai_problem

MAX_HEADER_BYTES = 32 * 1024  # request line, headers; trailers alike
MAX_HEADERS = 100
_LEAST_TAKEN_BYTES = 8 * 1024  # of an answer that waits for its client, in `header_timeout_s`
_MAX_AHEAD = 16  # requests of one connection that wait for the answer to an earlier one


@dataclass(frozen=True)
class ConnectionLimits:
    max_connections: int = 2048
    header_timeout_s: float = 10.0  # also for the rest of a body whose request was answered without it
    max_unread_bytes: int = 4 * 1024 * 1024  # of a body whose request was answered without it


class Connections:
    """Those that wait for their clients (for headers, a body, or the next request), by address, oldest first."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._waiting: dict[str, OrderedDict[LimitedHttp, None]] = {}
        self._number = 0

    def open(self, connection: LimitedHttp) -> bool:
        """False if there is no room even so."""
        self._number += 1
        self.wait_for_client(connection)
        return self._number <= self.limits.max_connections or self._drop_one(connection)

    def close(self, connection: LimitedHttp) -> None:
        self._number -= 1
        self.work(connection)

    def wait_for_client(self, connection: LimitedHttp) -> None:
        self._waiting.setdefault(connection.address, OrderedDict())[connection] = None

    def work(self, connection: LimitedHttp) -> None:
        """It has a whole request, or is gone."""
        waiting = self._waiting.get(connection.address)
        if waiting is not None:
            waiting.pop(connection, None)
            if not waiting:
                del self._waiting[connection.address]

    def _drop_one(self, newcomer: LimitedHttp) -> bool:
        most = max(self._waiting.values(), key=len)
        oldest = next(iter(most))
        if oldest is newcomer:
            return False
        self.work(oldest)
        oldest.transport.abort()
        return True


class LimitedHttp(HttpToolsProtocol):
    def __init__(self, *, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self.address = ""
        self._connections = connections
        self._timer: asyncio.TimerHandle | None = (
            None  # runs while headers are awaited, or what is left of an answered request
        )
        self._unsent_timer: asyncio.TimerHandle | None = None  # runs while an answer is there that was not taken
        self._in_message = False  # between the first byte of a request and the last of its body
        self._in_head = False
        self._head_bytes = 0  # of this request's headers, and then of its trailers
        self._num_headers = 0
        self._unread_bytes = 0  # came after the answer
        self._is_refused = False

    # Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if not self._connections.open(self):
            self._refuse(503, "too many connections", "too_many_connections")
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.close(self)
        self._stop_timer()
        if self._unsent_timer is not None:
            self._unsent_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self._is_refused or self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)  # what is not a whole header yet
            if self._head_bytes > 2 * MAX_HEADER_BYTES:
                self._refuse_headers()
        elif not self._in_message and self._is_idle and self._timer is None:
            self._start_timer()  # empty lines before a request
        elif self._in_message and self._is_idle:
            self._unread_bytes += len(data)
            if self._unread_bytes > self._connections.limits.max_unread_bytes:
                self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not an HTTP/1.1 request", "invalid_http")

    # Requests

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = self._in_head = True
        self._head_bytes = self._num_headers = self._unread_bytes = 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes <= MAX_HEADER_BYTES:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._head_bytes += len(name) + len(value) + 4
        if self._is_head_too_large:
            self._refuse_headers()
        elif self._in_head:  # a trailer says nothing that anybody here listens to
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_head = False
        if self._is_head_too_large or len(self.pipeline) >= _MAX_AHEAD:
            self._refuse_headers()
        if self._is_refused:
            return
        self._head_bytes = self._num_headers = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        self._stop_timer()
        if not self._is_refused:
            if not self._is_idle:
                self._connections.work(self)
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._watch_unsent()
        super().on_response_complete()
        if not self.transport.is_closing() and not self.pipeline:
            self._connections.wait_for_client(self)
            if self._in_message:
                self._start_timer()  # the rest of a body that nobody reads any more

    # Inside

    @property
    def _is_idle(self) -> bool:
        """Nothing is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_head_too_large(self) -> bool:
        return self._head_bytes > MAX_HEADER_BYTES or self._num_headers > MAX_HEADERS

    def _watch_unsent(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent and self._unsent_timer is None:
            timeout_s = self._connections.limits.header_timeout_s
            self._unsent_timer = self.loop.call_later(timeout_s, self._check_unsent, unsent)

    def _check_unsent(self, before: int) -> None:
        self._unsent_timer = None
        if self.transport.get_write_buffer_size() > max(before - _LEAST_TAKEN_BYTES, 0):
            self.transport.abort()
        else:
            self._watch_unsent()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self._connections.limits.header_timeout_s, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self._in_head:
            self._refuse(408, "the headers did not arrive in time", "timeout")
        else:
            self.transport.abort()  # there is nothing to answer

    def _refuse_headers(self) -> None:
        limit = f"{MAX_HEADER_BYTES} bytes, {MAX_HEADERS} headers"
        self._refuse(431, f"the headers are more than this server takes ({limit})", "headers_too_large")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Before any request was handed on; answers that are under way end with the connection."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._stop_timer()
        if not self._is_idle:
            self.transport.abort()
            return
        error = RequestError(message, code=code)
        error.kind = "invalid_request_error" if status < 500 else "overloaded_error"
        body = openai_problem(error)
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
