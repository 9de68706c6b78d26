"""Which models are loaded without a request for them, and which are unloaded once idle because they are no longer on
offer in the form that is loaded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

from dovetail.errors import ModelNotFound, RequestError
from dovetail.gateway.hosted import HostedModel
from dovetail.gateway.service import Service
from dovetail.messages import Hello, ToGateway

logger = logging.getLogger("dovetail.gateway")


class PreloadedModels:
    def __init__(self, service: Service, preload: Iterable[str]) -> None:
        self._service = service
        self._models = service.models
        self._tasks: set[asyncio.Task[None]] = set()
        self.preload = tuple(preload)  # loaded whenever a worker starts
        service.link.observers.append(self._on_message)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def load_all(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                await self._service.preload([name])
            except RequestError as error:
                logger.error("%s could not be loaded: %s", name, error.message)

    def replace_preload(self, names: Iterable[str]) -> None:
        """Those that are loaded are not touched."""
        self.preload = tuple(names)
        self.spawn(self.load_all([name for name in self.preload if not self.is_loaded(name)]))

    def _on_message(self, node: str, message: ToGateway) -> None:
        """A worker that took another's place has none of the models that shall always be there."""
        if isinstance(message, Hello) and self._service.is_ready:
            self.spawn(self.load_all(self.preload))

    def is_loaded(self, name: str) -> bool:
        hosted = self._service.cluster.models.get(name)
        return hosted is not None and hosted.loaded is not None and self._is_current(hosted)

    def unfinished(self, name: str) -> int:
        hosted = self._service.cluster.models.get(name)
        return hosted.num_requests if hosted is not None else 0

    def retire(self, name: str, *, force: bool) -> int:
        """Unload a model once idle, or at once. Returns how many requests it has."""
        unfinished, cluster = self.unfinished(name), self._service.cluster
        hosted = cluster.models.get(name)
        if force:
            error = ModelNotFound(f"'{name}' was removed while it answered", param="model", code="model_removed")
            cluster.drop(name, error)
        elif hosted is not None:
            self.spawn(self._unload_when_idle(hosted))
        return unfinished

    def follow(self, name: str) -> None:
        """A model that the nodes know gets its new settings; one that is no longer on offer, or not yet in its new
        form, is unloaded once idle."""
        if name in self._models.arriving() or not self._models.is_taken(name):
            self.retire(name, force=False)
            return
        try:
            self._service.reconfigure(name)
        except RequestError as error:  # its files cannot be read now: what is loaded goes on
            logger.error("%s keeps its settings: %s", name, error.message)

    async def _unload_when_idle(self, hosted: HostedModel) -> None:
        """Unless it is on offer again by then."""
        name, cluster = hosted.card.name, self._service.cluster
        while cluster.models.get(name) is hosted and not self._is_current(hosted):
            await hosted.idle.wait()
            if cluster.models.get(name) is hosted and not hosted.is_wanted and not self._is_current(hosted):
                cluster.unload(name)

    def _is_current(self, hosted: HostedModel) -> bool:
        """On offer, in this form."""
        try:
            return self._models.get(hosted.card.name).card == hosted.card
        except RequestError:
            return False
