"""`open` and `logs`: a running server's page in the browser, and what it has written down lately."""

from __future__ import annotations

import sys
import time
import webbrowser
from typing import Annotated, Any

import typer

from dovetail.cli.ps import DEFAULT_URL, Url, ask

_POLL_S = 0.5


def open_page(
    view: Annotated[str, typer.Argument(help="chat, models or turns.")] = "chat",
    url: Url = DEFAULT_URL,
) -> None:
    """Open the page of a running server in the browser.

    Example: dovetail open turns
    """
    ask(url, "/live", timeout_s=5)
    address = f"{url.rstrip('/')}/#{view}"
    if not webbrowser.open(address):
        typer.echo("no browser was found here; open it yourself:", err=True)
    typer.echo(address)


def logs(
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many of the last ones.", min=0)] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes; Ctrl-C ends it.")] = False,
    level: Annotated[str, typer.Option(help="At least: debug, info, warning or error.")] = "info",
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object per line.")] = False,
) -> None:
    """Show what a running server has logged: loads, requests without their texts, refusals, what went wrong.

    Example: dovetail logs --follow --level warning
    """
    found = _ask(url, level, f"limit={lines}")
    _print(found["data"], as_json)
    while follow:
        time.sleep(_POLL_S)
        found = _ask(url, level, f"after={found['last']}")
        _print(found["data"], as_json)


def _ask(url: str, level: str, query: str) -> Any:
    return ask(url, f"/api/logs?level={level}&{query}", timeout_s=10)


def _print(lines: list[dict[str, Any]], as_json: bool) -> None:
    from dovetail.cli.output import json_line

    for line in lines:
        when = time.strftime("%H:%M:%S", time.localtime(line["time"]))
        text = json_line(line) if as_json else f"{when} {line['level'].upper():7} {line['logger']}: {line['message']}"
        sys.stdout.write(text + "\n")
    sys.stdout.flush()
