"""`ps`: what a running server is doing, asked over HTTP."""

from __future__ import annotations

import os
from typing import Annotated, Any

import httpx
import typer

from dovetail.cli.output import human_bytes, print_json
from dovetail.errors import DovetailError

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "DOVETAIL_API_KEY"

Url = Annotated[str, typer.Option(envvar="DOVETAIL_URL", help="Address of the server.")]


def ps(
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show what a running server is doing.

    Example: dovetail ps --url http://127.0.0.1:8000
    """
    status = ask(url, "/api/ps", timeout_s=5)
    if as_json:
        print_json(status)
    else:
        _print_table(status)


def ask(url: str, path: str, *, timeout_s: float) -> Any:
    """A record of the server, or one line on why there is none."""
    try:
        response = httpx.get(url.rstrip("/") + path, headers=key_header(), timeout=timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DovetailError(f"no server at {url}: {error or type(error).__name__}") from error
    if response.status_code != 200:
        raise DovetailError(f"{url} answers {response.status_code}: {error_message(response)}")
    try:
        return response.json()
    except ValueError as error:
        raise DovetailError(f"{url} is not a Dovetail server: its answer is no JSON") from error


def key_header() -> dict[str, str]:
    key = os.environ.get(KEY_VARIABLE)
    return {"authorization": f"Bearer {key}"} if key else {}


def error_message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def _print_table(status: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("NODE", "STATE", "MEMORY", "MODEL", "TYPE", "RUNNING", "WAITING", "KV BLOCKS"):
        table.add_column(heading, no_wrap=True)
    for node in status["nodes"]:
        memory = human_bytes(node["resident_bytes"]) if node["resident_bytes"] else ""
        models = node["models"] or [None]
        for model in models:
            table.add_row(node["name"], node["state"], memory, *_model_cells(model))
    console = Console()
    console.print(table)
    if status["draining"]:
        console.print("The server is shutting down.")


def _model_cells(model: dict[str, Any] | None) -> list[str]:
    if model is None:
        return []
    name = model["name"] if model["state"] == "loaded" else f"{model['name']} (loading)"
    blocks = f"{model['blocks_used']} of {model['blocks_total']}"
    return [name, model["dtype"] or "", str(model["running"]), str(model["waiting"]), blocks]
