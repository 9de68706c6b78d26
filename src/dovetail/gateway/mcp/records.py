"""What the gateway and the helper that speaks to an MCP server say to each other."""

from __future__ import annotations

from typing import Any

import msgspec


class Place(msgspec.Struct, frozen=True):
    """Where a server is: a command, or an address."""

    command: tuple[str, ...] = ()
    env: dict[str, str] = {}
    url: str = ""
    headers: dict[str, str] = {}


class ListTools(msgspec.Struct, frozen=True, tag="list"):
    place: Place
    timeout_s: float


class CallTool(msgspec.Struct, frozen=True, tag="call"):
    place: Place
    timeout_s: float
    name: str
    arguments: dict[str, Any]
    max_bytes: int  # of the text that comes back


class ToolInfo(msgspec.Struct, frozen=True):
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class Listed(msgspec.Struct, frozen=True, tag="listed"):
    tools: tuple[ToolInfo, ...]


class Called(msgspec.Struct, frozen=True, tag="called"):
    text: str
    is_error: bool = False  # the tool, or the way to it, failed; the text says how


class McpFailed(msgspec.Struct, frozen=True, tag="failed"):
    problem: str


McpOrder = ListTools | CallTool
McpAnswer = Listed | Called | McpFailed
