"""The models on offer: their cards, and per model the tokenizer, vocabulary and chat template, each made once.

Where cards come from is the catalogue's matter, which is handed in; where weights are loaded is the link's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from dovetail.config import ModelConfig
from dovetail.errors import CheckpointError, EngineFailed, InvalidRequest, ModelNotFound
from dovetail.gateway.chat import ChatTemplate
from dovetail.gateway.detokenizer import Vocabulary
from dovetail.types import ModelCard

# Shorter texts take less time to tokenise than a thread takes to start on them.
_INLINE_CHARS = 4096


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


class ServedModel:
    """One model as the gateway knows it."""

    def __init__(self, card: ModelCard, config: ModelConfig) -> None:
        self.card = card
        self.config = config

    @property
    def name(self) -> str:
        return self.card.name

    @cached_property
    def tokenizer(self) -> Tokenizer:
        try:
            tokenizer = Tokenizer.from_buffer(Path(self.card.tokenizer_file).read_bytes())
        except (OSError, ValueError) as error:
            raise EngineFailed(f"the tokenizer of '{self.name}' cannot be read: {error}") from error
        # Files of trained models may carry both; a server must see every token and add none.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokenizer)

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.card)

    @cached_property
    def max_token_chars(self) -> int:
        """No token stands for more characters, so that a text of more than this times the context cannot fit."""
        return max((len(token) for token in self.tokenizer.get_vocab()), default=1)

    async def prepare(self) -> None:
        """Read the tokenizer without stopping the event loop."""
        if "vocabulary" not in self.__dict__:
            await asyncio.to_thread(lambda: (self.vocabulary, self.max_token_chars))

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) <= _INLINE_CHARS:
            return self._encode(text, add_special_tokens)
        return await asyncio.to_thread(self._encode, text, add_special_tokens)

    async def encode_prompt(self, text: str) -> list[int]:
        """A plain completion prompt, with the tokens that the model expects before any text."""
        tokens = await self.encode(text, add_special_tokens=True)
        bos = self.tokenizer.token_to_id(self.card.bos_token) if self.card.add_bos and self.card.bos_token else None
        return [bos, *tokens] if bos is not None and tokens[:1] != [bos] else tokens

    async def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        if len(tokens) <= _INLINE_CHARS:
            return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        decoded = await asyncio.to_thread(
            self.tokenizer.decode_batch, [tokens], skip_special_tokens=skip_special_tokens
        )
        return decoded[0]

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # `encode` keeps the interpreter locked while it runs, `encode_batch` does not.
        return self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids


class Models:
    """Looks models up by name or alias; a model that joins the catalogue later is found."""

    def __init__(self, catalogue: Catalogue, configs: Mapping[str, ModelConfig] | None = None) -> None:
        self._catalogue = catalogue
        self._configs = dict(configs or {})
        self._names = {alias: name for name, config in self._configs.items() for alias in config.aliases}
        self._served: dict[str, ServedModel] = {}

    def get(self, name: str) -> ServedModel:
        card = self._card(self._names.get(name, name))
        served = self._served.get(card.name)
        if served is None or served.card != card:  # pulled again since
            config = self._configs.get(card.name, ModelConfig(source=card.source))
            served = self._served[card.name] = ServedModel(card, config)
        return served

    def _card(self, name: str) -> ModelCard:
        try:
            return self._catalogue.get(name)
        except InvalidRequest as error:  # a name that no model can have is the name of none
            raise ModelNotFound(f"model {name[:200]!r} not found", param="model", code="model_not_found") from error
        except CheckpointError as error:
            raise EngineFailed(f"model {name!r} cannot be used: {error}") from error

    def all(self) -> list[ServedModel]:
        return [self.get(card.name) for card in self._catalogue.cards()]
