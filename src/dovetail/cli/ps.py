"""`ps`: what a running server is doing, asked over HTTP."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import httpx
import typer

from dovetail.cli.output import human_bytes, print_json
from dovetail.errors import DovetailError
from dovetail.local_token import KEY_VARIABLE, token_for

DEFAULT_URL = "http://127.0.0.1:8000"

Url = Annotated[str, typer.Option(envvar="DOVETAIL_URL", help="Address of the server.")]


def ps(
    url: Url = DEFAULT_URL,
    show_all: Annotated[
        bool, typer.Option("--all", "-a", help="Also adapters, and the models that are not loaded.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show what a running server is doing, and how many of its requests met their targets.

    Example: dovetail ps --all --url http://127.0.0.1:8000
    """
    status = ask(url, "/api/ps", timeout_s=_TIMEOUT_S)
    status.pop("models", None)  # for clients of another server
    if show_all:
        status["models"] = ask(url, "/api/models", timeout_s=_TIMEOUT_S)["data"]
    if as_json:
        print_json(status)
    else:
        show(status)


def ask(url: str, path: str, *, timeout_s: float, method: str = "GET", body: dict[str, Any] | None = None) -> Any:
    """A record of the server, or one line on why there is none."""
    address = url.rstrip("/") + path
    try:
        response = httpx.request(method, address, json=body, headers=key_header(url), timeout=timeout_s)
    except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
        raise DovetailError(
            f"{url} took the request and did not answer within {timeout_s:g} s: the server is busy; ask again"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DovetailError(f"no server at {url}: {error or type(error).__name__}") from error
    if not response.is_success:
        raise DovetailError(f"{url} answers {response.status_code}: {error_message(response)}")
    try:
        return response.json()
    except ValueError as error:
        raise DovetailError(f"{url} is not a Dovetail server: its answer is no JSON") from error


def key_header(url: str) -> dict[str, str]:
    """The key from the environment; else, for a server of this machine, its token if we may read that."""
    key = os.environ.get(KEY_VARIABLE) or token_for(url)
    return {"authorization": f"Bearer {key}"} if key else {}


def error_message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


_TIMEOUT_S = 30.0  # a server whose cores are all at work answers late
_HEADINGS = ("NODE", "STATE", "MEMORY", "MODEL", "TYPE", "RUN", "WAIT", "KV", "IN TIME", "TTFT", "TPOT")
_PIPE_WIDTH = 200  # columns of output to a pipe: programs need whole names


def show(status: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, no_wrap=True)
    for node in status["nodes"]:
        memory = human_bytes(node["resident_bytes"]) if node["resident_bytes"] else ""
        models = node["models"] or [None]
        for model in models:
            table.add_row(node["name"], node["state"], memory, *_model_cells(model))
    others = [model for model in status.get("models", ()) if model["node"] is None or model["parent"] is not None]
    for model in others:
        name = model["name"] + _adapter_note(model["parent"]) + _pull_note(model["pull"])
        table.add_row(model["node"] or "", model["state"], "", name, "", "", "", "", *_figures(model))
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    console.print(table)
    for model in others:
        if model["pull"] is not None and model["pull"]["error"]:
            console.print(f"{model['name']} could not be pulled: {model['pull']['error']}", markup=False)
    for node in status["nodes"]:
        if node.get("problem"):
            console.print(f"{node['name']} failed: {node['problem']}", soft_wrap=True, highlight=False, markup=False)
    if status["draining"]:
        console.print("The server is shutting down.")


def _model_cells(model: dict[str, Any] | None) -> list[str]:
    if model is None:
        return []
    arrived = _share(model["arrived_bytes"], model["total_bytes"])
    name = model["name"] if model["state"] == "loaded" else f"{model['name']} (loading{arrived})"
    blocks = f"{100 * model['blocks_used'] / model['blocks_total']:.0f} %" if model["blocks_total"] else ""
    return [name, model["dtype"] or "", str(model["running"]), str(model["waiting"]), blocks, *_figures(model)]


def _figures(model: dict[str, Any]) -> list[str]:
    """Share of requests within their targets, median TTFT and TPOT."""
    share = "" if model["attainment"] is None else f"{100 * model['attainment']:.0f} %"
    times = ["" if model[key] is None else f"{1000 * model[key]:.0f} ms" for key in ("ttft_p50_s", "tpot_p50_s")]
    return [share, *times]


def _adapter_note(base: str | None) -> str:
    return f" (adapter of {base})" if base is not None else ""


def _pull_note(pull: dict[str, Any] | None) -> str:
    """What failed is told of below the table, in a line of its own."""
    if pull is None or pull["error"]:
        return ""
    return f" ({pull['stage'] or pull['state']}{_share(pull['done_bytes'], pull['total_bytes'])})"


def _share(done: int, total: int) -> str:
    return f" {100 * done / total:.0f} %" if total else ""
