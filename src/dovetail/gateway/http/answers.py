"""What both kinds of completions do with a job's deltas: collect them, count usage, put log-probabilities in words."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
from pydantic import BaseModel

from dovetail.gateway.generation_task import Delta, Waits, count_reports
from dovetail.gateway.http.api import ChatRequest, CompletionRequest
from dovetail.gateway.http.replies import (
    CachedTokens,
    ChatLogprobs,
    CompletionDetails,
    Finish,
    PromptLogprob,
    PromptLogprobs,
    TextLogprobs,
    TokenEntry,
    TopLogprob,
    Usage,
)
from dovetail.gateway.http.tiers import ServiceTier, tier_of
from dovetail.gateway.http.waits import wait_times
from dovetail.gateway.text.detokenizer import Vocabulary
from dovetail.types import FinishReason, ServiceClass, TokenLogprob, TokenLogprobs

_MIN_LOGPROB = -9999.0  # JSON has no -inf

TokenReport = tuple[int, TokenLogprobs]  # a token and what was said of it


@dataclass(frozen=True)
class ReplyOptions:
    """What a client wants to see besides the text."""

    with_logprobs: bool = False
    with_usage: bool = False
    with_usage_always: bool = False  # in every chunk, as far as it has come
    with_token_ids: bool = False
    tokens_as_ids: bool = False  # logprobs name tokens by their ids
    with_prompt_logprobs: bool = False
    service_tier: ServiceTier | None = None  # that it has; None: it was not asked for one

    @property
    def is_plain(self) -> bool:
        """Nothing of a chunk but its text depends on the tokens."""
        return not (self.with_logprobs or self.with_usage_always or self.with_token_ids)

    @classmethod
    def of(cls, body: ChatRequest | CompletionRequest, served: ServiceClass) -> ReplyOptions:
        return cls(
            body.wants_logprobs,
            body.includes_usage,
            body.counts_usage_always,
            bool(body.return_token_ids),
            bool(body.return_tokens_as_token_ids),
            body.prompt_logprobs is not None,
            tier_of(body.service_tier, served),
        )


@dataclass
class CollectedChoice:
    """One choice, collected."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenReport] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def num_reports(self) -> int:
        return count_reports(self.logprobs, self.prompt_logprobs)

    def add(self, delta: Delta) -> None:
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.text.append(delta.text)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish = delta.finish
        self.stop_reason = delta.stop_reason


class UsageCount:
    def __init__(self, num_prompt_tokens: int) -> None:
        self._prompt = num_prompt_tokens
        self._completion = 0
        self._cached = 0
        self._proposed = self._accepted = 0
        self.waits: Waits | None = None  # where only the usage can still tell

    def add_prompt(self, num_tokens: int) -> None:
        """Of one more round of the same answer."""
        self._prompt += num_tokens

    def add(self, delta: Delta) -> None:
        self._completion += len(delta.tokens)
        self._cached += delta.cached_tokens
        self._proposed += delta.proposed
        self._accepted += delta.accepted

    def total(self) -> Usage:
        usage = Usage(
            prompt_tokens=self._prompt,
            completion_tokens=self._completion,
            total_tokens=self._prompt + self._completion,
            # Every choice of a prompt reports what it took; together they cannot have saved more than the prompt.
            prompt_tokens_details=CachedTokens(cached_tokens=min(self._cached, self._prompt)),
            completion_tokens_details=CompletionDetails(
                accepted_prediction_tokens=self._accepted,
                rejected_prediction_tokens=self._proposed - self._accepted,
            ),
        )
        if self.waits is not None:
            usage.dovetail = wait_times(self.waits)
        return usage


_ANY_TEXT = "\ue000 any text \ue000"
_ANY_TEXT_JSON = msgspec.json.encode(_ANY_TEXT)


class Frame:
    """A chunk as JSON around a text. Most chunks of a stream differ in nothing else, and building each from records
    takes longer than all the rest of sending it."""

    ANY_TEXT = _ANY_TEXT  # stands for the text in the chunk that the frame is cut from

    def __init__(self, chunk: BaseModel) -> None:
        self._head, self._tail = chunk.model_dump_json(exclude_unset=True).encode().split(_ANY_TEXT_JSON)

    def around(self, text: str) -> bytes:
        return self._head + msgspec.json.encode(text) + self._tail


def finish_of(reason: FinishReason | None) -> Finish | None:
    if reason is None:
        return None
    return "length" if reason is FinishReason.LENGTH else "stop"


class TokenNames:
    """How tokens are called in log-probabilities: by their text, or by number."""

    def __init__(self, vocabulary: Vocabulary, *, as_ids: bool) -> None:
        self._vocabulary = vocabulary
        self._as_ids = as_ids

    def of(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._vocabulary.token_text(token)

    def chat(self, entries: Iterable[TokenReport]) -> ChatLogprobs:
        return ChatLogprobs(content=[self._entry(token, logprobs) for token, logprobs in entries])

    def _entry(self, token: int, logprobs: TokenLogprobs) -> TokenEntry:
        return TokenEntry(
            token=self.of(token),
            logprob=finite(logprobs.chosen),
            bytes=list(self._vocabulary.token_bytes(token)),
            top_logprobs=[self._top(item) for item in logprobs.top],
        )

    def _top(self, item: TokenLogprob) -> TopLogprob:
        return TopLogprob(
            token=self.of(item.token),
            logprob=finite(item.logprob),
            bytes=list(self._vocabulary.token_bytes(item.token)),
        )

    def prompt(self, tokens: Sequence[int], read: Sequence[TokenLogprobs]) -> PromptLogprobs:
        """By token id; the chosen one always among them, with its own rank."""
        return [None, *(self._prompt_entry(*pair) for pair in zip(tokens[1:], read, strict=True))]

    def _prompt_entry(self, token: int, logprobs: TokenLogprobs) -> dict[str, PromptLogprob]:
        ranked = [(top.token, top.logprob, rank) for rank, top in enumerate(logprobs.top, start=1)]
        entries = [(token, logprobs.chosen, logprobs.rank), *ranked]
        return {
            str(id): PromptLogprob(logprob=finite(value), rank=rank, decoded_token=self._vocabulary.token_text(id))
            for id, value, rank in reversed(entries)
        }

    def echo(self, tokens: Sequence[int], read: Sequence[TokenLogprobs], places: Sequence[int]) -> TextLogprobs:
        """A prompt as if it had been written; nothing is known of its first token."""
        rest = self.text(list(zip(tokens[1:], read, strict=True)), places[1:])
        return TextLogprobs(
            tokens=[self.of(tokens[0]), *rest.tokens],
            token_logprobs=[None, *rest.token_logprobs],
            top_logprobs=[None, *rest.top_logprobs],
            text_offset=list(places),
        )

    def text(self, entries: Sequence[TokenReport], places: Sequence[int]) -> TextLogprobs:
        """`places`: where each token begins."""
        return TextLogprobs(
            tokens=[self.of(token) for token, _ in entries],
            token_logprobs=[finite(logprobs.chosen) for _, logprobs in entries],
            top_logprobs=[self._alternatives(token, logprobs) for token, logprobs in entries],
            text_offset=list(places),
        )

    def _alternatives(self, token: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The chosen one, first as vLLM has it and always as OpenAI has it, and the likeliest by their text: it may be
        one more than asked for. Of several halves of a character, which look alike, the likeliest stays."""
        found: dict[str, float] = {}
        for each in (TokenLogprob(token, logprobs.chosen), *logprobs.top):
            name, value = self.of(each.token), finite(each.logprob)
            found[name] = max(found.get(name, value), value)
        return found


def joined(one: TextLogprobs, other: TextLogprobs) -> TextLogprobs:
    return TextLogprobs(
        tokens=one.tokens + other.tokens,
        token_logprobs=one.token_logprobs + other.token_logprobs,
        top_logprobs=one.top_logprobs + other.top_logprobs,
        text_offset=one.text_offset + other.text_offset,
    )


class TextOffsets:
    """Where each token of one choice begins in its text, in characters: the second half of a character begins where
    the first does, and what is hidden has no length."""

    def __init__(self, vocabulary: Vocabulary, *, start: int = 0, skip_special_tokens: bool = True) -> None:
        self._vocabulary = vocabulary
        self._hidden = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = start

    def of_prompt(self, tokens: Sequence[int], num_unseen: int) -> list[int]:
        """Of an echo, which hides no token but the first so many."""
        return [self._place(token, is_hidden=at < num_unseen) for at, token in enumerate(tokens)]

    def of_answer(self, tokens: Iterable[int]) -> list[int]:
        return [self._place(token, is_hidden=token in self._hidden) for token in tokens]

    def _place(self, token: int, *, is_hidden: bool) -> int:
        begin = self._characters
        if not is_hidden:
            self._characters += len(self._utf8.decode(self._vocabulary.token_bytes(token)))
        return begin


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _MIN_LOGPROB
