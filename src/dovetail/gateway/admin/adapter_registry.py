"""Adapters that come and go while the server runs: which model each is for, and that nobody else has its name.

Reading them is the store's, which is handed in; computing with them the nodes'.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from dovetail.config import ModelConfig
from dovetail.errors import Conflict, DovetailError, InvalidRequest, ModelNotFound
from dovetail.gateway.models import NamedAdapter, ServedModel
from dovetail.gateway.service import Service
from dovetail.messages import DropAdapter
from dovetail.types import AdapterRef, ModelCard


class AdapterStore(Protocol):
    """Both raise DovetailError or OSError, with file and tensor, for what is no adapter or not one of this model."""

    def find_adapter(self, source: str, name: str, card: ModelCard) -> AdapterRef: ...

    def adapter_base(self, source: str) -> str:
        """What its author says it is for."""


class AdapterRegistry:
    """One change at a time: whoever calls holds the lock of the server's administration."""

    def __init__(self, service: Service, store: AdapterStore, check_free: Callable[[Iterable[str]], None]) -> None:
        self._service = service
        self._models = service.models
        self._store = store
        self._check_free = check_free

    async def add(self, name: str, source: str, base: str | None = None, *, in_place: bool = False) -> NamedAdapter:
        """`in_place`: another one of this name gives way; its requests finish."""
        before = self._models.adapter(name)
        if before is not None and not in_place:
            raise InvalidRequest(
                f"the adapter '{name}' is loaded already; load_inplace replaces it",
                param="lora_name",
                code="name_taken",
            )
        if before is None:
            self._check_free([name])
        model = await self._base_of(source, base)
        adapter = await self._find(name, source, model)
        self._models.add_adapter(adapter)
        if before is not None and before.ref != adapter.ref:
            self.drop([before])
        return adapter

    async def check(self, card: ModelCard, config: ModelConfig, *, in_file: bool) -> list[NamedAdapter]:
        """Those that a model's configuration names, compared with the model."""
        if config.adapters:
            there = {adapter.name for adapter in self._models.adapters_of(card.name)}  # from before it was pulled again
            self._check_free(config.adapters.keys() - there)
        model = ServedModel(card, config, self._models.executors)
        found = [await self._find(name, source, model) for name, source in config.adapters.items()]
        return [replace(adapter, in_file=in_file) for adapter in found]

    def remove(self, name: str) -> NamedAdapter:
        """No new requests; the running ones finish, and then its memory is free."""
        if self._models.adapter(name) is None:
            raise ModelNotFound(f"there is no adapter '{name[:200]}'", param="lora_name", code="model_not_found")
        adapter = self._models.remove_adapter(name)
        self.drop([adapter])
        return adapter

    def drop(self, adapters: Iterable[NamedAdapter]) -> None:
        """Nobody may ask for them any more: nodes need not keep them."""
        link = self._service.link
        for adapter in adapters:
            for node in link.nodes.values():
                if node.hello is not None:
                    link.send(node.name, DropAdapter(adapter.ref.key))

    async def _find(self, name: str, source: str, model: ServedModel) -> NamedAdapter:
        try:
            ref = await asyncio.to_thread(self._store.find_adapter, source, name, model.card)
        except (DovetailError, OSError) as error:
            raise InvalidRequest(f"the adapter '{name}': {error}", param="lora_path", code="invalid_adapter") from error
        return NamedAdapter(model.name, ref, source, int(time.time()))

    async def _base_of(self, source: str, base: str | None) -> ServedModel:
        if base is not None:
            model = self._models.get(base)
            if model.adapter is not None:
                raise InvalidRequest(f"'{base}' is an adapter itself", param="base_model_name")
            return model
        models = [one for one in await asyncio.to_thread(self._models.all) if one.adapter is None]
        if len(models) == 1:
            return models[0]
        try:
            declared = await asyncio.to_thread(self._store.adapter_base, source)
        except (DovetailError, OSError) as error:
            raise InvalidRequest(str(error), param="lora_path", code="invalid_adapter") from error
        found = [one for one in models if declared in (one.name, one.card.source, *one.config.aliases)]
        found = found or [one for one in models if one.card.source.endswith(f":{declared}")]
        if len(found) != 1:
            raise InvalidRequest(
                f"the adapter says that it is for '{declared}', which is none of the models here or several; say which "
                "as base_model_name",
                param="base_model_name",
            )
        return found[0]


def no_change_of(adapter: NamedAdapter) -> Conflict:
    return Conflict(f"'{adapter.name}' is an adapter of '{adapter.base}' and is changed with it", code="is_adapter")
