"""Responses that are made while nobody waits for them: asked for again by their id, or ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from dovetail.errors import Overloaded
from dovetail.gateway.http.responses.items import ResponseRecord

logger = logging.getLogger("dovetail.gateway")

MAX_BYTES = 64 * 1024 * 1024  # of what those that run were asked with


@dataclass(frozen=True)
class _Running:
    owner: str  # name of the API key
    size_bytes: int
    task: asyncio.Task[None]
    so_far: Callable[[], ResponseRecord]
    is_ending: Callable[[], bool]


class BackgroundResponses:
    """Holds each until it has ended; what it came to is the store's by then."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._running: dict[str, _Running] = {}

    def check_room(self, owner: str, size_bytes: int) -> None:
        """A key may hold as much as is left for the others, as of the queue."""
        held = sum(running.size_bytes for running in self._running.values() if running.owner == owner)
        left = self._max_bytes - sum(running.size_bytes for running in self._running.values())
        if size_bytes > left or (held and held + size_bytes > left):
            raise Overloaded(
                f"the input takes {size_bytes} bytes, and responses in the background hold {self._max_bytes - left} of "
                f"{self._max_bytes}; retry when some have ended",
                code="background_full",
                retry_after_s=1,
            )

    def start(
        self,
        id: str,
        owner: str,
        size_bytes: int,
        work: Coroutine[None, None, None],
        so_far: Callable[[], ResponseRecord],
        is_ending: Callable[[], bool],
        places: ExitStack,
    ) -> None:
        """`is_ending`: all is generated, and what came of it is being kept. `places` are given back at the end."""
        task = asyncio.create_task(work)
        self._running[id] = _Running(owner, size_bytes, task, so_far, is_ending)
        task.add_done_callback(lambda task: self._ended(id, task, places))

    def find(self, id: str, owner: str) -> ResponseRecord | None:
        """What there is of it; None once it has ended, and for others."""
        running = self._running.get(id)
        return running.so_far() if running is not None and running.owner == owner else None

    async def cancel(self, id: str, owner: str) -> None:
        """Returns when it has ended, if it has not before."""
        running = self._running.get(id)
        if running is not None and running.owner == owner:
            if not running.is_ending():
                running.task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.shield(asyncio.gather(running.task, return_exceptions=True))

    def _ended(self, id: str, task: asyncio.Task[None], places: ExitStack) -> None:
        del self._running[id]
        places.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a response in the background failed", exc_info=error)
