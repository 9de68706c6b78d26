"""Models that come while the server runs: pulled, asked for as soon as they can be loaded, given up where they cannot
be had. How one is pulled is `pulls`' and the store's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from dovetail.errors import DovetailError, EngineFailed, SourceError
from dovetail.gateway.admin.pulls import Pulls
from dovetail.gateway.models import AddedModel, ServedModel
from dovetail.gateway.service import Service
from dovetail.gateway.text.tokenizer_check import check_tokenizer
from dovetail.types import ModelCard

logger = logging.getLogger("dovetail.gateway")

Begin = Callable[[str, AddedModel], Coroutine[Any, Any, None]]


class Arrivals:
    def __init__(self, pulls: Pulls, service: Service, begin: Begin, spawn: Callable[[Any], None]) -> None:
        """`begin`: what is done with a model that can be asked for from now on."""
        self._pulls = pulls
        self._service = service
        self._begin = begin
        self._spawn = spawn
        self._refused: dict[str, str] = {}  # by name: why a model is not served, although it could be pulled

    async def run(self, name: str, entry: AddedModel) -> None:
        """Until the model is on disk."""
        if entry.pull is not None:
            logger.info("pulling %s from %s", name, entry.pull.source)
            try:
                card = await self._pulls.run(entry.pull, lambda card: self._spawn(self._serve_early(name, entry, card)))
                if name in self._refused:
                    raise SourceError(self._refused.pop(name))
                if card is not None and entry.card is None:
                    await self._check(card, entry)
            except (DovetailError, OSError) as error:
                logger.error("%s could not be pulled: %s", name, error)
                self._give_up(name, entry, str(error))
                return
            entry.card = card
            if entry.is_settled.is_set():
                logger.info("%s is on disk", name)
                return
        entry.is_settled.set()
        await self._begin(name, entry)

    async def _serve_early(self, name: str, entry: AddedModel, card: ModelCard) -> None:
        assert entry.pull is not None
        try:
            await self._check(card, entry)
        except DovetailError as error:
            self._refused[name] = str(error)
            entry.pull.is_cancelled = True
            return
        if not (entry.pull.is_over or entry.pull.is_cancelled or entry.is_settled.is_set()):
            logger.info("%s can be asked for while it downloads", name)
            entry.card = card
            entry.is_settled.set()
            await self._begin(name, entry)

    async def _check(self, card: ModelCard, entry: AddedModel) -> None:
        await check_tokenizer(ServedModel(card, entry.config, self._service.models.executors))

    def _give_up(self, name: str, entry: AddedModel, reason: str) -> None:
        """Whoever asked for it while it came waits for nothing."""
        assert entry.pull is not None
        entry.pull.state, entry.pull.error = "failed", reason
        entry.is_settled.set()
        if entry.card is not None:
            entry.card = None
            error = EngineFailed(f"model '{name}' could not be pulled: {reason}", code="pull_failed")
            self._service.cluster.drop(name, error)


async def until_settled(entries: Iterable[AddedModel]) -> None:
    """Each can be asked for. Raises why one could not be had."""
    for entry in entries:
        await entry.is_settled.wait()
        if entry.pull is not None and entry.pull.error is not None:
            raise SourceError(entry.pull.error)
