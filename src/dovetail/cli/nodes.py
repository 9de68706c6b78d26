"""`nodes` and `leave`: the nodes of a running server, over HTTP."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from dovetail.cli.models import AsJson
from dovetail.cli.output import human_bytes, print_json
from dovetail.cli.ps import DEFAULT_URL, Url, ask
from dovetail.errors import DovetailError

_POLL_S = 0.2
_HEADINGS = ("NODE", "DEVICE", "STATE", "PID", "REQUESTS", "MOVING", "FREE", "MEMORY", "MODELS")
_PIPE_WIDTH = 200


def nodes(url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show the nodes of a running server.

    Example: dovetail nodes --url http://127.0.0.1:8000
    """
    states = ask(url, "/api/nodes", timeout_s=5)
    if as_json:
        print_json(states)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, no_wrap=True)
    for node in states["data"]:
        table.add_row(*_cells(node))
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    console.print(table)
    if states["migrations"]:
        console.print(f"{states['migrations']} answers have moved while they were spoken.")


def leave(
    node: Annotated[str, typer.Argument(help="A name from `dovetail nodes`.")],
    wait: Annotated[bool, typer.Option(help="Return when nothing is left on it.")] = True,
    timeout: Annotated[float, typer.Option(help="Seconds to wait; answers that no other node takes end then.")] = 600.0,
    undo: Annotated[bool, typer.Option("--undo", help="Take it into service again.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Empty a node: nothing new goes there, and what it answers goes on elsewhere, unbroken.

    Example: dovetail leave gpu-1
    """
    path = f"/api/nodes/{quote(node, safe='')}"
    state = ask(url, f"{path}/{'resume' if undo else 'leave'}", timeout_s=30, method="POST")
    deadline = time.monotonic() + timeout
    told = 0
    while wait and state["state"] == "draining":
        if state["unfinished"] != told:
            told = state["unfinished"]
            left = f"{told} answer{'s' * (told != 1)} left, {state['moving_away']} moving to other nodes"
            typer.echo(f"{node}: {left}", err=True)
        if time.monotonic() > deadline:
            raise DovetailError(f"{state['unfinished']} answers are left on '{node}' after {timeout:g} s")
        time.sleep(_POLL_S)
        known = {one["name"]: one for one in ask(url, "/api/nodes", timeout_s=30)["data"]}
        state = known.get(node) or {**state, "state": "gone"}  # a machine that joined leaves when it is empty
    if as_json:
        print_json(state)
    else:
        typer.echo(f"{node} is {'in service' if undo else state['state']}")


def _cells(node: dict[str, Any]) -> list[str]:
    return [
        node["name"],
        node["device"],
        node["state"],
        str(node["pid"] or ""),
        str(node["unfinished"]),
        str(node["moving_away"]),
        human_bytes(node["free_bytes"]),
        human_bytes(node["memory_bytes"]),
        ", ".join(node["models"]),
    ]
