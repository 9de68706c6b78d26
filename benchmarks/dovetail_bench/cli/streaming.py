"""`bench streaming`: models whose layers are read from host memory with every iteration on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from dovetail.cli.output import print_json, print_table
from dovetail.errors import ConfigError


def streaming(
    model: Annotated[str, typer.Option(help="Shape of the random model: 0.5B, 1B or 8B.")] = "8B",
    device: Annotated[str, typer.Option(help="A GPU, as cuda:N.")] = "cuda:0",
    precisions: Annotated[str, typer.Option(help="Of the weights: 16, 8, 4, fp8.")] = "16",
    shares: Annotated[str, typer.Option(help="Of the layers that stay on the GPU.")] = "0,0.25,0.5,0.75,1",
    rows: Annotated[str, typer.Option(help="Of an iteration; up to 256 are sequences.")] = "1,8,64,256,1024,2048",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Time iterations whose layers come from a host pool, beside the link's own speed and beside resident layers.

    Example: dovetail bench streaming --precisions 16,4 --json
    """
    from dovetail_bench.streaming import StreamingBench

    counts = [int(count) for count in rows.split(",") if count.strip().isdigit()]
    if not counts or min(counts) < 1:
        raise ConfigError(f"--rows: {rows!r} is not a list of numbers such as 1,8,64")
    try:
        parts = [float(share) for share in shares.split(",")]
    except ValueError:
        raise ConfigError(f"--shares: {shares!r} is not a list of numbers from 0 to 1") from None
    cells = []
    for precision in precisions.split(","):
        bench = StreamingBench(device, model, precision.strip(), partial(typer.echo, err=True))
        cells += bench.run(parts, counts)
        bench.close()
    if as_json:
        print_json(cells)
        return
    found = [
        (cell.model, cell.metric, f"{cell.ms:.2f}", f"{cell.least_ms:.2f}", f"{cell.gb_per_s:.1f}") for cell in cells
    ]
    print_table(("model", "what", "ms", "at least", "GB/s"), found)
