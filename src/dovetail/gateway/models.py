"""The models on offer: their cards, and per model the tokenizer and the chat template, each made once.

Where cards come from is the catalogue's matter, which is handed in; where weights are loaded is the link's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Never, Protocol, TypeVar

from dovetail.config import ModelConfig
from dovetail.errors import CheckpointError, EngineFailed, InvalidRequest, ModelNotFound, Overloaded
from dovetail.gateway.admin.pulls import Pull
from dovetail.gateway.text.chat import TemplateFacts
from dovetail.gateway.text.detokenizer import Vocabulary
from dovetail.gateway.text.fair_executor import TextExecutors
from dovetail.gateway.text.tokenizer_bundle import QUICK_SIZE, TokenizerBundle, open_tokenizer, text_size
from dovetail.gateway.text.tokenizer_errors import tokenizer_call
from dovetail.types import AdapterRef, ModelCard

Result = TypeVar("Result")


class Catalogue(Protocol):
    """What the gateway needs of `store.Catalogue`."""

    def cards(self) -> list[ModelCard]: ...

    def get(self, name: str) -> ModelCard:
        """Raises ModelNotFound."""


class FixedCatalogue:
    """Exactly these models: what `serve` was told by name."""

    def __init__(self, cards: list[ModelCard]) -> None:
        self._cards = {card.name: card for card in cards}

    def cards(self) -> list[ModelCard]:
        return list(self._cards.values())

    def get(self, name: str) -> ModelCard:
        if name not in self._cards:
            known = ", ".join(self._cards)
            raise ModelNotFound(
                f"model {name[:200]!r} not found; there are {known}", param="model", code="model_not_found"
            )
        return self._cards[name]


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter on offer, as a model of its own name."""

    base: str  # name of the model that it is for
    ref: AdapterRef
    source: str  # as it was asked for
    created: int  # Unix seconds, when it was
    in_file: bool = False  # named by the configuration file, which may take it back

    @property
    def name(self) -> str:
        return self.ref.name


class ServedModel:
    """One model as the gateway knows it, or a model with an adapter."""

    def __init__(
        self,
        card: ModelCard,
        config: ModelConfig,
        executors: TextExecutors,
        adapter: NamedAdapter | None = None,
        base: ServedModel | None = None,
    ) -> None:
        self.card = card
        self.config = config
        self.executors = executors
        self.adapter = adapter  # on top of `base`, whose card and tokenizer these are
        self._base = base

    @property
    def name(self) -> str:
        """What clients call it, and what is counted under it."""
        return self.card.name if self.adapter is None else self.adapter.name

    @property
    def host(self) -> str:
        """What nodes know it by: requests of a model and of its adapters are computed together."""
        return self.card.name

    @property
    def adapter_ref(self) -> AdapterRef | None:
        return None if self.adapter is None else self.adapter.ref

    @cached_property
    def tokenizer(self) -> TokenizerBundle:
        if self._base is not None:
            return self._base.tokenizer
        with tokenizer_call(f"the tokenizer of '{self.name}' cannot be read"):
            return open_tokenizer(Path(self.card.tokenizer_file), self.card.tokenizer_digest)

    @property
    def vocabulary(self) -> Vocabulary:
        return self.tokenizer.vocabulary

    @cached_property
    def template(self) -> TemplateFacts:
        return TemplateFacts(self.card)

    def require_text(self) -> None:
        """Raises InvalidRequest where the model says nothing."""
        if self.card.spec.encoder is not None:
            raise InvalidRequest(
                f"model '{self.name}' is an encoder, which makes vectors and no text: ask /v1/embeddings", param="model"
            )

    async def prepare(self) -> None:
        """Read the tokenizer without stopping the event loop."""
        if "tokenizer" not in self.__dict__:
            await asyncio.to_thread(lambda: self.tokenizer)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return (await self._encode([text], add_special_tokens))[0]

    async def encode_prompt(self, text: str) -> list[int]:
        """A plain completion prompt, with the tokens that the model expects before any text."""
        return self._with_bos(await self.encode(text, add_special_tokens=True))

    async def encode_pair(self, first: str, second: str) -> list[int]:
        """Two texts that are read together, with the tokens that the model expects around and between them."""
        return await self._ask(len(first) + len(second), lambda: self.tokenizer.encode_pair(first, second))

    async def encode_all(self, texts: Sequence[str], *, as_prompts: bool) -> list[list[int]]:
        """Of many texts, in one piece of work, however short each is."""
        tokens = await self._encode(texts, as_prompts)
        return [self._with_bos(each) for each in tokens] if as_prompts else tokens

    def _with_bos(self, tokens: list[int]) -> list[int]:
        bos = self._bos
        return [bos, *tokens] if bos is not None and tokens[:1] != [bos] else tokens

    @cached_property
    def _bos(self) -> int | None:
        wanted = self.card.bos_token if self.card.add_bos else None
        return self.tokenizer.table.token_to_id(wanted) if wanted else None

    async def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return await self._ask(
            len(tokens), lambda: self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        )

    async def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        def work() -> Awaitable[list[list[int]]]:
            return self.tokenizer.encode(texts, add_special_tokens=add_special_tokens)

        return await self._ask(text_size(texts), work)

    async def _ask(self, size: int, work: Callable[[], Awaitable[Result]]) -> Result:
        """The tokenizer's process; clients take turns with what is not quick."""

        async def call() -> Result:
            with tokenizer_call(f"the tokenizer of '{self.name}' failed"):
                return await work()

        return await (call() if size <= QUICK_SIZE else self.executors.run(size, call))


@dataclass(frozen=True)
class ConfiguredModels:
    """What a configuration asks for, as far as it is there: models with their settings, and what is still missing."""

    catalogue: Catalogue
    configs: Mapping[str, ModelConfig]
    preload: tuple[str, ...] = ()  # loaded before the server says that it is ready
    missing: tuple[str, ...] = ()  # to be pulled
    adapters: tuple[NamedAdapter, ...] = ()  # of models that are there

    @property
    def names(self) -> tuple[str, ...]:
        return (*(card.name for card in self.catalogue.cards()), *self.missing)


@dataclass
class AddedModel:
    """A model that joined while the server runs. Without a card it is still being pulled, or could not be; with one
    it can be served, perhaps while the rest of it is pulled."""

    config: ModelConfig
    card: ModelCard | None
    in_file: bool  # named by the configuration file, which may take it back
    pull: Pull | None = None
    is_settled: asyncio.Event = field(default_factory=asyncio.Event)  # it can be asked for, or could not be pulled


class Models:
    """Looks models up by name or alias. The catalogue is what the server started with (all of the store, or what was
    named); entries are what joined since; hidden is what was removed since. Config: the file's, then what was changed
    through the API, which lasts until the file is read again."""

    def __init__(
        self,
        catalogue: Catalogue,
        configs: Mapping[str, ModelConfig] | None = None,
        adapters: Iterable[NamedAdapter] = (),
    ) -> None:
        self.executors = TextExecutors()
        self._adapters = {adapter.name: adapter for adapter in adapters}
        self._catalogue = catalogue
        self._configs = dict(configs or {})
        self._entries: dict[str, AddedModel] = {}
        self._hidden: set[str] = set()
        self._served: dict[str, ServedModel] = {}
        self._aliases: dict[str, str] = {}
        self._collect_aliases()

    async def choose(self, name: str | None) -> ServedModel:
        """The one that a request names; where it names none, the only one that there is."""
        if name is not None:
            return self.get(name)
        known = await asyncio.to_thread(self.all)
        if len(known) != 1:
            raise InvalidRequest("there are several models: say which, in model", param="model")
        return known[0]

    def get(self, name: str) -> ServedModel:
        name = self.resolve(name)
        if name in self._adapters:
            return self._adapted(self._adapters[name])
        card = self._card(name)
        config = self.config_of(card.name, card)
        served = self._served.get(card.name)
        if served is None or served.card != card:  # pulled again since
            served = self._served[card.name] = ServedModel(card, config, self.executors)
        served.config = config
        return served

    def _adapted(self, adapter: NamedAdapter) -> ServedModel:
        base = self.get(adapter.base)
        config = base.config.model_copy(update={"aliases": (), "adapters": {}})
        served = self._served.get(adapter.name)
        if served is None or served.card != base.card or served.adapter != adapter:
            served = self._served[adapter.name] = ServedModel(base.card, config, self.executors, adapter, base)
        served.config = config
        return served

    def forget_tokenizer(self, name: str) -> bool:
        """Until somebody asks for the model, or an adapter of it, again. False if it had none."""
        for served in self._served.values():
            if served.adapter is not None and served.host == name:
                served.__dict__.pop("tokenizer", None)
        served_model = self._served.get(name)
        return served_model is not None and served_model.__dict__.pop("tokenizer", None) is not None

    def all(self) -> list[ServedModel]:
        """Those that can be asked for."""
        added = [name for name, entry in list(self._entries.items()) if entry.card is not None]
        try:
            offered = [card.name for card in self._catalogue.cards()]
        except OSError as error:
            raise EngineFailed(f"the store cannot be read: {error}", code="store_unavailable") from error
        found = []
        for name in (*added, *filter(self._is_plain, offered), *self._adapters):
            with suppress(ModelNotFound):  # deleted this very moment
                found.append(self.get(name))
        return found

    def arriving(self) -> dict[str, AddedModel]:
        """Those that are not there yet."""
        return {name: entry for name, entry in self._entries.items() if entry.card is None}

    def pull_of(self, name: str) -> Pull | None:
        """Of a model that can be asked for already, and is still being pulled."""
        entry = self._entries.get(name)
        return entry.pull if entry is not None and entry.pull is not None and not entry.pull.is_over else None

    def resolve(self, name: str) -> str:
        """The name behind an alias."""
        return self._aliases.get(name, name)

    def config_of(self, name: str, card: ModelCard | None = None) -> ModelConfig:
        entry = self._entries.get(name)
        if entry is not None:
            return entry.config
        return self._configs.get(name) or ModelConfig(source=card.source if card is not None else name)

    def is_taken(self, name: str) -> bool:
        """By a model, or as an alias of one."""
        entry = self._entries.get(name)
        if entry is not None and entry.pull is not None and entry.pull.error is not None:
            return False  # it never came; whoever tries again may have the name
        if self.resolve(name) != name or entry is not None or name in self._adapters:
            return True
        try:
            self._card(name)
        except ModelNotFound:
            return False
        except EngineFailed:
            return True
        return True

    def adapter(self, name: str) -> NamedAdapter | None:
        return self._adapters.get(name)

    def adapters_of(self, base: str) -> list[NamedAdapter]:
        return [adapter for adapter in self._adapters.values() if adapter.base == base]

    # Changes while the server runs

    def add_adapter(self, adapter: NamedAdapter) -> None:
        """Another one of the same name gives way."""
        self._adapters[adapter.name] = adapter

    def remove_adapter(self, name: str) -> NamedAdapter:
        self._served.pop(name, None)
        return self._adapters.pop(name)

    def add(self, name: str, entry: AddedModel) -> None:
        self._entries[name] = entry
        self._hidden.discard(name)
        self._collect_aliases()

    def configure(self, name: str, config: ModelConfig) -> None:
        if name in self._entries:
            self._entries[name].config = config
        else:
            self._configs[name] = config
        if name in self._served:
            self._served[name].config = config
        self._collect_aliases()

    def remove(self, name: str) -> None:
        self._entries.pop(name, None)
        self._configs.pop(name, None)
        self._served.pop(name, None)
        for adapter in self.adapters_of(name):
            self.remove_adapter(adapter.name)
        self._hidden.add(name)
        self._collect_aliases()

    def replace(
        self, catalogue: Catalogue, configs: Mapping[str, ModelConfig], adapters: Iterable[NamedAdapter] = ()
    ) -> list[NamedAdapter]:
        """What the configuration file says now. What joined through the API stays, unless the file names it too.
        Returns the adapters that went."""
        before = list(self._adapters.values())
        kept = {adapter.name: adapter for adapter in before if not adapter.in_file}
        self._adapters = kept | {adapter.name: self._as_before(adapter) for adapter in adapters}
        self._catalogue = catalogue
        self._configs = dict(configs)
        self._entries = {
            name: entry for name, entry in self._entries.items() if not entry.in_file and name not in configs
        }
        self._hidden -= set(configs)
        self._collect_aliases()
        there = {adapter.ref for adapter in self._adapters.values()}
        return [adapter for adapter in before if adapter.ref not in there]

    def _as_before(self, adapter: NamedAdapter) -> NamedAdapter:
        """With the time at which it came, where it has not changed."""
        before = self._adapters.get(adapter.name)
        is_same = before is not None and replace(adapter, created=before.created) == before
        return before if before is not None and is_same else adapter

    def _collect_aliases(self) -> None:
        configs = {name: config for name, config in self._configs.items() if self._is_plain(name)}
        configs |= {name: entry.config for name, entry in self._entries.items()}
        self._aliases = {alias: name for name, config in configs.items() for alias in config.aliases}

    def _is_plain(self, name: str) -> bool:
        """In the catalogue, neither removed nor replaced."""
        return name not in self._hidden and name not in self._entries

    def _card(self, name: str) -> ModelCard:
        entry = self._entries.get(name)
        if entry is not None:
            return entry.card or _not_there_yet(name, entry.pull)
        try:
            if name in self._hidden:
                raise ModelNotFound(f"model {name!r} was removed", param="model", code="model_not_found")
            return self._catalogue.get(name)
        except InvalidRequest as error:  # a name that no model can have is the name of none
            raise ModelNotFound(f"model {name[:200]!r} not found", param="model", code="model_not_found") from error
        except ModelNotFound as error:
            if name not in self._served or name in self._hidden:
                raise
            path = self._served[name].card.path  # it was there: say where it should be
            if Path(path).exists():  # the file does not name it any more
                raise
            raise ModelNotFound(
                f"model {name!r} is no longer in the store: {path} is gone", param="model", code="model_not_found"
            ) from error
        except (CheckpointError, OSError) as error:
            raise EngineFailed(f"model {name!r} cannot be used: {error}", code="store_unavailable") from error


def _not_there_yet(name: str, pull: Pull | None) -> Never:
    if pull is not None and pull.error is not None:
        raise EngineFailed(f"model {name!r} could not be pulled: {pull.error}", code="pull_failed")
    progress = f" ({pull.describe()})" if pull is not None else ""
    raise Overloaded(f"model {name!r} is being pulled{progress}", code="model_pulling", retry_after_s=5)
