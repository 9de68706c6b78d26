"""What Anthropic's clients ask, and the chat that it comes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dovetail.errors import InvalidRequest
from dovetail.gateway.http.api import (
    FAIL_FAST,
    ChatRequest,
    JsonSchemaFormat,
    Message,
    ModelName,
    ResponseFormat,
    StopString,
)
from dovetail.gateway.http.bodies import StrictBody
from dovetail.gateway.http.options import check_known
from dovetail.gateway.text.tools.schema import Function, FunctionName, NamedFunction, NamedTool, Tool

_MAX_LIMIT = 2**31 - 1
CALL_PREFIX = "toolu_"
_BILLING = "x-anthropic-billing-header:"  # differs in each request: with it no prefix would be found again
# Who asks, and hints that only save time or money at Anthropic's: the answer is the same without them.
_SILENT = frozenset(
    {"cache_control", "metadata", "betas", "inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id"}
)
# What Anthropic does beside the model, as the tools that run there: left out, with a warning.
_NOT_HERE = {
    "mcp_servers": "mcp_servers: no server is called; give their tools in tools, or mcp.servers in dovetail.yaml",
    "container": "container: there are none, and it was left out",
    "fallbacks": "fallbacks: the model that was named answers, and no other",
}
_EFFORTS = {"xhigh": "high", "max": "high"}  # levels that templates do not know


class Block(BaseModel):
    """One part of a message."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | dict[str, Any] | None = None
    is_error: bool | None = None
    title: str | None = None
    source: dict[str, Any] | str | None = None


class AnthropicMessage(StrictBody):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], FAIL_FAST]

    @property
    def blocks(self) -> list[Block]:
        return [Block(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class AnthropicTool(StrictBody):
    type: str | None = None
    name: FunctionName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicToolChoice(StrictBody):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictBody):
    type: str
    budget_tokens: int | None = Field(default=None, ge=1, le=_MAX_LIMIT)
    display: str | None = None


class OutputFormat(StrictBody):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictBody):
    effort: str | None = Field(default=None, max_length=32)
    format: OutputFormat | None = None


class CountTokensRequest(StrictBody):
    """What a request and the question how many tokens it has share."""

    model_config = ConfigDict(extra="allow")

    model: ModelName = None
    messages: Annotated[list[AnthropicMessage], FAIL_FAST] = Field(min_length=1, max_length=4096)
    system: str | Annotated[list[Block], FAIL_FAST] | None = None
    tools: Annotated[list[AnthropicTool], FAIL_FAST] | None = Field(default=None, max_length=512)
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(default=None, description="what output_config.format was once called")
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> CountTokensRequest:
        check_known(self.model_extra or {}, type(self).model_fields)
        return self

    def warnings(self) -> tuple[str, ...]:
        """What was asked for and is not done."""
        skipped = [tool for tool in self.tools or () if not _is_function(tool)]
        ignored = [key for key, value in (self.model_extra or {}).items() if key not in _SILENT and value]
        return (
            *(f"tools: '{tool.type}' runs at Anthropic's and was left out" for tool in skipped),
            *(_NOT_HERE.get(key) or f"{key[:100]} is not known here and was ignored" for key in ignored),
        )

    @property
    def system_text(self) -> str:
        if not self.system:
            return ""
        blocks = [Block(type="text", text=self.system)] if isinstance(self.system, str) else self.system
        texts = [_text_of(block, f"system[{at}]") for at, block in enumerate(blocks)]
        return "\n".join(text for text in texts if text and not text.startswith(_BILLING))

    def functions(self) -> list[Tool] | None:
        found = [_tool(tool, at) for at, tool in enumerate(self.tools or ()) if _is_function(tool)]
        return found or None


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1, le=_MAX_LIMIT)
    stream: bool | None = None
    stop_sequences: list[StopString] | None = Field(default=None, max_length=16)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=_MAX_LIMIT)
    service_tier: Literal["auto", "standard_only"] | None = None
    # Of the chat's extensions.
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    ignore_eos: bool | None = None


def anthropic_chat(body: CountTokensRequest, *, thinks: bool) -> ChatRequest:
    """The chat that answers it. `thinks`: the model thinks aloud, and a budget for that means something to it."""
    messages = anthropic_messages(body)
    last = messages[-1]
    output = body.output_config or OutputConfig()
    format = output.format or body.output_format
    effort = _EFFORTS.get(output.effort or "", output.effort)
    return ChatRequest(
        model=body.model,
        messages=messages,
        tools=body.functions(),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=False if body.tool_choice and body.tool_choice.disable_parallel_tool_use else None,
        continue_final_message=True if last.role == "assistant" and last.content and not last.tool_calls else None,
        response_format=_response_format(format),
        reasoning_effort=effort,
        chat_template_kwargs=_template_options(body),
        thinking_token_budget=body.thinking.budget_tokens if body.thinking and thinks else None,
        include_reasoning=False if body.thinking and body.thinking.display == "omitted" else None,
        **(_sampling(body) if isinstance(body, MessagesRequest) else {}),
    )


def _sampling(body: MessagesRequest) -> dict[str, Any]:
    return {
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "seed": body.seed,
        "ignore_eos": body.ignore_eos,
    }


def _template_options(body: CountTokensRequest) -> dict[str, Any] | None:
    """Templates that can do both think unless they are told not to."""
    if body.thinking is None:
        return body.chat_template_kwargs
    return {"enable_thinking": body.thinking.type != "disabled", **(body.chat_template_kwargs or {})}


def _response_format(format: OutputFormat | None) -> ResponseFormat | None:
    if format is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(name="output", schema=format.schema_))


def _is_function(tool: AnthropicTool) -> bool:
    """Of the caller's own; others are run, or at least known, by Anthropic."""
    return tool.type in (None, "custom")


def _tool(tool: AnthropicTool, at: int) -> Tool:
    if tool.name is None:
        raise InvalidRequest("a tool needs a name", param=f"tools[{at}].name")
    parameters = tool.input_schema or {"type": "object", "properties": {}}
    fields = {"description": tool.description, "strict": tool.strict}
    given: dict[str, Any] = {key: value for key, value in fields.items() if value is not None}
    return Tool(type="function", function=Function(name=tool.name, parameters=parameters, **given))


def _tool_choice(choice: AnthropicToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice of type 'tool' needs a name", param="tool_choice.name")
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    return {"any": "required"}.get(choice.type, choice.type)


def anthropic_messages(body: CountTokensRequest) -> list[Message]:
    """Messages of one role that follow each other are one, as Anthropic has it."""
    told: list[dict[str, Any]] = []
    if system := body.system_text:
        told.append({"role": "system", "content": system})
    for at, message in enumerate(body.messages):
        where = f"messages[{at}].content"
        is_first = all(one["role"] == "system" for one in told)
        # Within a conversation few templates take instructions.
        role = "user" if message.role == "system" and not is_first else message.role
        parts = _assistant(message, where) if role == "assistant" else _user(message, role, where)
        for part in parts:
            _append(told, part)
    if all(message["role"] == "system" for message in told):
        raise InvalidRequest("messages: none of them says anything", param="messages")
    return [Message(**message) for message in told]


def _append(told: list[dict[str, Any]], part: dict[str, Any]) -> None:
    last = told[-1] if told else {}
    if last.get("role") != part["role"] or part["role"] == "tool":
        told.append(part)
        return
    texts = [text for text in (last.get("content"), part.get("content")) if text]
    calls = [*last.get("tool_calls", ()), *part.get("tool_calls", ())]
    last.update(part, content="\n".join(texts) or None)
    if calls:
        last["tool_calls"] = calls


def _user(message: AnthropicMessage, role: str, where: str) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own; a text around them stays in its place."""
    texts: list[str] = []
    for at, block in enumerate(message.blocks):
        if block.type != "tool_result":
            texts.append(_text_of(block, f"{where}[{at}]"))
            continue
        if texts:
            yield {"role": role, "content": "\n".join(texts)}
            texts = []
        result = _result(block, f"{where}[{at}]")
        yield {"role": "tool", "tool_call_id": _call_id(block.tool_use_id), "content": result}
    if texts:
        yield {"role": role, "content": "\n".join(texts)}


def _assistant(message: AnthropicMessage, where: str) -> Iterator[dict[str, Any]]:
    thoughts = [block.thinking or "" for block in message.blocks if block.type == "thinking"]
    calls = [_call(block) for block in message.blocks if block.type == "tool_use"]
    texts = [
        _text_of(block, f"{where}[{at}]")
        for at, block in enumerate(message.blocks)
        if block.type not in ("thinking", "redacted_thinking", "tool_use")
    ]
    said: dict[str, Any] = {"role": "assistant", "content": "\n".join(filter(None, texts)) or None}
    if any(thoughts):
        said["reasoning_content"] = "\n".join(filter(None, thoughts))
    if calls:
        said["tool_calls"] = calls
    yield said


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block.name or "", "arguments": block.input or {}}
    return {"id": _call_id(block.id), "type": "function", "function": function}


def _call_id(id: str | None) -> str:
    """As the model's template is to see it: the strictest takes nine letters and digits."""
    return (id or "").removeprefix(CALL_PREFIX)


def _result(block: Block, where: str) -> str:
    content: Sequence[Block] | str = block.content if isinstance(block.content, list | str) else ""
    if not isinstance(content, str):
        content = "\n".join(_text_of(part, f"{where}.content[{at}]") for at, part in enumerate(content))
    return f"Error: {content}" if block.is_error else content


def _text_of(block: Block, where: str) -> str:
    if block.type == "text":
        return block.text or ""
    if block.type == "search_result":
        parts = block.content if isinstance(block.content, list) else []
        return "\n".join([block.title or "", *(_text_of(part, where) for part in parts)]).strip()
    if block.type == "document" and isinstance(block.source, dict):
        data = block.source.get("data")
        if block.source.get("type") == "text" and isinstance(data, str):
            return "\n".join(filter(None, [block.title or "", data]))
    if block.type == "image":
        raise InvalidRequest("images are not supported: this model reads text", param=where)
    raise InvalidRequest(
        f"content blocks of type '{block.type[:40]}' are not supported: this model reads text", param=where
    )
