"""uvicorn with our signals: the first SIGTERM or SIGINT drains, the second leaves at once; a drained server exits 0.
SIGHUP has the configuration read again."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from dovetail.config import ServerConfig
from dovetail.gateway.admin.admin import Admin
from dovetail.gateway.http.protocol import ConnectionLimits, Connections, LimitedHttp
from dovetail.gateway.http.tls import TlsServer

logger = logging.getLogger("dovetail.gateway")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CLOSE_TIMEOUT_S = 5  # for connections, once their streams have ended
_OTHER_FILES = 256  # descriptors for all that is not a connection
_MIN_CONNECTIONS = 64


def has_terminal() -> bool:
    """SIGHUP means two things: read your file again, and (to what was started in it) your terminal is gone."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def connection_limits(config: ServerConfig) -> ConnectionLimits:
    """As many connections as descriptors allow, which are raised as far as they may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + _OTHER_FILES
    if soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = max(soft - _OTHER_FILES, _MIN_CONNECTIONS)
    return ConnectionLimits(min(config.max_connections, room), config.header_timeout, config.max_body_bytes)


class HttpServer(TlsServer):
    """Serves until told to stop. While it drains it still answers: probes must see it go."""

    def __init__(self, app: ASGIApp, admin: Admin, *, ends_with_terminal: bool = False) -> None:
        connections = Connections(connection_limits(admin.settings.config.server))
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(LimitedHttp, connections=connections),  # type: ignore[arg-type]
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_keep_alive=75,  # longer than the idle time of usual proxies, which must be the ones to close
                timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
            ),
            admin.settings.tls,
            connections.limits.header_timeout_s,
        )
        self._admin = admin
        self._ends_with_terminal = ends_with_terminal
        self._service = admin.service
        self._reload: asyncio.Task[None] | None = None
        self._is_reload_due = False
        self._drain: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own would raise the signal again at the end, and the exit code would not be 0."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        try:
            yield
        finally:
            for number in (*_SIGNALS, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._drain is not None:
            self.should_exit = self.force_exit = True
            self._drain.cancel()
            return
        self._service.is_draining = True
        count, limit_s = self._service.unfinished, self._admin.settings.drain_timeout_s
        answers = "1 answer" if count == 1 else f"{count} answers"
        logger.info(
            "shutting down: waiting up to %g s for %s to end; a second Ctrl-C or SIGTERM ends them now",
            limit_s,
            answers,
        )
        self._drain = asyncio.create_task(self._exit_when_idle())

    def _on_hangup(self) -> None:
        if self._ends_with_terminal and not has_terminal():
            self._on_signal()
        else:
            self._is_reload_due = True
            if self._reload is None or self._reload.done():
                self._reload = asyncio.create_task(self._reload_until_read())

    async def _reload_until_read(self) -> None:
        """Once more for signals that came meanwhile, however many there were."""
        while self._is_reload_due:
            self._is_reload_due = False
            await self._admin.reload_and_log()

    async def _exit_when_idle(self) -> None:
        running = self._service.unfinished
        try:
            async with asyncio.timeout(self._admin.settings.drain_timeout_s):
                await self._service.wait_until_idle()
        except TimeoutError:
            self.force_exit = True
        finally:
            cut = self._service.unfinished
            level = logging.WARNING if cut else logging.INFO
            logger.log(level, "drained: %d of %d answers finished, %d were cut", max(running - cut, 0), running, cut)
        self.should_exit = True
