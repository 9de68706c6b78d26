"""Changing a running server: models that come, change and go, and its configuration file read again.

Nothing here drops a running answer unless it is told to. HTTP is `admin.routes`'; the store and the file are handed in.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from pydantic import ValidationError

from dovetail.config import Config, ModelConfig, describe
from dovetail.errors import (
    ConfigError,
    Conflict,
    DovetailError,
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    RequestError,
)
from dovetail.gateway.admin.adapter_registry import AdapterRegistry, AdapterStore, no_change_of
from dovetail.gateway.admin.arrivals import Arrivals, until_settled
from dovetail.gateway.admin.preloaded import PreloadedModels
from dovetail.gateway.admin.pulls import Puller, Pulls
from dovetail.gateway.admin.settings import Settings
from dovetail.gateway.admin.verification import Checks, Verification
from dovetail.gateway.models import AddedModel, ConfiguredModels, ServedModel
from dovetail.gateway.service import Limits, Service
from dovetail.gateway.text.tokenizer_check import check_tokenizer
from dovetail.gateway.workers.recovery import Changes, until_joined
from dovetail.machine import release_memory
from dovetail.messages import LoadFailed, Reclaimed, ToGateway, Unloaded
from dovetail.types import ModelCard

logger = logging.getLogger("dovetail.gateway")


class Store(Puller, AdapterStore, Protocol):
    """Where models come from."""

    def find(self, source: str, name: str, layout: str) -> ModelCard | None:
        """The model if it is on this machine, under this name, in this layout; None if it has to be pulled. Raises
        DovetailError for what is not a model."""

    def in_host_memory(self, cards: Sequence[ModelCard]) -> set[str]:
        """Names of those that start without a read of the disk."""


class Verified(Store, Checks, Protocol):
    """A store that can tell damage, and put it aside."""

    def put_aside(self, card: ModelCard, finding: Any) -> bool:
        """Returns whether what it came from can be had again."""


class ConfigFile(Protocol):
    """Where the configuration comes from. Both raise DovetailError, with file and key."""

    def read(self) -> Config: ...

    def offer(self, config: Config) -> ConfiguredModels: ...


class Admin:
    def __init__(
        self,
        service: Service,
        settings: Settings,
        store: Store,
        file: ConfigFile | None = None,
        preload: Sequence[str] = (),
        changes: Changes | None = None,
    ) -> None:
        self.service = service
        self._changes = changes  # kept for a server that is started after this one
        self.settings = settings
        self.pulls = Pulls(store)
        self._models = service.models
        self._store = store
        self._file = file
        self._changing = asyncio.Lock()  # one change at a time: each looks before it acts
        self._adapters = AdapterRegistry(service, store, self._check_free)
        self._residency = PreloadedModels(service, preload)
        self._arrivals = Arrivals(self.pulls, service, self._begin_serving, self._residency.spawn)
        self._verification: Verification | None = None
        service.link.observers.append(self._on_message)

    # Models

    def in_host_memory(self, cards: Sequence[ModelCard]) -> set[str]:
        return self._store.in_host_memory(cards)

    async def add(self, name: str, config: ModelConfig) -> None:
        """On offer at once if it is here, else as soon as it is pulled."""
        async with self._changing:
            self.service.check_leading()
            self._check_free([name, *config.aliases])
            try:
                card = await asyncio.to_thread(self._store.find, config.source, name, config.layout)
            except (DovetailError, OSError) as error:
                raise InvalidRequest(f"source: {error}", param="source") from error
            if card is not None:
                await check_tokenizer(ServedModel(card, config, self._models.executors))
            await asyncio.to_thread(self.service.drafts.check, name, card, config.speculative.draft)
            adapters = await self._adapters.check(card, config, in_file=False) if card is not None else []
            self._offer(name, config, card, in_file=False)
            for adapter in adapters:
                self._models.add_adapter(adapter)
            await self._note(name, config)

    async def add_adapter(self, name: str, source: str, base: str | None, *, in_place: bool) -> None:
        async with self._changing:
            adapter = await self._adapters.add(name, source, base, in_place=in_place)
            logger.info("%s is an adapter of %s from now on", name, adapter.base)

    async def remove_adapter(self, name: str) -> None:
        async with self._changing:
            adapter = self._adapters.remove(name)
            logger.info("%s is no adapter of %s any more", name, adapter.base)

    async def change(self, name: str, changes: dict[str, Any]) -> None:
        async with self._changing:
            self.service.check_leading()
            name = self._known(name)
            entry = self._models.arriving().get(name)
            before = entry.config if entry is not None else self._models.get(name).config
            values = before.model_dump(by_alias=True) | changes
            values["slo"] = before.slo.model_dump() | (changes.get("slo") or {})
            try:
                config = ModelConfig.model_validate(values)
            except ValidationError as error:
                raise InvalidRequest(describe(error), param=str(error.errors()[0]["loc"][0])) from error
            self._check_free(alias for alias in config.aliases if alias not in before.aliases)
            self._models.configure(name, config)
            self.service.reconfigure(name)
            await self._note(name, config)

    async def remove(self, name: str, *, force: bool) -> int:
        """No new requests; the running ones finish, or end with an error. Returns how many there were."""
        async with self._changing:
            if self._models.adapter(name) is not None:
                self._adapters.remove(name)
                return 0
            self.service.check_leading()
            name = self._known(name)
            self.pulls.cancel(name)
            self._models.remove(name)
            left = self._residency.retire(name, force=force)
            await self._note(name, None)
            return left

    async def recover(self) -> None:
        """What was changed before the server was started again holds, as far as it still can."""
        for name, config in self._changes.all().items() if self._changes is not None else ():
            try:
                if config is None:
                    await self.remove(name, force=False)
                elif self._models.is_taken(name):
                    self._models.configure(name, config)
                else:
                    await self.add(name, config)
            except RequestError as error:
                logger.warning("%s is not as it was before: %s", name, error.message)

    def load_again(self, names: Iterable[str]) -> None:
        """Those that were ready before the server was started again, without anybody waiting for them."""
        known = [name for name in names if self._models.is_taken(name) and name not in self._models.arriving()]
        self._residency.spawn(self._load_where_missing(known))

    async def _load_where_missing(self, names: Sequence[str]) -> None:
        await until_joined(self.service.link)
        await self._residency.load_all([name for name in names if not self.service.cluster.nodes_of(name)])

    async def _note(self, name: str, config: ModelConfig | None) -> None:
        """Returns when it is written: whoever asked for it may count on it then."""
        if self._changes is not None:
            self._changes.note(name, config)
            await asyncio.to_thread(self._changes.flush)

    async def load(self, name: str) -> None:
        """Returns when it is ready."""
        self.service.check_leading()
        adapter = self._models.adapter(name)
        await self.service.preload([self._known(name) if adapter is None else adapter.base])

    def unload(self, name: str, *, force: bool) -> int:
        """Its memory is free; the next request loads it again. Returns how many requests it ended."""
        name = self._known(name)
        unfinished = self._residency.unfinished(name)
        if unfinished and not force:
            raise Conflict(f"'{name}' is answering {unfinished} requests; force ends them", code="model_in_use")
        error = ModelNotFound(f"'{name}' was unloaded while it answered", param="model", code="model_unloaded")
        self.service.cluster.drop(name, error)
        return unfinished

    # Damage

    def look_for_damage(self, store: Verified) -> None:
        """From now on, while nobody asks for anything."""

        async def replace(card: ModelCard, finding: Any) -> None:
            await self._replace_damaged(store, card, finding)

        self._verification = Verification(self.service, store, replace)
        self._residency.spawn(self._verification.run())

    async def _replace_damaged(self, store: Verified, card: ModelCard, finding: Any) -> None:
        """No request shall be answered by it any more; it is fetched again where that can be done."""
        async with self._changing:
            error = EngineFailed(f"'{card.name}' was found damaged while it answered", code="model_damaged")
            self.service.cluster.drop(card.name, error)
            can_fetch = await asyncio.to_thread(store.put_aside, card, finding)
            if not can_fetch:
                logger.error("%s cannot be fetched again: %s is not there", card.name, card.source or "its source")
                return
            config = self._models.config_of(card.name, card)
            config = config.model_copy(update={"source": card.source, "layout": card.layout})
            self._offer(card.name, config, None, in_file=False)

    # The configuration

    async def reload(self) -> None:
        """The file as it is now, or the configuration as it was and a ConfigError that says why. Models that the file
        does not change are not touched."""
        if self._file is None:
            raise ConfigError("there is no configuration file to read again; the server was started without --config")
        async with self._changing:
            try:
                config = await asyncio.to_thread(self._file.read)
                await asyncio.to_thread(self.settings.check, config)
                offer = await asyncio.to_thread(self._file.offer, config)
            except (DovetailError, OSError) as error:
                self.settings.refuse(str(error))
                raise ConfigError(f"{error}; the configuration stays as it was") from error
            self._apply(config, offer)

    async def reload_and_log(self) -> None:
        try:
            await self.reload()
        except DovetailError as error:
            logger.error("not reloaded: %s", error)
            return
        names = ", ".join(self.settings.config.models) or "the whole store"
        logger.info("reloaded %s: %s", self.settings.file, names)
        for key in self.settings.needs_restart:
            logger.warning(
                "%s: %s has changed; it takes effect when the server is started again", self.settings.file, key
            )

    def _apply(self, config: Config, offer: ConfiguredModels) -> None:
        """In one tick: no request sees half of it."""
        arriving = self._models.arriving()
        self.settings.accept(config)
        self.service.limits = Limits.of(config.server)
        self._adapters.drop(self._models.replace(offer.catalogue, offer.configs, offer.adapters))
        if self._changes is not None:
            self._changes.forget(offer.configs)
        for name in offer.missing:
            self._keep_pulling(name, offer.configs[name], arriving.get(name))
        for name in arriving.keys() - self._models.arriving().keys():
            self.pulls.cancel(name)
        for name in list(self.service.cluster.models):
            self._residency.follow(name)
        self._residency.replace_preload(name for name in offer.preload if name not in offer.missing)

    def _keep_pulling(self, name: str, config: ModelConfig, entry: AddedModel | None) -> None:
        pull = entry.pull if entry is not None else None
        wanted = (config.source, config.layout)
        if entry is None or pull is None or pull.is_over or (pull.source, pull.layout) != wanted:
            self.pulls.cancel(name)
            self._offer(name, config, None, in_file=True)
        else:
            entry.config, entry.in_file = config, True
            self._models.add(name, entry)

    # How it is done

    def _offer(self, name: str, config: ModelConfig, card: ModelCard | None, *, in_file: bool) -> None:
        pull = None if card is not None else self.pulls.begin(name, config.source, config.layout, time.time())
        entry = AddedModel(config, card, in_file, pull)
        self._models.add(name, entry)
        self._residency.spawn(self._arrivals.run(name, entry))

    async def _begin_serving(self, name: str, entry: AddedModel) -> None:
        if entry.card is not None and entry.pull is not None:
            await self._add_adapters(entry.card, entry)
        if entry.card is not None and entry.config.preload:
            if entry.in_file:
                self._residency.preload += (name,)
            await self._residency.load_all([name])

    async def pull_missing(self, offer: ConfiguredModels) -> None:
        """What was named when the server was started; returns when each can be asked for. Raises why one cannot."""
        for name in offer.missing:
            if not self._models.is_taken(name):
                self._keep_pulling(name, offer.configs[name], None)
        await until_settled([entry for name in offer.missing if (entry := self._models.arriving().get(name))])

    async def _add_adapters(self, card: ModelCard, entry: AddedModel) -> None:
        """A model has come, which they can be compared with."""
        async with self._changing:
            try:
                for adapter in await self._adapters.check(card, entry.config, in_file=entry.in_file):
                    self._models.add_adapter(adapter)
            except RequestError as error:
                logger.error("%s: %s", card.name, error.message)

    def _on_message(self, node: str, message: ToGateway) -> None:
        """What a model that has left is known by is kept for as long as its weights are."""
        if isinstance(message, LoadFailed) and self._verification is not None:
            self._verification.suspect(message.model)
        keep_s = self.settings.config.store.host_keep_alive
        if isinstance(message, Reclaimed | Unloaded) and keep_s >= 0:
            asyncio.get_running_loop().call_later(keep_s, self._forget_words, message.model)

    def _forget_words(self, name: str) -> None:
        if not self.service.cluster.is_in_use(name) and self._models.forget_tokenizer(name):
            release_memory()

    def _known(self, name: str) -> str:
        name = self._models.resolve(name)
        if (adapter := self._models.adapter(name)) is not None:
            raise no_change_of(adapter)
        if name not in self._models.arriving():
            self._models.get(name)  # raises ModelNotFound
        return name

    def _check_free(self, names: Iterable[str]) -> None:
        seen: set[str] = set()
        for name in names:
            if name in seen or self._models.is_taken(name):
                raise Conflict(f"the name '{name}' is taken", param="name", code="name_taken")
            seen.add(name)
