"""Draft models: whether one model can propose tokens for another, and which one does."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import cache
from pathlib import Path

from dovetail.errors import InvalidRequest, RequestError
from dovetail.gateway.models import Models, ServedModel
from dovetail.gateway.text.tokenizer_bundle import open_tokenizer
from dovetail.gateway.text.tokenizer_errors import tokenizer_call
from dovetail.types import ModelCard

logger = logging.getLogger("dovetail.gateway")


def draft_problem(card: ModelCard, draft: ModelCard) -> str:
    """Why `draft` cannot propose tokens for the model of `card`; empty = it can. Reads both tokenizers if they are not
    the same file. Raises EngineFailed for one that cannot be read."""
    if card.spec.encoder is not None:
        return "an encoder says nothing that could be drafted"
    if draft.spec.encoder is not None:
        return f"{draft.name!r} is an encoder, which proposes no tokens"
    if draft.path == card.path:
        return f"{draft.name!r} is the same model; a draft is a smaller one of the same vocabulary"
    if card.tokenizer_digest and card.tokenizer_digest == draft.tokenizer_digest:
        return ""
    if _vocabulary(card.tokenizer_file, card.tokenizer_digest) != _vocabulary(
        draft.tokenizer_file, draft.tokenizer_digest
    ):
        return f"{draft.name!r} has another vocabulary: its tokens mean something else"
    return ""


@cache
def _vocabulary(file: str, digest: str) -> bytes:
    """Of the file with that digest: the same for those whose tokens mean the same."""
    with tokenizer_call(f"{file} cannot be read"):
        return open_tokenizer(Path(file), digest).table.digest


class DraftModels:
    """Those of the models on offer, as they are now."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._told: dict[str, str] = {}  # by model: the problem that was told of last
        self._compared: set[tuple[str, str]] = set()  # digests of tokenizers

    async def prepare(self, model: ServedModel) -> None:
        """Have the tokenizers compared by a thread, before `of` does so on the event loop."""
        name = model.config.speculative.draft
        if name is None or model.config.speculative.mode == "off":
            return
        with suppress(RequestError):
            digests = model.card.tokenizer_digest, self._models.get(name).card.tokenizer_digest
            if digests not in self._compared:
                await asyncio.to_thread(self.of, model)
                self._compared.add(digests)

    def of(self, model: ServedModel) -> ModelCard | None:
        """None also where there is a problem with it, which is told once: the model answers without."""
        name = model.config.speculative.draft
        if name is None or model.config.speculative.mode == "off":
            return None
        draft, problem = None, ""
        try:
            draft = self._models.get(name).card
            problem = draft_problem(model.card, draft)
        except RequestError as error:  # removed since, or not pulled yet
            problem = error.message
        if problem and self._told.get(model.host) != problem:
            logger.warning("%s answers without its draft model: %s", model.host, problem)
        self._told[model.host] = problem
        return None if problem else draft

    def check(self, name: str, card: ModelCard | None, draft: str | None) -> None:
        """Before a model is configured so. Raises InvalidRequest."""
        if draft is None:
            return
        met = [name]
        while draft is not None:
            draft = self._models.resolve(draft)
            if draft == name:
                circle = f"the drafts go round in a circle: {' -> '.join([*met, name])}" if met[1:] else "it is itself"
                raise InvalidRequest(f"speculative.draft: {circle}", param="speculative")
            met.append(draft)
            draft = self._models.config_of(draft).speculative.draft if draft not in met[:-1] else None
        try:
            drafting = self._models.get(met[1])
        except RequestError as error:
            raise InvalidRequest(f"speculative.draft: {error.message}", param="speculative") from error
        problem = draft_problem(card, drafting.card) if card is not None else ""
        if problem:
            raise InvalidRequest(f"speculative.draft: {problem}", param="speculative")
