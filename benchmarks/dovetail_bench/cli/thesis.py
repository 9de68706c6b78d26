"""`bench thesis`: how far the reproduction of the thesis's frontiers hangs on each fitted constant."""

from __future__ import annotations

from typing import Annotated

import typer

from dovetail.cli.output import print_json, print_table
from dovetail_bench.cli.progress import progress


def thesis(as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False) -> None:
    """Regions of the cheapest mode by SLO for WRN50-5 and WRN50-4, with each constant of the platform changed by half.

    Example: dovetail bench thesis
    """
    from dovetail_bench.thesis_platforms import sensitivity

    with progress("Plans two networks once for each constant and factor.") as step:
        rows = []
        for row in sensitivity():
            rows.append(row)
            step("constants and factors", len(rows), 0)
    if as_json:
        print_json(rows)
        return
    print_table(tuple(rows[0]), [tuple(row.values()) for row in rows])
