"""Tools of `/v1/responses`: functions, those in namespaces, custom ones, those of MCP servers, and what runs elsewhere
and is left out.

A model sees functions only: one in a namespace or of an MCP server has a name of both, a custom tool is a function of
one text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dovetail.errors import InvalidRequest
from dovetail.gateway.http.bodies import StrictBody
from dovetail.gateway.text.tools.schema import (
    AllowedChoice,
    AllowedTools,
    Function,
    FunctionName,
    NamedFunction,
    NamedTool,
    Tool,
)

INPUT = "input"  # the one parameter of a custom tool
_SEPARATOR = "."  # between a namespace and a name
_MAX_TOOLS = 512


class CustomFormat(StrictBody):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class AllowedMcp(StrictBody):
    tool_names: list[str] | None = None


class ResponsesTool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: list[ResponsesTool] | None = None
    # Of type mcp: a server of the configuration. Its tools are filled in when they are known.
    server_label: str | None = Field(default=None, max_length=64)
    allowed_tools: list[str] | AllowedMcp | None = None
    require_approval: Any = Field(default=None, description="never; who may call what is the configuration's to say")

    @property
    def allowed_names(self) -> list[str] | None:
        """Of an MCP server; None = all that there are."""
        return self.allowed_tools.tool_names if isinstance(self.allowed_tools, AllowedMcp) else self.allowed_tools


class ToolChoiceItem(StrictBody):
    """A tool by its kind and name, or some of them."""

    type: str
    name: FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Known:
    """A tool that the model may call, by the name that the model knows it by."""

    tool: ResponsesTool
    namespace: str | None = None
    is_mcp: bool = False  # the namespace is the server's name, and the call is done here

    @property
    def is_custom(self) -> bool:
        return self.tool.type == "custom"

    @property
    def name(self) -> str:
        return qualified(self.tool.name or "", self.namespace)


@dataclass(frozen=True)
class ToolSet:
    known: Mapping[str, Known]
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, tools: Sequence[ResponsesTool] | None) -> ToolSet:
        found: dict[str, Known] = {}
        warnings = []
        for at, tool in enumerate(tools or ()):
            if tool.type not in ("function", "custom", "namespace", "mcp"):
                warnings.append(f"tools[{at}]: '{tool.type[:40]}' is not run here and was left out")
            for known in _known(tool, f"tools[{at}]"):
                if known.name in found:
                    raise InvalidRequest(f"tools: '{known.name}' is there twice", param="tools")
                found[known.name] = known
        if len(found) > _MAX_TOOLS:
            raise InvalidRequest(f"tools: {len(found)} functions, more than {_MAX_TOOLS}", param="tools")
        return cls(found, tuple(warnings))

    def functions(self) -> list[Tool] | None:
        return [_function(known) for known in self.known.values()] or None

    def choice(self, wanted: str | ToolChoiceItem | None) -> Any:
        """As a chat has it. A hosted tool that was asked for by name is not there: the model may choose."""
        if not isinstance(wanted, ToolChoiceItem):
            return wanted if self.known or wanted != "required" else "auto"
        if wanted.type in ("function", "custom"):
            return _named(wanted.name or "")
        if wanted.type == "allowed_tools":
            names = [str(tool.get("name", "")) for tool in wanted.tools or ()]
            allowed = [_named(name) for name in names if name in self.known]
            if not allowed:
                raise InvalidRequest("tool_choice: none of these tools is in tools", param="tool_choice")
            return AllowedChoice(
                type="allowed_tools", allowed_tools=AllowedTools(mode=wanted.mode or "auto", tools=allowed)
            )
        return "auto"


NO_TOOLS = ToolSet({})


def qualified(name: str, namespace: str | None) -> str:
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def custom_input(arguments: str) -> str:
    """The text of a custom tool's call; what was cut short or is not in form is given as it is."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    text = value.get(INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def custom_arguments(text: str) -> str:
    return json.dumps({INPUT: text}, ensure_ascii=False)


def _known(tool: ResponsesTool, where: str) -> Iterator[Known]:
    if tool.type == "namespace":
        for at, inner in enumerate(tool.tools or ()):
            if inner.type == "namespace":
                raise InvalidRequest("a namespace has no namespaces in it", param=f"{where}.tools[{at}]")
            for known in _known(inner, f"{where}.tools[{at}]"):
                yield Known(known.tool, tool.name)
    elif tool.type == "mcp":
        for inner in tool.tools or ():
            yield Known(inner, tool.server_label, is_mcp=True)
    elif tool.type in ("function", "custom"):
        if tool.name is None:
            raise InvalidRequest(f"a {tool.type} tool needs a name", param=f"{where}.name")
        yield Known(tool)


def _function(known: Known) -> Tool:
    tool = known.tool
    if known.is_custom:
        schema: dict[str, Any] = {"type": "string"}
        description, format = tool.description or "", tool.format
        if format is not None and format.definition:
            description += f"\nThe input follows this {format.syntax or 'lark'} grammar:\n{format.definition}"
            if format.syntax == "regex":
                schema["pattern"] = f"^(?:{format.definition})$"
        parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT]}
        function = Function(name=known.name, description=description.strip() or None, parameters=parameters)
        return Tool(type="function", function=function)
    given = tool.model_dump(exclude_none=True, include={"description", "parameters", "strict"})
    return Tool(type="function", function=Function(name=known.name, **given))


def _named(name: str) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=name))
