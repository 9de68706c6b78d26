"""What a client may ask of `/v1/responses`, and the chat that it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dovetail.errors import InvalidRequest
from dovetail.gateway.http.api import ChatRequest, JsonSchemaFormat, Message, ModelName, ResponseFormat
from dovetail.gateway.http.bodies import StrictBody
from dovetail.gateway.http.options import HARMLESS, UNSUPPORTED, check_known, check_options
from dovetail.gateway.http.responses.compaction import ASK, MAX_TOKENS, summary_of
from dovetail.gateway.http.responses.tools import ResponsesTool, ToolChoiceItem, ToolSet, custom_arguments, qualified
from dovetail.gateway.http.sampling import SamplingBody

_MAX_LIMIT = 2**31 - 1
# What `check_options` does not need to say: who asks, and hints that only save time.
_SILENT = HARMLESS | {"client_metadata", "include_obfuscation"}
# Of tools that OpenAI runs: what they did is in the answer that followed.
_HOSTED_ITEMS = frozenset(
    {
        "web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call", "computer_call",
        "computer_call_output", "mcp_approval_request", "mcp_approval_response",
        "tool_search_call", "tool_search_output", "context_compaction",
    }
)  # fmt: skip
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal")


class TextFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(StrictBody):
    format: TextFormat | None = None


class ReasoningOptions(StrictBody):
    effort: str | None = None


class Item(BaseModel):
    """One thing of the conversation: a message, a call, its result, thoughts."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    type: str | None = None
    role: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = Field(default=None, description="of a call of a custom tool")
    id: str | None = None
    server_label: str | None = Field(default=None, description="of a call that an MCP server answered")
    error: Any = None
    encrypted_content: str | None = Field(default=None, description="of a compaction: what it came to")
    output: str | list[dict[str, Any]] | None = None


class ConversationName(StrictBody):
    id: str = Field(max_length=128)


class ResponsesRequest(SamplingBody):
    model_config = ConfigDict(extra="allow")

    model: ModelName = None
    input: str | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=128)
    store: bool | None = Field(default=None, description="on unless false; kept in the server's memory")
    stream: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=_MAX_LIMIT)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[ResponsesTool] | None = Field(default=None, max_length=512)
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceItem | None = None
    max_tool_calls: int | None = Field(default=None, ge=0, le=_MAX_LIMIT, description="of tools that the server runs")
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    background: bool | None = None
    conversation: str | ConversationName | None = None
    stream_options: dict[str, Any] | None = None
    # Of the chat's extensions.
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0, le=_MAX_LIMIT)
    priority: int | None = Field(default=None, ge=0, le=_MAX_LIMIT)

    @model_validator(mode="after")
    def _check_together(self) -> ResponsesRequest:
        extra = self.model_extra or {}
        check_options({name: extra[name] for name in UNSUPPORTED.keys() & extra.keys()}, type(self).model_fields)
        check_known(extra, type(self).model_fields)
        if self.conversation is not None and self.previous_response_id is not None:
            raise InvalidRequest("conversation and previous_response_id exclude each other", param="conversation")
        if self.background and self.store is False:
            raise InvalidRequest("background can only be used when `store` is true", param="background")
        if self.background and self.stream:
            raise InvalidRequest("background and stream exclude each other", param="background")
        return self

    @property
    def items(self) -> list[Item]:
        return [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation

    @cached_property
    def tool_set(self) -> ToolSet:
        return ToolSet.of(self.tools)

    def changed(self, **changes: Any) -> ResponsesRequest:
        copy = self.model_copy(update=changes)
        copy.__dict__.pop("tool_set", None)  # of the tools that it had
        return copy

    def warnings(self) -> tuple[str, ...]:
        """What was asked for and is not done."""
        extra = {key for key, value in (self.model_extra or {}).items() if value and key not in _SILENT}
        skipped = sorted({item.type or "" for item in self.items if item.type in _HOSTED_ITEMS})
        return (
            *self.tool_set.warnings,
            *(f"{name[:100]} changes nothing here and was ignored" for name in sorted(extra)),
            *(f"input: items of type '{kind}' were left out" for kind in skipped),
        )

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


class CompactRequest(StrictBody):
    model_config = ConfigDict(extra="allow")

    model: ModelName = None
    input: str | Annotated[list[Item], Field(max_length=4096)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=128)

    @model_validator(mode="after")
    def _check_together(self) -> CompactRequest:
        check_known(self.model_extra or {}, type(self).model_fields)
        if not self.input and self.previous_response_id is None:
            raise InvalidRequest("give input or previous_response_id", param="input")
        return self

    @property
    def items(self) -> list[Item]:
        return [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input or []


def compaction_chat(body: CompactRequest, before: Sequence[Message]) -> ChatRequest:
    """What has the model sum up. Of a conversation that does not fit any more the end is read."""
    instructions = [Message(role="system", content=body.instructions)] if body.instructions else []
    said = _one_system([*instructions, *before, *responses_messages(body.items)])
    return ChatRequest(
        model=body.model,
        messages=[*said, Message(role="user", content=ASK)],
        max_completion_tokens=MAX_TOKENS,
        truncate_prompt_tokens=-1,
        include_reasoning=False,
    )


def responses_chat(body: ResponsesRequest, before: Sequence[Message], after: Sequence[Item] = ()) -> ChatRequest:
    """The chat that answers it, after what was said `before`; `after`: what the answer has so far."""
    instructions = [Message(role="system", content=body.instructions)] if body.instructions else []
    messages = _one_system([*instructions, *before, *responses_messages([*body.items, *after])])
    if not messages:
        raise InvalidRequest("nothing in it is there to be answered", param="input")
    return ChatRequest(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        **body.sampling_fields,
        logprobs=body.wants_logprobs or None,
        top_logprobs=body.top_logprobs if body.wants_logprobs else None,
        response_format=_response_format(body),
        tools=body.tool_set.functions(),
        tool_choice=body.tool_set.choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
        service_tier=body.service_tier,
        seed=body.seed,
        ignore_eos=body.ignore_eos,
        chat_template_kwargs=body.chat_template_kwargs,
        thinking_token_budget=body.thinking_token_budget,
        priority=body.priority,
    )


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    wanted = body.text.format if body.text else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ResponseFormat(type="json_object")
    schema = JsonSchemaFormat(name=wanted.name, schema=wanted.schema_, strict=wanted.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)


def _one_system(messages: Sequence[Message]) -> list[Message]:
    """Instructions at the beginning as one message: few templates take several."""
    count = next((at for at, one in enumerate(messages) if one.role not in ("system", "developer")), len(messages))
    if count < 2:
        return list(messages)
    text = "\n\n".join(message.text for message in messages[:count])
    return [Message(role="system", content=text), *messages[count:]]


def responses_messages(items: Sequence[Item]) -> list[Message]:
    """Calls that follow each other, and thoughts before them, are one message of the assistant."""
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(items):
        kind = item.type or ("message" if item.role else "")
        if kind == "message":
            messages.append({"role": item.role or "user", "content": _text(item.content, f"input[{at}].content")})
        elif kind in ("function_call", "custom_tool_call"):
            arguments = custom_arguments(item.input or "") if kind == "custom_tool_call" else item.arguments or "{}"
            call = {"name": qualified(item.name or "", item.namespace), "arguments": arguments}
            message = _assistant(messages)
            message.setdefault("tool_calls", []).append(
                {"id": item.call_id or "", "type": "function", "function": call}
            )
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = _text(item.output, f"input[{at}].output")
            messages.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
        elif kind == "mcp_call":
            call = {"name": qualified(item.name or "", item.server_label), "arguments": item.arguments or "{}"}
            _assistant(messages).setdefault("tool_calls", []).append(
                {"id": item.id or "", "type": "function", "function": call}
            )
            output = _text(item.output, f"input[{at}].output") or _error_text(item.error)
            messages.append({"role": "tool", "content": output, "tool_call_id": item.id})
        elif kind == "compaction":
            messages.append({"role": "user", "content": summary_of(item.encrypted_content, f"input[{at}]")})
        elif kind in _HOSTED_ITEMS or kind == "mcp_list_tools" or (kind == "reasoning" and not _thoughts(item)):
            continue
        elif kind == "reasoning":
            messages.append({"role": "assistant", "content": None, "reasoning_content": _thoughts(item)})
        else:
            raise InvalidRequest(f"items of type '{kind[:40]}' are not supported", param=f"input[{at}].type")
    return [Message(**message) for message in _merged(messages)]


def _error_text(error: Any) -> str:
    """Of a call of a tool: as its content has it, or as whoever called it put it."""
    if isinstance(error, dict):
        content = error.get("content", error.get("message"))
        parts = content if isinstance(content, list) else [content]
        return "\n".join(str(part.get("text", "") if isinstance(part, dict) else part or "") for part in parts)
    return str(error or "")


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of the assistant that is being put together, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Thoughts join the message of the assistant that follows them."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        last = merged[-1] if merged else {}
        if "reasoning_content" in last and last["content"] is None and message["role"] == "assistant":
            last.update({key: value for key, value in message.items() if value is not None})
        else:
            merged.append(message)
    return merged


def _thoughts(item: Item) -> str:
    parts = item.content if isinstance(item.content, list) else []
    return "\n".join(str(part.get("text", "")) for part in parts)


def _text(content: str | list[dict[str, Any]] | None, param: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for index, part in enumerate(content):
        if part.get("type") not in _TEXT_PARTS:
            kind = str(part.get("type"))[:40]
            raise InvalidRequest(
                f"parts of type '{kind}' are not supported; models here read text", param=f"{param}[{index}]"
            )
    return "\n".join(str(part.get("text") or part.get("refusal") or "") for part in content)
