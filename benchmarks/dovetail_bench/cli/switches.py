"""`bench switches`: what exchanging models on a GPU costs the stream of another one."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.output import print_json, print_table


def switches(
    shape: Annotated[str, typer.Option(help="Of the three random models: tiny, 1b, 3b or 8b.")] = "3b",
    count: Annotated[int, typer.Option("--switches", help="Calls of a model that is not on the card.", min=2)] = 300,
    dtype: Annotated[str, typer.Option(help="Type to compute in; f32 = texts are compared to the token.")] = "auto",
    folder: Annotated[
        Path | None, typer.Option(help="Keeps the models between runs.  [default: one that goes]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Time first texts of models that arrive from host memory, and the gaps in another model's stream meanwhile.

    Three models share a card with room for two and a half: one streams, the others are called in turns.

    Example: dovetail bench switches --switches 300 --json
    """
    from dovetail_bench.gpu_switches import SwitchBench

    with tempfile.TemporaryDirectory() as kept:
        found = SwitchBench(folder or Path(kept), shape, dtype, partial(typer.echo, err=True)).run(count)
    if as_json:
        print_json(found)
        return
    rows = [
        ("first text", *(f"{value:.1f}" for value in found.first_text_ms.values()), f"the link alone {found.wire_ms}"),
        ("gap of the stream", *(f"{value:.1f}" for value in found.gap_ms.values()), f"a token {found.token_ms}"),
    ]
    print_table(("milliseconds", "p50", "p99", "max", "beside"), rows)
    typer.echo(f"{found.equal_texts} of {found.texts} texts as before, {found.long_gaps} gaps above two token times")
