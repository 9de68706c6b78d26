"""The MCP servers of the configuration: which tools a caller may have called, and calling them.

Each server has a helper process of its own, started with its first use, that takes one call at a time.
"""

from __future__ import annotations

import asyncio
import fnmatch
import importlib.util
import json
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import msgspec

from dovetail.config import Config, McpConfig, McpServerConfig
from dovetail.confined import Bounds, Confined, Exceeded, Lane
from dovetail.errors import ConfigError, Overloaded
from dovetail.gateway.clients import current_client
from dovetail.gateway.mcp.child import CONNECT_S
from dovetail.gateway.mcp.records import Called, CallTool, Listed, ListTools, McpAnswer, McpFailed, Place, ToolInfo

logger = logging.getLogger("dovetail.gateway")

_NAME = re.compile(r"^[A-Za-z0-9_.:/-]{1,90}$")  # with the server's name it is still the name of a function
_LISTED_S = 60.0  # a list of tools is asked for again after this long
_LIST_TIMEOUT_S = 20.0
_START_S = 60.0  # a helper may take to import its library on a busy machine
_CPU_S = 20.0  # of one call: a server's messages are read, and no more
_MEMORY_BYTES = 512 << 20
_MAX_WAITING = 64


def check_mcp(config: Config) -> None:
    """Raises ConfigError where servers are configured and nothing here can speak to them."""
    if config.mcp.servers and importlib.util.find_spec("mcp") is None:
        raise ConfigError("mcp.servers needs the package mcp: pip install 'dovetail[mcp]'")


class McpServers:
    def __init__(self, config: Callable[[], McpConfig]) -> None:
        self._config = config
        self._open: dict[str, _Server] = {}

    @property
    def max_calls(self) -> int:
        return self._config().max_calls

    def names_for(self, key: str) -> list[str]:
        """Servers that this API key may use."""
        return [name for name, one in self._config().servers.items() if one.keys is None or key in one.keys]

    async def tools(self, name: str) -> tuple[ToolInfo, ...]:
        """Those that may be called. Raises Overloaded where the server does not say."""
        return await self._server(name).tools()

    async def call(self, name: str, tool: str, arguments: str) -> Called:
        """Never raises: what went wrong is the tool's answer, for the model to read."""
        if name not in self._config().servers:
            return Called(f"the MCP server '{name}' is not configured any more", is_error=True)
        began = time.monotonic()
        called = await self._server(name).call(tool, arguments)
        outcome = "failed" if called.is_error else "done"
        logger.info("MCP %s: %s %s after %.2f s", name, tool, outcome, time.monotonic() - began)
        return called

    def close(self) -> None:
        for server in self._open.values():
            server.end()
        self._open.clear()

    def _server(self, name: str) -> _Server:
        """As the configuration has it now."""
        config, found = self._config().servers[name], self._open.get(name)
        if found is None or found.config != config:
            if found is not None:
                found.end()
            found = self._open[name] = _Server(name, config)
        return found


class _Server:
    def __init__(self, name: str, config: McpServerConfig) -> None:
        self.config = config
        self._name = name
        env = {key: value.get_secret_value() for key, value in config.env.items()}
        headers = {key: value.get_secret_value() for key, value in config.headers.items()}
        self._place = Place(config.command, env, config.url or "", headers)
        wall_s = max(config.timeout, _LIST_TIMEOUT_S) + CONNECT_S + _START_S
        self._helper = Confined("dovetail.gateway.mcp.child", Bounds(_CPU_S, wall_s, _MEMORY_BYTES, niceness=5))
        self._lane = Lane(self._helper, _MAX_WAITING)
        self._tools: tuple[ToolInfo, ...] = ()
        self._listed_at: float | None = None
        self._listing = asyncio.Lock()

    async def tools(self) -> tuple[ToolInfo, ...]:
        async with self._listing:
            if self._listed_at is None or time.monotonic() - self._listed_at > _LISTED_S:
                answer = await self._ask(ListTools(self._place, _LIST_TIMEOUT_S))
                if not isinstance(answer, Listed):
                    problem = answer.problem if isinstance(answer, McpFailed) else "it does not list its tools"
                    raise Overloaded(
                        f"the MCP server '{self._name}' cannot be used now: {problem}",
                        code="mcp_unavailable",
                        retry_after_s=5,
                    )
                self._tools = tuple(tool for tool in answer.tools if self._is_allowed(tool.name))
                self._listed_at = time.monotonic()
        return self._tools

    async def call(self, tool: str, arguments: str) -> Called:
        if not self._is_allowed(tool):
            return Called(f"the tool '{tool}' may not be called", is_error=True)
        try:
            given: Any = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            return Called("the arguments are not a JSON object", is_error=True)
        answer = await self._ask(CallTool(self._place, self.config.timeout, tool, given, self.config.max_result))
        if isinstance(answer, Called):
            return answer
        self._listed_at = None  # it may be another one when it is back
        return Called(answer.problem if isinstance(answer, McpFailed) else "it did not answer the call", is_error=True)

    def end(self) -> None:
        self._helper.end()

    def _is_allowed(self, tool: str) -> bool:
        return bool(_NAME.match(tool)) and any(fnmatch.fnmatchcase(tool, one) for one in self.config.tools)

    async def _ask(self, order: ListTools | CallTool) -> McpAnswer:
        client = current_client.get()
        if self._lane.is_full(client):
            return McpFailed("too many calls wait for it")
        try:
            answer = await self._lane.call(msgspec.json.encode(order), client)
        except Exceeded as error:
            return McpFailed(error.what)
        read: McpAnswer = msgspec.json.decode(answer, type=McpAnswer)
        return read
