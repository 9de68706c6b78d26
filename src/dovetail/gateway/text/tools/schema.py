"""Tools as a client offers them, and which of them must, may or must not be called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dovetail.errors import InvalidRequest


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)  # templates may show what else is there


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class Function(_Record):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(default=None, description="arguments follow the schema also when a call is not forced")


class Tool(_Record):
    type: Literal["function"]
    function: Function


class NamedFunction(_Record):
    name: FunctionName


class NamedTool(_Record):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(_Record):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=512)


class AllowedChoice(_Record):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedChoice


@dataclass(frozen=True)
class Wanted:
    """What a request's tools and tool_choice come to."""

    shown: tuple[Tool, ...]  # to the model
    callable: tuple[Tool, ...]  # those that it may call
    is_forced: bool = False
    parallel: bool = True  # several calls in one answer

    @property
    def is_strict(self) -> bool:
        return any(tool.function.strict for tool in self.callable)


def wanted_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> Wanted | None:
    """None: the answer is text. Raises InvalidRequest where the two do not fit."""
    offered = tuple(tools or ())
    names = [tool.function.name for tool in offered]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"tools: the function '{twice}' is there twice", param="tools")
    if not offered:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    several = parallel is not False
    if isinstance(choice, NamedTool):
        return Wanted(offered, _named(offered, [choice]), is_forced=True, parallel=False)
    if isinstance(choice, AllowedChoice):
        allowed = choice.allowed_tools
        return Wanted(offered, _named(offered, allowed.tools), allowed.mode == "required", several)
    return Wanted(offered, offered, choice == "required", several)


def _named(offered: Sequence[Tool], named: Sequence[NamedTool]) -> tuple[Tool, ...]:
    by_name = {tool.function.name: tool for tool in offered}
    for tool in named:
        if tool.function.name not in by_name:
            raise InvalidRequest(
                f"tool_choice: there is no function '{tool.function.name}' in tools", param="tool_choice"
            )
    return tuple(by_name[tool.function.name] for tool in named)
