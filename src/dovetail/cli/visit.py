"""`open` and `logs`: a running server's page in the browser, and what it has written down lately."""

from __future__ import annotations

import sys
import time
import webbrowser
from typing import Annotated, Any

import typer

from dovetail.cli.ps import DEFAULT_URL, Url, ask, key_header
from dovetail.errors import ConfigError, DovetailError

VIEWS = ("chat", "models", "batches", "turns", "api", "connect")
_POLL_S = 0.5


def open_page(
    view: Annotated[str, typer.Argument(help=f"{', '.join(VIEWS)}.")] = "chat",
    url: Url = DEFAULT_URL,
) -> None:
    """Open the page of a running server in the browser, with the right to change it if you have that here.

    The key (DOVETAIL_API_KEY, or the token of a server on this machine) is not in the address. A code is, which the
    page exchanges for it, once and within five minutes.

    Example: dovetail open models
    """
    if view not in VIEWS:
        raise ConfigError(f"the page has no view {view!r}: choose one of {', '.join(VIEWS)}")
    ask(url, "/live", timeout_s=5)
    address = f"{url.rstrip('/')}/#{view}"
    code = _code(url)
    is_open = webbrowser.open(f"{address}?code={code}" if code else address)
    if not is_open:
        typer.echo("no browser was found here; open it yourself (good once, for five minutes):", err=True)
    typer.echo(f"{address}?code={code}" if code and not is_open else address)


def _code(url: str) -> str | None:
    """For the address of the page; None where there is no key, or none that the server knows."""
    if not key_header(url):
        return None
    try:
        found = ask(url, "/ui/code", timeout_s=5, method="POST")
    except DovetailError as error:
        typer.echo(f"the page opens without a key: {error}", err=True)
        return None
    return str(found["code"])


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
