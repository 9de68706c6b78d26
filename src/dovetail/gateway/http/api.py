"""What a client may ask, as OpenAI's request bodies with the sampling extensions that vLLM has made common.

Types are strict ("0.5" is no number) and limits are enforced here; what depends on the model is checked in
`translate`. What is not listed is `options`' matter: ignored where it is harmless, else a 400.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dovetail.errors import InvalidRequest
from dovetail.gateway.http.bodies import StrictBody, check_json_size
from dovetail.gateway.http.options import check_beams, check_options, ignored_options
from dovetail.gateway.http.sampling import SamplingBody
from dovetail.gateway.text.tools.schema import Tool, ToolChoice

MAX_CHOICES = 128
MAX_PROMPTS = 256
MAX_TOP_LOGPROBS = 20
MAX_BIASED = 1024
_MAX_LIMIT = 2**31 - 1
_UNION_TAGS = {"str", "int", "float", "bool", "list", "dict", "none", "any"}

TokenId = Annotated[int, Field(ge=0, le=_MAX_LIMIT)]
BadWord = Annotated[str, Field(min_length=1, max_length=64)]
ModelName = Annotated[
    str | None, Field(min_length=1, max_length=512, description="may be left out where there is one model only")
]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
FAIL_FAST = Field(fail_fast=True)  # one wrong item is enough: each further one would cost an error of its own


def _check_bias_length(bias: object) -> object:
    """First, because each wrong entry of a long one would cost an error of its own."""
    if isinstance(bias, dict) and len(bias) > MAX_BIASED:
        raise InvalidRequest(f"logit_bias has more than {MAX_BIASED} entries", param="logit_bias", code="invalid_value")
    return bias


LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASED),
    BeforeValidator(_check_bias_length),
]


class StreamOptions(StrictBody):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(default=None, description="usage so far in every chunk")


class JsonSchemaFormat(StrictBody):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(StrictBody):
    """vLLM's name for a constraint on the text; exactly one field is set."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1, max_length=1024)
    grammar: str | None = None
    json_object: bool | None = None


class GenerationBody(SamplingBody):
    """What chat and plain completions share."""

    model_config = ConfigDict(extra="allow")  # to tell of those that are not supported

    model: ModelName = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=_MAX_LIMIT)
    clamp_max_tokens: bool | None = Field(
        default=None,
        description="beyond the context: true = as long as fits, false = a 400; a chat is clamped unless told",
    )
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    logit_bias: LogitBias | None = None
    response_format: ResponseFormat | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        default=None, description="flex = best effort; priority = first, if the key may; the answer says which it was"
    )
    cache_salt: str | None = Field(
        default=None, max_length=256, description="prefixes are shared with requests of the same salt only"
    )
    # Extensions, named as in vLLM.
    min_tokens: int | None = Field(default=None, ge=0, le=_MAX_LIMIT)
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=256)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[TokenId] | None = Field(default=None, min_length=1, max_length=4096)
    bad_words: list[BadWord] | None = Field(default=None, max_length=1024)
    truncate_prompt_tokens: int | None = Field(
        default=None, ge=-1, le=_MAX_LIMIT, description="keep so many; -1 = what fits the context"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="where it is cut; left unless told"
    )
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = Field(default=None, description="in logprobs: token_id:123")
    logprob_token_ids: list[TokenId] | None = Field(
        default=None, max_length=256, description="with logprobs: told of beside the chosen one, not the likeliest"
    )
    priority: int | None = Field(
        default=None, ge=0, le=_MAX_LIMIT, description="above 0 = best effort, as service_tier: flex"
    )
    use_beam_search: bool | None = Field(default=None, description="the n likeliest texts, found with n beams")
    length_penalty: float | None = Field(default=None, ge=-10, le=10, description="of beams: 1 = mean per token")
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = Field(default=None, min_length=1, max_length=1024)
    structured_outputs: StructuredOutputs | None = None
    speculative: bool | None = Field(
        default=None, description="false = tokens are computed one by one; the text is the same"
    )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Options that were accepted and change nothing."""
        return ignored_options(self.model_extra or {})

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def counts_usage_always(self) -> bool:
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @model_validator(mode="after")
    def _check_options(self) -> GenerationBody:
        check_options(self.model_extra or {}, type(self).model_fields)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs come with whole answers, not with streams", param="prompt_logprobs")
        return self

    def check_asked_together(self, *, wants_logprobs: bool) -> None:
        check_beams(self)
        if self.logprob_token_ids and not wants_logprobs:
            raise InvalidRequest("logprob_token_ids needs logprobs", param="logprob_token_ids")


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    type: str
    text: str | None = None


class Message(BaseModel):
    """Fields beyond these reach the chat template as they are (`reasoning_content`, …)."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    # Besides system, developer, user, assistant and tool, some templates know roles of their own.
    role: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    content: str | Annotated[list[ContentPart], FAIL_FAST] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], FAIL_FAST] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text or "" for part in self.content)
        return self.content or ""


class Prediction(StrictBody):
    """What the answer is expected to be like: where it is right, several of its tokens are computed at once."""

    type: Literal["content"]
    content: str | Annotated[list[ContentPart], FAIL_FAST]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text or "" for part in self.content)


class ThinkingOption(StrictBody):
    """As DeepSeek and Anthropic switch thoughts on and off."""

    type: str


class ReasoningOption(StrictBody):
    """As OpenRouter does."""

    effort: str | None = Field(default=None, max_length=32)
    enabled: bool | None = None
    exclude: bool | None = None


class ChatRequest(GenerationBody):
    messages: Annotated[list[Message], FAIL_FAST] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_MAX_LIMIT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Annotated[list[Tool], FAIL_FAST] | None = Field(default=None, max_length=512)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(default=None, description="on unless false")
    include_reasoning: bool | None = Field(default=None, description="on unless false")
    thinking_token_budget: int | None = Field(
        default=None, ge=0, le=_MAX_LIMIT, description="tokens after which the model is made to answer"
    )
    prediction: Prediction | None = None
    documents: Annotated[list[dict[str, Any]], FAIL_FAST] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(default=None, max_length=32, description="for templates that ask for it")
    enable_thinking: bool | None = Field(default=None, description="as in chat_template_kwargs")
    thinking: ThinkingOption | bool | None = Field(default=None, description="type: enabled or disabled")
    reasoning: ReasoningOption | None = None
    echo: bool | None = Field(default=None, description="with a final message of the assistant: its text comes first")
    add_generation_prompt: bool | None = Field(default=None, description="on unless continue_final_message")
    continue_final_message: bool | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)

    @property
    def wants_thoughts(self) -> bool | None:
        """None: as the model's template has it."""
        if isinstance(self.thinking, ThinkingOption):
            said = self.thinking.type != "disabled"
        elif self.thinking is not None:
            said = self.thinking
        elif self.enable_thinking is None and self.reasoning is not None:
            return self.reasoning.enabled
        else:
            return self.enable_thinking
        return said if self.enable_thinking is None else self.enable_thinking

    @property
    def shows_thoughts(self) -> bool:
        return self.include_reasoning is not False and not (self.reasoning and self.reasoning.exclude)

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        self.check_asked_together(wants_logprobs=self.wants_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        return self


Prompt = Annotated[
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), FAIL_FAST]
    | Annotated[list[TokenId], Field(min_length=1), FAIL_FAST]
    | Annotated[
        list[Annotated[list[TokenId], Field(min_length=1), FAIL_FAST]],
        Field(min_length=1, max_length=MAX_PROMPTS),
        FAIL_FAST,
    ],
    # One alternative after the other: no value fits two, and the cleverer way reads a long list twice.
    Field(description="text, token ids, or several of either", union_mode="left_to_right"),
]


class CompletionRequest(GenerationBody):
    prompt: Prompt
    max_tokens: int | None = Field(default=None, ge=0, le=_MAX_LIMIT, description="0 with echo = the prompt alone")
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    suffix: str | None = Field(default=None, description="for models that fill in the middle")
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES, description="choose the n likeliest of so many")

    @property
    def num_prompts(self) -> int:
        return 1 if isinstance(self.prompt, str) or isinstance(self.prompt[0], int) else len(self.prompt)

    @property
    def num_choices(self) -> int:
        return self.best_of or self.num_kept

    @property
    def num_kept(self) -> int:
        return self.n or 1

    @property
    def is_prompt_only(self) -> bool:
        return self.max_tokens == 0

    @property
    def wanted_tokens(self) -> int | None:
        return 1 if self.is_prompt_only else self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def wanted_logprobs(self) -> int | None:
        return 0 if self.logprobs is None and self.num_choices > self.num_kept else self.logprobs

    @property
    def wanted_prompt_logprobs(self) -> int | None:
        """An echo has log-probabilities as the rest of the text has."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)

    @model_validator(mode="after")
    def _check_together(self) -> CompletionRequest:
        self.check_asked_together(wants_logprobs=self.wants_logprobs)
        if self.num_choices < self.num_kept:
            raise InvalidRequest("best_of may not be less than n", param="best_of")
        if self.stream and self.num_choices > self.num_kept:
            raise InvalidRequest("best_of is chosen when all are there, not in a stream", param="best_of")
        if self.is_prompt_only and (not self.echo or self.use_beam_search or self.logprob_token_ids):
            raise InvalidRequest("max_tokens may be 0 with echo only, of the prompt alone", param="max_tokens")
        if self.stream and self.echo and self.wants_logprobs and self.num_choices > 1:
            raise InvalidRequest("a stream of several choices cannot echo logprobs", param="echo")
        if self.suffix and self.echo:
            raise InvalidRequest("suffix and echo exclude each other", param="suffix")
        return self


class TokenizeRequest(StrictBody):
    """Either `prompt` or `messages`."""

    model: ModelName = None
    prompt: str | None = None
    messages: Annotated[list[Message], FAIL_FAST] | None = Field(default=None, min_length=1, max_length=4096)
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = Field(default=None, description="on unless continue_final_message")
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], FAIL_FAST] | None = Field(default=None, max_length=512)
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        return self

    def as_chat(self) -> ChatRequest:
        """The same conversation as a chat would be."""
        assert self.messages is not None
        return ChatRequest(
            model=self.model,
            messages=self.messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class DetokenizeRequest(StrictBody):
    model: ModelName = None
    tokens: Annotated[list[TokenId], FAIL_FAST]


BodyType = TypeVar("BodyType", bound=BaseModel)


def parse_body(kind: type[BodyType], body: bytes) -> BodyType:
    """The one way in: malformed JSON, bad UTF-8, lone surrogates, NaN, endless nesting and more values than any
    request needs end here as a 400."""
    check_json_size(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _invalid(error: ValidationError) -> InvalidRequest:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    if problems[0]["type"] == "json_invalid":
        detail = problems[0]["msg"].removeprefix("Invalid JSON: ")
        return InvalidRequest(f"the body is not valid JSON: {detail}", code="invalid_json")
    param = _param(problems[0]["loc"])
    # Alternatives of one field (text or list) fail together; the client reads one line on it.
    details = dict.fromkeys(p["msg"].removeprefix("Value error, ") for p in problems if _param(p["loc"]) == param)
    return InvalidRequest(f"{param or 'body'}: {'; or '.join(details)}", param=param, code="invalid_value")


def _param(location: tuple[int | str, ...]) -> str | None:
    """`messages[0].role` from pydantic's location, without the names of the alternatives that it tried."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part.islower() and part not in _UNION_TAGS:
            path += f".{part}" if path else part
        else:
            break
    return path or None
