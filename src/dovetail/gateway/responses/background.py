"""Responses that are made while nobody waits for them: asked for again by their id, or ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass

from dovetail.gateway.responses.items import ResponseRecord

logger = logging.getLogger("dovetail.gateway")


@dataclass(frozen=True)
class _Running:
    owner: str  # name of the API key
    task: asyncio.Task[None]
    so_far: Callable[[], ResponseRecord]


class BackgroundResponses:
    """Holds each until it has ended; what it came to is the store's by then."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}

    def start(
        self, id: str, owner: str, work: Coroutine[None, None, None], so_far: Callable[[], ResponseRecord]
    ) -> None:
        task = asyncio.create_task(work)
        self._running[id] = _Running(owner, task, so_far)
        task.add_done_callback(lambda task: self._ended(id, task))

    def find(self, id: str, owner: str) -> ResponseRecord | None:
        """What there is of it; None once it has ended, and for others."""
        running = self._running.get(id)
        return running.so_far() if running is not None and running.owner == owner else None

    async def cancel(self, id: str, owner: str) -> None:
        """Returns when it has ended, if it has not before."""
        running = self._running.get(id)
        if running is not None and running.owner == owner:
            running.task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.shield(asyncio.gather(running.task, return_exceptions=True))

    def _ended(self, id: str, task: asyncio.Task[None]) -> None:
        del self._running[id]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a response in the background failed", exc_info=error)
