"""Looks through the models on offer for damage while nobody asks for anything, and has what it finds replaced.

Reading and comparing is the store's; exchanging a model is `admin`'s. One piece at a time, and a fifth of one core at
most: whoever comes meanwhile waits for one piece at worst, and not even for that on another core.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Protocol

from dovetail.errors import DovetailError
from dovetail.gateway.service import Service
from dovetail.types import ModelCard

logger = logging.getLogger("dovetail.gateway")

QUIET_S = 5.0  # without a request before it begins
RECHECK_S = 7 * 86400.0
LOOK_S = 60.0  # how often it looks for models that have come
SHARE = 0.2  # of a core


class Finding(Protocol):
    @property
    def problem(self) -> str: ...


Replace = Callable[[ModelCard, Finding], Awaitable[None]]


class Checks(Protocol):
    """What the store does for it."""

    def check_pieces(self, card: ModelCard) -> Iterator[Finding]: ...


class Verification:
    def __init__(self, service: Service, store: Checks, replace: Replace, quiet_s: float = QUIET_S) -> None:
        self._service = service
        self._store = store
        self._replace = replace
        self._quiet_s = quiet_s
        self._checked: dict[tuple[str, int], float] = {}  # by folder and time of the pull: when it was found sound
        self._suspected: set[str] = set()  # by name: looked at before all others, and though the server is busy
        self._woken = asyncio.Event()

    def suspect(self, name: str) -> None:
        """It could not be loaded: perhaps that is why."""
        self._suspected.add(name)
        self._woken.set()

    async def run(self) -> None:
        while True:
            card = self._next()
            if card is None:
                self._woken.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), LOOK_S)
                continue
            await self._look_through(card)

    def _next(self) -> ModelCard | None:
        try:
            cards = [model.card for model in self._service.models.all()]
        except DovetailError:
            return None
        now = time.monotonic()
        due = [card for card in cards if now - self._checked.get((card.path, card.created), -RECHECK_S) >= RECHECK_S]
        suspected = [card for card in cards if card.name in self._suspected]
        return next(iter(suspected or due), None)

    async def _look_through(self, card: ModelCard) -> None:
        is_urgent = card.name in self._suspected
        self._suspected.discard(card.name)
        pieces = self._store.check_pieces(card)
        while True:
            if not is_urgent:
                await self._until_quiet()
            started = time.monotonic()
            finding = await asyncio.to_thread(next, pieces, None)
            if finding is None:
                self._checked[card.path, card.created] = time.monotonic()
                return
            if finding.problem:
                logger.error("%s is damaged: %s", card.name, finding.problem)
                try:
                    await self._replace(card, finding)
                except (DovetailError, OSError) as error:
                    logger.error("%s could not be replaced: %s", card.name, error)
                    self._checked[card.path, card.created] = time.monotonic()  # not over and over
                return
            await asyncio.sleep((time.monotonic() - started) * (1 / SHARE - 1))

    async def _until_quiet(self) -> None:
        quiet_since = time.monotonic()
        while self._service.unfinished or time.monotonic() - quiet_since < self._quiet_s:
            if self._service.unfinished:
                await self._service.wait_until_idle()
                quiet_since = time.monotonic()
            if self._quiet_s <= time.monotonic() - quiet_since:
                return
            await asyncio.sleep(min(self._quiet_s / 5, 1.0))
