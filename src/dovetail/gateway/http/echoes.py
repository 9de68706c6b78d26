"""Prompts as they come back to a client that asked for an echo."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.gateway.http.api import CompletionRequest
from dovetail.gateway.models import ServedModel
from dovetail.gateway.text.translate import GenerationRequest


@dataclass(frozen=True)
class Echo:
    text: str
    num_unseen: int = 0  # tokens at the beginning that are no part of it, because the tokenizer put them there


async def echoes_of(body: CompletionRequest, job: GenerationRequest) -> list[Echo]:
    """A text as it was sent, ids as all that they stand for, special ones too: the client has named them."""
    if not body.echo:
        return []
    given: Sequence[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if isinstance(given[0], int):
        given = [given]
    is_cut = body.truncate_prompt_tokens is not None
    return [
        await _echo(item, request.prompt, job.model, is_cut=is_cut)
        for item, request in zip(given, job.requests, strict=True)
    ]


async def _echo(given: str | list[int], prompt: tuple[int, ...], model: ServedModel, *, is_cut: bool) -> Echo:
    num_unseen = 0
    if isinstance(given, str):
        vocabulary = model.vocabulary
        is_added = prompt[0] in vocabulary.special_ids and not given.startswith(vocabulary.token_text(prompt[0]))
        num_unseen = int(is_added)
        if not is_cut:
            return Echo(given, num_unseen)
    return Echo(await model.decode(list(prompt[num_unseen:]), skip_special_tokens=False), num_unseen)
