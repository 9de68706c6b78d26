"""What a client gets back, as OpenAI's response bodies. How deltas become them is `chat_reply`'s and `text_reply`'s."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from dovetail.gateway.http.tiers import ServiceTier

Finish = Literal["stop", "length", "tool_calls"]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail


class CachedTokens(BaseModel):
    cached_tokens: int = 0


class CompletionDetails(BaseModel):
    """Of tokens that were proposed before they were computed, by a `prediction` or from the text itself."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class WaitTimes(BaseModel):
    """Before the first token, in milliseconds."""

    queue_ms: float
    load_ms: float
    first_token_ms: float


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails
    dovetail: WaitTimes | None = Field(
        default=None, description="what a held stream waited for, which its headers could not say any more"
    )


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenEntry]


class CalledFunction(BaseModel):
    name: str | None = Field(default=None, description="in the first piece of a streamed call")
    arguments: str = Field(description="JSON text")


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallDelta(BaseModel):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; null for the first token


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="the same, as newer clients call it")
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: ServiceTier | None = Field(default=None, description="of a request that names one: what it had")
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    warnings: list[str] | None = Field(default=None, description="what was asked for and done otherwise")


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="the same, as newer clients call it")
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    service_tier: ServiceTier | None = None
    prompt_token_ids: list[int] | None = None
    warnings: list[str] | None = Field(default=None, description="in the first chunk")


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None] = Field(description="null for the first token of an echoed prompt")
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class TextCompletion(BaseModel):
    """A whole completion, and also the shape of each chunk of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    service_tier: ServiceTier | None = None
    warnings: list[str] | None = Field(default=None, description="what was asked for and done otherwise")


class ModelInfo(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "dovetail"
    max_model_len: int
    root: str = Field(description="the model that answers; differs from `id` for an alias")
    parent: str | None = Field(default=None, description="of an adapter: the model that it is for")
    default_sampling_params: dict[str, float] = Field(description="what its authors recommend, used unless told")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelInfo]


class Tokenized(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class TokenizerInfo(BaseModel):
    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    added_tokens_decoder: dict[str, str]
    knows_tools: bool = Field(description="its template takes tools; others are told of them in a message")
    tool_format: str | None = None


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
    arrived_bytes: int = Field(default=0, description="of one that is loading, of total_bytes")
    total_bytes: int = 0
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


NodeCondition = Literal["starting", "up", "down", "failed", "draining", "drained"]


class NodeStatus(BaseModel):
    name: str
    device: str
    state: NodeCondition
    problem: str | None = None  # of a failed one: why it is not started again
    pid: int | None
    starts: int
    import_s: float | None
    resident_bytes: int | None
    memory_budget_bytes: int = 0  # for weights and KV pools
    memory_planned_bytes: int = 0  # of it, taken or about to be
    resizes: int = 0
    resize_seconds: float = 0.0
    overhead_p50_s: float = 0.0  # between iterations, while there was work
    overhead_p99_s: float = 0.0
    models: list[ModelStatus]


class LoadedModel(BaseModel):
    """As Ollama's clients read it on this path."""

    name: str
    model: str
    size: int
    size_vram: int
    digest: str = ""
    expires_at: str | None = None
    details: dict[str, str] = Field(default_factory=dict)


class ServerStatus(BaseModel):
    version: str
    draining: bool
    unfinished: int
    refused: int = 0  # requests whose targets could not be kept
    unanswered: int = 0  # questions to nodes that were not answered in time
    nodes: list[NodeStatus]
    models: list[LoadedModel] = Field(default_factory=list, description="those in memory, for Ollama's clients")
