"""`bench sampling`: what temperature, filters, penalties and grammars cost a GPU, beside greedy decoding."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.output import print_json, print_table
from dovetail.errors import ConfigError

ALL_KINDS = "greedy,temperature 1,top-p,top-p + penalties,top-k 50,schema,logprobs 5"


def sampling(
    model: Annotated[str, typer.Option(help="Shape of the random model: 0.5B, 1B or 8B.")] = "8B",
    device: Annotated[str, typer.Option(help="A GPU, as cuda:N.")] = "cuda:0",
    batches: Annotated[str, typer.Option(help="Sequences that decode together.")] = "1,8,32,128,256",
    kinds: Annotated[str, typer.Option(help="Of sampling; schema = 16 rows with one.")] = ALL_KINDS,
    context: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Time a token with different sampling parameters, in turns, through scheduler and executor.

    Example: dovetail bench sampling --batches 1,256 --json
    """
    from dovetail_bench.gpu_sampling import SamplingBench

    sizes = [int(size) for size in batches.split(",") if size.strip().isdigit()]
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"--batches: {batches!r} is not a list of numbers such as 1,8,32")
    chosen = [kind.strip() for kind in kinds.split(",") if kind.strip()]
    bench = SamplingBench(device, model, partial(typer.echo, err=True))
    with tempfile.TemporaryDirectory() as folder:
        cells = bench.run(sizes, chosen, context, Path(folder))
    if as_json:
        print_json(cells)
        return
    rows = [(cell.kind, str(cell.batch), f"{cell.ms:.2f}", f"{cell.of_greedy:.3f}") for cell in cells]
    print_table(("sampling", "batch", "ms", "of greedy"), rows)
