"""What a client may ask of `/v1/responses`, and the chat that it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dovetail.errors import InvalidRequest
from dovetail.gateway.api import ChatRequest, JsonSchemaFormat, Message, ModelName, ResponseFormat, StrictBody
from dovetail.gateway.options import check_options
from dovetail.gateway.tools.schema import Function, FunctionName, NamedFunction, NamedTool, Tool

_MAX_LIMIT = 2**31 - 1
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


class FunctionTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(StrictBody):
    type: Literal["function"]
    name: FunctionName


class Item(BaseModel):
    """One thing of the conversation: a message, a call, its result, thoughts."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    type: str | None = None
    role: str | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[dict[str, Any]] | None = None


class ResponsesRequest(StrictBody):
    model_config = ConfigDict(extra="allow")

    model: ModelName = None
    input: str | Annotated[list[Item], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, max_length=128)
    store: bool | None = Field(default=None, description="on unless false; kept in the server's memory")
    stream: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=_MAX_LIMIT)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[FunctionTool] | None = Field(default=None, max_length=512)
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    background: bool | None = None
    # Of the chat's extensions.
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    top_k: int | None = Field(default=None, ge=-1, le=_MAX_LIMIT)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    ignore_eos: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = Field(default=None, ge=0, le=_MAX_LIMIT)
    priority: int | None = Field(default=None, ge=0, le=_MAX_LIMIT)

    @model_validator(mode="after")
    def _check_together(self) -> ResponsesRequest:
        check_options(self.model_extra or {}, type(self).model_fields)
        if self.background and self.store is False:
            raise InvalidRequest("background can only be used when `store` is true", param="background")
        if self.background and self.stream:
            raise InvalidRequest("background and stream exclude each other", param="background")
        return self

    @property
    def items(self) -> list[Item]:
        return [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())


def chat_of(body: ResponsesRequest, before: Sequence[Message]) -> ChatRequest:
    """The chat that answers it, after what was said `before`."""
    instructions = [Message(role="system", content=body.instructions)] if body.instructions else []
    return ChatRequest(
        model=body.model,
        messages=[*instructions, *before, *messages_of(body.items)],
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=body.wants_logprobs or None,
        top_logprobs=body.top_logprobs if body.wants_logprobs else None,
        response_format=_response_format(body),
        tools=[_tool(tool, at) for at, tool in enumerate(body.tools)] if body.tools else None,
        tool_choice=_tool_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
        service_tier=body.service_tier,
        seed=body.seed,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
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


def _tool(tool: FunctionTool, at: int) -> Tool:
    if tool.type != "function":
        raise InvalidRequest(
            f"tools of type '{tool.type[:40]}' are not supported: give a function", param=f"tools[{at}].type"
        )
    if tool.name is None:
        raise InvalidRequest("a function needs a name", param=f"tools[{at}].name")
    given = tool.model_dump(exclude_none=True, include={"name", "description", "parameters", "strict"})
    return Tool(type="function", function=Function(**given))


def _tool_choice(body: ResponsesRequest) -> Any:
    if isinstance(body.tool_choice, FunctionChoice):
        return NamedTool(type="function", function=NamedFunction(name=body.tool_choice.name))
    return body.tool_choice


def messages_of(items: Sequence[Item]) -> list[Message]:
    """Calls that follow each other, and thoughts before them, are one message of the assistant."""
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(items):
        kind = item.type or ("message" if item.role else "")
        if kind == "message":
            messages.append({"role": item.role or "user", "content": _text(item.content, f"input[{at}].content")})
        elif kind == "function_call":
            call = {"name": item.name or "", "arguments": item.arguments or "{}"}
            message = _assistant(messages)
            message.setdefault("tool_calls", []).append(
                {"id": item.call_id or "", "type": "function", "function": call}
            )
        elif kind == "function_call_output":
            output = _text(item.output, f"input[{at}].output")
            messages.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
        elif kind == "reasoning":
            messages.append({"role": "assistant", "content": None, "reasoning_content": _thoughts(item)})
        else:
            raise InvalidRequest(f"items of type '{kind[:40]}' are not supported", param=f"input[{at}].type")
    return [Message(**message) for message in _merged(messages)]


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
