"""Speaks to one MCP server, in a confined process: `python -m` of this module. What the server says is untrusted input.

A command is started with the first call and kept, with its session, until it ends or fails; an address is connected to
anew for each call.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import msgspec

from dovetail.confined import serve
from dovetail.gateway.mcp.records import (
    Called,
    CallTool,
    Listed,
    ListTools,
    McpAnswer,
    McpFailed,
    McpOrder,
    Place,
    ToolInfo,
)
from dovetail.gateway.mcp.spawn import launched

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 32 * 1024  # of one tool
MAX_DESCRIPTION = 4096  # characters
_MAX_PAGES = 16
CONNECT_S = 60.0  # a command may have to fetch what it is first
_CLOSE_S = 5.0
_MAX_PROBLEM = 400  # characters

Result = TypeVar("Result")


class _Session:
    """A connection that is entered and left in one task, as its library asks; calls come from others."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._leaves = asyncio.Event()
        self._task = asyncio.create_task(self._hold())

    async def _hold(self) -> None:
        try:
            async with _connected(self.place) as client:
                self._client.set_result(client)
                await self._leaves.wait()
        except Exception as error:
            if not self._client.done():
                self._client.set_exception(error)

    async def client(self) -> Any:
        return await asyncio.shield(self._client)

    @property
    def has_ended(self) -> bool:
        return self._task.done()

    async def close(self) -> None:
        self._leaves.set()
        if not self._client.done():  # still connecting
            self._task.cancel()
        await asyncio.wait([self._task], timeout=_CLOSE_S)
        self._task.cancel()
        if self._client.done() and not self._client.cancelled():
            self._client.exception()


class Sessions:
    """The one server of this helper, as it was last asked for."""

    def __init__(self) -> None:
        self._session: _Session | None = None

    async def answer(self, order: McpOrder) -> McpAnswer:
        try:
            client = await self._client(order.place)
            async with asyncio.timeout(order.timeout_s):
                answer = await _asked(client, order)
        except TimeoutError:
            answer = McpFailed(f"it did not answer within {order.timeout_s:g} s")
        except Exception as error:
            answer = McpFailed(_in_words(error))
        if isinstance(answer, McpFailed) or order.place.url:
            await self._close()
        return answer

    async def _client(self, place: Place) -> Any:
        if self._session is not None and (self._session.has_ended or self._session.place != place):
            await self._close()
        if self._session is None:
            self._session = _Session(place)
        try:
            async with asyncio.timeout(CONNECT_S):
                return await self._session.client()
        except TimeoutError:
            raise ConnectionError(f"it was not there after {CONNECT_S:g} s") from None

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with suppress(Exception):
                await session.close()


@asynccontextmanager
async def _connected(place: Place) -> AsyncIterator[Any]:
    from mcp import Client

    if not place.url:
        async with Client(_process(place)) as client:
            yield client
        return
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    # No redirects: they would take the headers elsewhere. The order has a timeout of its own.
    async with (
        httpx2.AsyncClient(headers=place.headers, timeout=None) as http,
        Client(streamable_http_client(place.url, http_client=http)) as client,
    ):
        yield client


def _process(place: Place) -> Any:
    from mcp import StdioServerParameters

    path = place.env.get("PATH", os.environ.get("PATH"))
    if shutil.which(place.command[0], path=path) is None:
        raise FileNotFoundError(f"the command {place.command[0]!r} is not there")
    command, *arguments = launched(place.command)
    return StdioServerParameters(command=command, args=arguments, env=place.env)


async def _asked(client: Any, order: McpOrder) -> McpAnswer:
    if isinstance(order, ListTools):
        return Listed(await _listed(client))
    return _called(await client.call_tool(order.name, order.arguments), order)


async def _listed(client: Any) -> tuple[ToolInfo, ...]:
    tools: list[ToolInfo] = []
    cursor = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            if len(msgspec.json.encode(tool.input_schema)) > MAX_SCHEMA_BYTES:
                continue
            tools.append(ToolInfo(tool.name, (tool.description or "")[:MAX_DESCRIPTION], tool.input_schema))
        cursor = page.next_cursor
        if cursor is None or len(tools) >= MAX_TOOLS:
            break
    return tuple(tools[:MAX_TOOLS])


def _called(result: Any, order: CallTool) -> Called:
    parts = [_text_of(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [msgspec.json.encode(result.structured_content).decode()]
    data = "\n".join(parts).encode(errors="replace")
    text = data[: order.max_bytes].decode(errors="ignore")
    if len(data) > order.max_bytes:
        text += f"\n[cut off: {order.max_bytes} of {len(data)} bytes]"
    return Called(text, bool(result.is_error))


def _text_of(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    text = getattr(getattr(block, "resource", None), "text", None)
    return str(text) if text is not None else f"[{block.type} left out: models here read text]"


def _in_words(error: BaseException) -> str:
    """Of a group the first that says something."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "mcp":
        return "the package mcp is not installed: pip install 'dovetail[mcp]'"
    words = " ".join(str(error).split()) or type(error).__name__
    return words[:_MAX_PROBLEM]


def _runner() -> Callable[[Callable[[], Awaitable[Result]]], Result]:
    """Runs on a loop of its own, which goes on between calls: a server may say something at any time."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="mcp").start()

    async def awaited(work: Callable[[], Awaitable[Result]]) -> Result:
        return await work()

    return lambda work: asyncio.run_coroutine_threadsafe(awaited(work), loop).result()


def main() -> None:
    with suppress(ImportError):  # the first order says so
        import mcp  # noqa: F401
    sessions, run = Sessions(), _runner()

    def handle(request: bytes) -> bytes:
        order: McpOrder = msgspec.json.decode(request, type=McpOrder)
        return msgspec.json.encode(run(lambda: sessions.answer(order)))

    serve(handle, starts_others=True)


if __name__ == "__main__":
    main()
