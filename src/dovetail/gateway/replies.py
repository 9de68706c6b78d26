"""What a client gets back, as OpenAI's response bodies, and how a job's deltas become them: whole or in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, Field

from dovetail.gateway.detokenizer import Vocabulary
from dovetail.gateway.run import Delta
from dovetail.gateway.translate import Job
from dovetail.types import FinishReason, TokenLogprob, TokenLogprobs

_MIN_LOGPROB = -9999.0  # JSON has no -inf

Finish = Literal["stop", "length"]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail


class CachedTokens(BaseModel):
    cached_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenEntry]


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish
    stop_reason: str | int | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None


class TextCompletion(BaseModel):
    """A whole completion, and also the shape of each chunk of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None


class ModelInfo(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dovetail"
    max_model_len: int
    root: str = Field(description="the model that answers; differs from `id` for an alias")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelInfo]


class Tokenized(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str


class Status(BaseModel):
    status: str
    config_problem: str | None = Field(default=None, description="why the last configuration was refused")


class Version(BaseModel):
    version: str


class ModelStatus(BaseModel):
    name: str
    state: Literal["loading", "loaded"]
    unfinished: int = Field(description="requests that this server has not finished")
    attainment: float | None = Field(default=None, description="share of requests with targets that met them")
    ttft_p50_s: float | None = None
    tpot_p50_s: float | None = None
    dtype: str | None = None
    weight_bytes: int | None = None
    mapped: bool | None = None
    kv_capacity_tokens: int | None = None
    open_s: float | None = None
    build_s: float | None = None
    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    kv_committed_bytes: int = 0
    preemptions: int = 0
    turns: int = 0
    turn_tokens: int = 0
    turn_seconds: float = 0.0
    overhead_seconds: float = 0.0


class NodeStatus(BaseModel):
    name: str
    device: str
    state: Literal["starting", "up", "down"]
    pid: int | None
    starts: int
    import_s: float | None
    resident_bytes: int | None
    memory_budget_bytes: int = 0  # for weights and KV pools
    memory_planned_bytes: int = 0  # of it, taken or about to be
    resizes: int = 0
    resize_seconds: float = 0.0
    refused: int = 0  # requests whose targets could not be kept
    overhead_p50_s: float = 0.0  # between iterations, while there was work
    overhead_p99_s: float = 0.0
    models: list[ModelStatus]


class ServerStatus(BaseModel):
    version: str
    draining: bool
    unfinished: int
    nodes: list[NodeStatus]


@dataclass
class Answer:
    """One choice, collected."""

    text: list[str] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.logprobs += delta.logprobs
        self.finish = delta.finish
        self.stop_reason = delta.stop_reason


class UsageCount:
    def __init__(self, num_prompt_tokens: int) -> None:
        self._prompt = num_prompt_tokens
        self._completion = 0
        self._cached = 0

    def add(self, delta: Delta) -> None:
        self._completion += delta.num_tokens
        self._cached += delta.cached_tokens

    def total(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt,
            completion_tokens=self._completion,
            total_tokens=self._prompt + self._completion,
            # Every choice of a prompt reports what it took; together they cannot have saved more than the prompt.
            prompt_tokens_details=CachedTokens(cached_tokens=min(self._cached, self._prompt)),
        )


class ChatReply:
    """Speaks chat completions for one job."""

    def __init__(self, job: Job, created: int, *, with_logprobs: bool, with_usage: bool) -> None:
        self._job = job
        self._created = created
        self._with_logprobs = with_logprobs
        self._with_usage = with_usage
        self._opened: set[int] = set()

    def chunk(self, delta: Delta) -> str:
        fields = ChatDelta(content=delta.text)
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            fields = ChatDelta(role="assistant", content=delta.text)
        choice = ChatChunkChoice(
            index=delta.index,
            delta=fields,
            logprobs=self._logprobs(delta.logprobs),
            finish_reason=_finish(delta.finish),
        )
        if delta.stop_reason is not None:
            choice.stop_reason = delta.stop_reason
        return self._dump([choice], None)

    def usage_chunk(self, usage: Usage) -> str:
        return self._dump([], usage)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> str:
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(role="assistant", content="".join(answer.text)),
                logprobs=self._logprobs(answer.logprobs),
                finish_reason=_finish(answer.finish) or "stop",
                stop_reason=answer.stop_reason,
            )
            for index, answer in enumerate(answers)
        ]
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._job.model.name,
            choices=choices,
            usage=usage,
        ).model_dump_json()

    @property
    def _id(self) -> str:
        return f"chatcmpl-{self._job.id}"

    def _dump(self, choices: list[ChatChunkChoice], usage: Usage | None) -> str:
        chunk = ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._job.model.name,
            choices=choices,
        )
        if self._with_usage:
            chunk.usage = usage
        return chunk.model_dump_json(exclude_unset=True)

    def _logprobs(self, entries: Iterable[tuple[int, TokenLogprobs]]) -> ChatLogprobs | None:
        if not self._with_logprobs:
            return None
        vocabulary = self._job.model.vocabulary
        return ChatLogprobs(content=[_entry(vocabulary, token, logprobs) for token, logprobs in entries])


class TextReply:
    """Speaks plain completions for one job. `echoes` are the prompts as text, where the client wants them back."""

    def __init__(
        self, job: Job, created: int, *, with_logprobs: bool, with_usage: bool, echoes: Sequence[str] = ()
    ) -> None:
        self._job = job
        self._created = created
        self._with_logprobs = with_logprobs
        self._with_usage = with_usage
        self._echoes = echoes
        self._offsets: dict[int, int] = {}  # characters already given, by choice
        self._opened: set[int] = set()

    def chunk(self, delta: Delta) -> str:
        text = delta.text
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            text = self._echo(delta.index) + text
        choice = TextChoice(
            index=delta.index,
            text=text,
            logprobs=self._logprobs(delta.index, delta.logprobs),
            finish_reason=_finish(delta.finish),
        )
        if delta.stop_reason is not None:
            choice.stop_reason = delta.stop_reason
        return self._dump([choice], None)

    def usage_chunk(self, usage: Usage) -> str:
        return self._dump([], usage)

    def whole(self, answers: Sequence[Answer], usage: Usage) -> str:
        choices = [
            TextChoice(
                index=index,
                text=self._echo(index) + "".join(answer.text),
                logprobs=self._logprobs(index, answer.logprobs),
                finish_reason=_finish(answer.finish) or "stop",
                stop_reason=answer.stop_reason,
            )
            for index, answer in enumerate(answers)
        ]
        return self._body(choices, usage).model_dump_json()

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._job.requests[0].num_choices] if self._echoes else ""

    def _dump(self, choices: list[TextChoice], usage: Usage | None) -> str:
        body = self._body(choices, usage)
        if not self._with_usage:
            body.model_fields_set.discard("usage")
        return body.model_dump_json(exclude_unset=True)

    def _body(self, choices: list[TextChoice], usage: Usage | None) -> TextCompletion:
        return TextCompletion(
            id=f"cmpl-{self._job.id}",
            object="text_completion",
            created=self._created,
            model=self._job.model.name,
            choices=choices,
            usage=usage,
        )

    def _logprobs(self, index: int, entries: Sequence[tuple[int, TokenLogprobs]]) -> TextLogprobs | None:
        if not self._with_logprobs:
            return None
        vocabulary = self._job.model.vocabulary
        tokens = [vocabulary.token_text(token) for token, _ in entries]
        offset, offsets = self._offsets.get(index, 0), []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return TextLogprobs(
            tokens=tokens,
            token_logprobs=[_finite(logprobs.chosen) for _, logprobs in entries],
            top_logprobs=[_alternatives(vocabulary, token, logprobs) for token, logprobs in entries],
            text_offset=offsets,
        )


Reply = ChatReply | TextReply


def _finish(reason: FinishReason | None) -> Finish | None:
    if reason is None:
        return None
    return "length" if reason is FinishReason.LENGTH else "stop"


def _entry(vocabulary: Vocabulary, token: int, logprobs: TokenLogprobs) -> TokenEntry:
    top = [
        TopLogprob(
            token=vocabulary.token_text(item.token),
            logprob=_finite(item.logprob),
            bytes=list(vocabulary.token_bytes(item.token)),
        )
        for item in logprobs.top
    ]
    return TokenEntry(
        token=vocabulary.token_text(token),
        logprob=_finite(logprobs.chosen),
        bytes=list(vocabulary.token_bytes(token)),
        top_logprobs=top,
    )


def _alternatives(vocabulary: Vocabulary, token: int, logprobs: TokenLogprobs) -> dict[str, float]:
    """The likeliest by their text and, as OpenAI has it, always the chosen one: it may be one more than asked for.
    Of several halves of a character, which look alike, the likeliest stays."""
    found: dict[str, float] = {}
    for top in (*logprobs.top, TokenLogprob(token, logprobs.chosen)):
        found.setdefault(vocabulary.token_text(top.token), _finite(top.logprob))
    return found


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _MIN_LOGPROB
