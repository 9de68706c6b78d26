"""`bench bucket`: a model in an S3 bucket behind a slow line, served while it downloads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.output import print_json, print_table
from dovetail_bench.cli.progress import progress, span


def bucket(
    limit: Annotated[float, typer.Option(help="Megabytes per second of the bucket's line.", min=1)] = 50.0,
    folder: Annotated[Path | None, typer.Option(help="For the model.  [default: $DOVETAIL_HOME/bench/bucket]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Serve a random model of 0.6 billion parameters from a slow bucket while it downloads.

    The bucket answers as S3 does, on this machine. Example: dovetail bench bucket --limit 50
    """
    from dovetail.machine import default_root
    from dovetail_bench.bucket import measure
    from dovetail_bench.register import ENTRIES

    place = folder or default_root() / "bench" / "bucket"
    place.mkdir(parents=True, exist_ok=True)
    with progress(f"2.5 GB (written the first time) through {limit:g} MB/s: {span(60 + 2500 / limit)}."):
        found = measure(place, limit, partial(typer.echo, err=True))
    if as_json:
        print_json(found)
        return
    heading, *rows = ENTRIES["bucket"].rows({name: getattr(found, name) for name in found.__struct_fields__})
    print_table(heading, rows)
