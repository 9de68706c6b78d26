"""An answer in several rounds: what the model asks of MCP servers is done here, and it goes on with what came of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from dovetail.errors import ContextTooLong, InvalidRequest
from dovetail.gateway.http.api import ChatRequest, Message
from dovetail.gateway.http.responses.builder import Event, OutputBuilder
from dovetail.gateway.http.responses.items import McpCall, McpListTools, McpTool, OutputItem
from dovetail.gateway.http.responses.request import Item, ResponsesRequest, responses_chat
from dovetail.gateway.http.responses.tools import ResponsesTool
from dovetail.gateway.mcp.servers import McpServers
from dovetail.gateway.text.translate import GenerationRequest

TOO_LONG = "[the result is too long for the context of this model]"

MakeJob = Callable[[ChatRequest], Awaitable[GenerationRequest]]


@dataclass(frozen=True)
class RequestWithTools:
    """A request whose MCP servers have been asked for their tools."""

    body: ResponsesRequest
    warnings: tuple[str, ...] = ()
    has_mcp: bool = False


async def with_mcp_tools(body: ResponsesRequest, servers: McpServers, key: str) -> RequestWithTools:
    """Raises Overloaded where a server that is wanted cannot be reached."""
    if not any(tool.type == "mcp" for tool in body.tools or ()):
        return RequestWithTools(body)
    tools: list[ResponsesTool] = []
    warnings: list[str] = []
    for at, tool in enumerate(body.tools or ()):
        if tool.type == "mcp":
            tool, problem = await _filled(tool, f"tools[{at}]", servers, key)
            warnings += [problem] if problem else []
        tools.append(tool)
    has_mcp = any(tool.type == "mcp" and tool.tools for tool in tools)
    return RequestWithTools(body.changed(tools=tools), tuple(warnings), has_mcp)


async def _filled(tool: ResponsesTool, where: str, servers: McpServers, key: str) -> tuple[ResponsesTool, str]:
    """With the tools that may be called; and why there are none."""
    if tool.require_approval not in (None, "never"):
        raise InvalidRequest(
            "calls are not shown for approval: the operator says which tools may be called; send 'never'",
            param=f"{where}.require_approval",
        )
    names, label = servers.names_for(key), tool.server_label or ""
    if label not in names:
        there = f"there are: {', '.join(names)}" if names else "none is configured"
        return tool.model_copy(update={"tools": None}), f"{where}: no MCP server '{label[:40]}' ({there}); left out"
    allowed = tool.allowed_names
    found = [
        ResponsesTool(type="function", name=one.name, description=one.description or None, parameters=one.parameters)
        for one in await servers.tools(label)
        if allowed is None or one.name in allowed
    ]
    problem = "" if found else f"{where}: the MCP server '{label}' has none of these tools; left out"
    return tool.model_copy(update={"tools": found}), problem


class ToolRounds:
    def __init__(
        self, servers: McpServers, body: ResponsesRequest, before: Sequence[Message], make_job: MakeJob
    ) -> None:
        self._servers = servers
        self._body = body
        self._before = before
        self._make_job = make_job
        self._left = servers.max_calls if body.max_tool_calls is None else min(body.max_tool_calls, servers.max_calls)
        self._too_long: set[str] = set()  # ids of calls whose results the model is not shown

    @staticmethod
    def listed(body: ResponsesRequest, builder: OutputBuilder) -> list[Event]:
        """The tools, as the response begins with them."""
        events: list[Event] = []
        for tool in body.tools or ():
            if tool.type == "mcp" and tool.tools:
                tools = [
                    McpTool(name=one.name or "", description=one.description, input_schema=one.parameters or {})
                    for one in tool.tools
                ]
                item = McpListTools(id=f"mcpl_{tool.server_label}", server_label=tool.server_label or "", tools=tools)
                events += builder.list_tools(item)
        return events

    async def made(self, calls: Sequence[McpCall], builder: OutputBuilder) -> AsyncGenerator[Event, None]:
        """The calls, one after another, with what the response says of each."""
        for call in calls:
            if self._left < 1:
                text, is_error = "not called: the limit of calls is reached", True
            else:
                self._left -= 1
                called = await self._servers.call(call.server_label, call.name, call.arguments)
                text, is_error = called.text, called.is_error
            for event in builder.made(call, text, is_error=is_error):
                yield event

    async def next_job(
        self, items: Sequence[OutputItem], calls: Sequence[McpCall], tokens_used: int
    ) -> GenerationRequest | None:
        """What the model goes on with; None where the answer may have no more tokens."""
        body = self._body
        changes: dict[str, object] = {"tool_choice": None if body.tool_choice != "none" else "none"}
        if body.max_output_tokens is not None:
            if tokens_used >= body.max_output_tokens:
                return None
            changes["max_output_tokens"] = body.max_output_tokens - tokens_used
        if self._left < 1:
            changes["tools"] = [tool for tool in body.tools or () if tool.type != "mcp"] or None
        body = body.changed(**changes)
        try:
            return await self._make_job(responses_chat(body, self._before, self._shown(items)))
        except ContextTooLong:
            self._too_long |= {call.id for call in calls}
            return await self._make_job(responses_chat(body, self._before, self._shown(items)))

    def _shown(self, items: Sequence[OutputItem]) -> list[Item]:
        shown = []
        for item in items:
            fields = item.model_dump(exclude={"status"})
            if item.id in self._too_long:
                fields |= {"output": TOO_LONG, "error": None}
            shown.append(Item.model_validate(fields))
        return shown
