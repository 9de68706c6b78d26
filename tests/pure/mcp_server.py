"""A real MCP server for the tests, by the official package: `python mcp_server.py [PORT]`, over HTTP or its pipes."""

from __future__ import annotations

import os
import resource
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def keep(text: str) -> str:
    """Keep a note."""
    notes.append(text)
    return f"{len(notes)} kept, the last: {text}"


@server.tool()
def limits() -> str:
    """What this process may take, and what it was given."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    return f"{soft == hard} {os.environ.get('NOTES_KEY')} {os.environ.get('DOVETAIL_SECRET')}"


@server.tool()
def repeat(text: str, count: int) -> str:
    """A long text."""
    return text * count


@server.tool()
def wait(seconds: float) -> str:
    """Answer late."""
    time.sleep(seconds)
    return "waited"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("no such note")


@server.tool()
def end() -> str:
    """End the server in the middle of a call."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
