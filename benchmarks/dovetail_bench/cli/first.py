"""`bench first`: what the first requests of a fresh server on a GPU wait for."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.output import print_json, print_table


def first(
    shape: Annotated[str, typer.Option(help="Of the random model: tiny, 1b, 3b or 8b.")] = "8b",
    folder: Annotated[
        Path | None, typer.Option(help="Keeps the model between runs; its kernels must not be there yet.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Time first requests and first crowds of fresh servers whose kernels `doctor --prepare` has compiled.

    Each is the first thing that its process is asked for; the same again is what it is compared with.

    Example: dovetail bench first --shape 8b --json
    """
    from dovetail_bench.gpu_first import FirstBench

    with tempfile.TemporaryDirectory() as kept:
        found = FirstBench(folder or Path(kept), shape, partial(typer.echo, err=True)).run()
    if as_json:
        print_json(found)
        return
    rows = [
        (name, f"{case.first_s * 1e3:.0f}", f"{case.warm_s * 1e3:.0f}", f"{case.ratio:.2f}")
        for name, case in found.cases.items()
    ]
    print_table(("requests", "first ms", "warm ms", "ratio"), rows)
    typer.echo(
        f"prepared in {found.prepare_s:.1f} s ({found.prepared_bytes / 1e6:.1f} MB), ready {found.ready_s:.1f} s"
    )
