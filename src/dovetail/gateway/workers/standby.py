"""A gateway that does not lead: it waits for its turn, and says so to whoever asks. Nothing is decided here."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dovetail.errors import Overloaded
from dovetail.gateway.http.endpoint import json_response
from dovetail.gateway.http.problems import problem_response
from dovetail.gateway.http.replies import Status
from dovetail.gateway.http.tls import Tls, TlsServer
from dovetail.gateway.workers.etcd_state import EtcdDurable

logger = logging.getLogger("dovetail.gateway")

LOOK_S = 0.5  # how often it is tried to lead
RETRY_AFTER_S = 2.0
_CLOSE_TIMEOUT_S = 1
_HANDSHAKE_TIMEOUT_S = 10.0


async def wait_to_lead(
    durable: EtcdDurable, listener: socket.socket, tls: Tls | None, on_wait: Callable[[], None]
) -> None:
    """Returns when this gateway leads. Until then clients are answered on the listener, which stays open."""
    server: StandbyServer | None = None
    serving: asyncio.Task[None] | None = None
    said = ""
    try:
        while (why := await asyncio.to_thread(durable.campaign)) is not None:
            if server is None:
                server = StandbyServer(tls)
                serving = asyncio.create_task(server.serve(sockets=[listener.dup()]))
                on_wait()
            if why != said:
                logger.warning("waits to lead (%s): %s", durable.address, why)
                said = why
            await asyncio.sleep(LOOK_S)
    finally:
        if server is not None and serving is not None:
            server.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)


class StandbyServer(TlsServer):
    def __init__(self, tls: Tls | None) -> None:
        super().__init__(
            uvicorn.Config(
                answer,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
            ),
            tls,
            _HANDSHAKE_TIMEOUT_S,
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals end the wait, and are `serve`'s."""
        yield


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Probes as ever; the rest is for whoever leads."""
    response: Response
    path = Request(scope).url.path
    if path == "/live":
        response = json_response(Status(status="ok"))
    elif path == "/health":
        response = json_response(Status(status="waiting"), 503)
    else:
        why = "this gateway waits for its turn: another one leads"
        response = problem_response(Overloaded(why, code="not_leading", retry_after_s=RETRY_AFTER_S), scope)
    await response(scope, receive, send)
