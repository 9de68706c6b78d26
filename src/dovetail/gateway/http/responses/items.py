"""What `/v1/responses` answers: the response, its items, and the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from dovetail.gateway.http.replies import TokenEntry
from dovetail.gateway.http.tiers import ServiceTier

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[TokenEntry] = Field(default_factory=list)


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = Field(default_factory=list)


class FunctionCall(BaseModel):
    id: str
    type: Literal["function_call"] = "function_call"
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = ""
    status: Status = "in_progress"


class CustomToolCall(BaseModel):
    id: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    call_id: str
    name: str
    namespace: str | None = None
    input: str = ""
    status: Status = "in_progress"


class McpTool(BaseModel):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)


class McpListTools(BaseModel):
    """What an MCP server offers to the model."""

    id: str
    type: Literal["mcp_list_tools"] = "mcp_list_tools"
    server_label: str
    tools: list[McpTool] = Field(default_factory=list)


class ErrorText(BaseModel):
    type: Literal["text"] = "text"
    text: str


class McpError(BaseModel):
    type: Literal["mcp_tool_execution_error"] = "mcp_tool_execution_error"
    content: list[ErrorText]


class McpCall(BaseModel):
    """A call that this server makes itself."""

    id: str
    type: Literal["mcp_call"] = "mcp_call"
    server_label: str
    name: str
    arguments: str = ""
    output: str | None = None
    error: McpError | None = None
    status: Status = "in_progress"


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class Reasoning(BaseModel):
    id: str
    type: Literal["reasoning"] = "reasoning"
    summary: list[Any] = Field(default_factory=list)
    content: list[ReasoningText] = Field(default_factory=list)
    status: Status = "in_progress"


OutputItem = OutputMessage | FunctionCall | CustomToolCall | McpListTools | McpCall | Reasoning


class InputDetails(BaseModel):
    cached_tokens: int = 0


class OutputDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseError(BaseModel):
    code: str
    message: str


class ResponseRecord(BaseModel):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    model: str
    output: list[OutputItem]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    parallel_tool_calls: bool = True
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Any = "auto"
    text: dict[str, Any] = Field(default_factory=dict)
    truncation: Literal["auto", "disabled"] = "disabled"
    service_tier: ServiceTier | None = Field(default=None, description="of a request that names one: what it has")
    store: bool = True
    background: bool = False
    max_tool_calls: int | None = None
    conversation: dict[str, str] | None = None
    warnings: list[str] = Field(default_factory=list, description="what was asked for and done otherwise")
    usage: ResponseUsage | None = None


class InputItems(BaseModel):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class ResponseDeleted(BaseModel):
    id: str
    object: Literal["response.deleted"] = "response.deleted"
    deleted: bool = True
