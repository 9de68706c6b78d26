"""`bench`: measurements, side by side with peers where there are any."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.output import print_json

if TYPE_CHECKING:
    from dovetail.bench.cold_start import Summary

app = typer.Typer(help="Measure this machine and this build.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Measure this machine and this build. Run it while nothing else does."""


@app.command("cold-start")
def cold_start(
    model: Annotated[str, typer.Argument(help="A name from `dovetail list`.")] = "smollm2-135m-instruct",
    runs: Annotated[int, typer.Option(help="Starts of each contender, in turns.", min=1)] = 5,
    transformers_folder: Annotated[
        Path | None, typer.Option(help="An HF folder of the same model, for transformers to load in the same run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Seconds from the start of a worker process to its first token (128-token prompt).

    Example: dovetail bench cold-start smollm2-135m-instruct --runs 5
    """
    from functools import partial

    from rich.progress import Progress

    from dovetail.bench.cold_start import compare, import_torch_s, start_transformers, start_worker
    from dovetail.store import Catalogue

    starts = [partial(start_worker, Catalogue().get(model))]
    if transformers_folder is not None:
        starts.append(partial(start_transformers, str(transformers_folder)))
    with Progress(disable=as_json or not sys.stderr.isatty()) as progress:
        task = progress.add_task("Starting", total=runs * len(starts))
        summaries = compare(starts, runs, lambda done, total: progress.update(task, completed=done))
    plain_s = import_torch_s()
    if as_json:
        print_json({"import_torch_s": plain_s, "engines": summaries})
    else:
        _print(summaries, plain_s)


def _print(summaries: list[Summary], plain_s: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("engine", "import", "load", "first token", "total (spread)", box=None)
    for each in summaries:
        parts = [f"{value:.3f} s" for value in (each.import_s, each.load_s, each.first_token_s)]
        table.add_row(each.engine, *parts, f"{each.total_s:.3f} s ({each.total_spread_s:.3f})")
    Console().print(table)
    typer.echo(f"A plain `import torch` takes {plain_s:.2f} s here.")
