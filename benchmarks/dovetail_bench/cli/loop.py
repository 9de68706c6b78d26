"""`bench loop`: streams that are replaced as they end, on one model and one GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.output import print_json
from dovetail_bench.cli.many import _range
from dovetail_bench.cli.progress import progress, span


def loop(
    shape: Annotated[str, typer.Option(help="Of the random model: tiny, 1b, 3b or 8b.")] = "8b",
    device: Annotated[str, typer.Option(help="A GPU, as cuda:N.")] = "cuda:0",
    streams: Annotated[int, typer.Option(help="At a time.", min=1)] = 256,
    input_tokens: Annotated[str, typer.Option("--input", help="Prompt tokens, from-to.")] = "128-2048",
    output_tokens: Annotated[str, typer.Option("--output", help="Answer tokens, from-to.")] = "100-800",
    seconds: Annotated[float, typer.Option(help="That are measured, of each round.", min=1.0)] = 30.0,
    rounds: Annotated[int, typer.Option(help="Each with other requests.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.")] = 0,
    folder: Annotated[Path | None, typer.Option(help="Keeps the model between runs.  [default: one that goes]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Tokens a second and gaps between tokens while each answer that ends is replaced by another prompt.

    Example: dovetail bench loop --streams 256 --seconds 30 --json
    """
    from dovetail_bench.closed_loop import measure
    from dovetail_bench.loop_client import LoopMix

    lengths = _range(input_tokens, "--input"), _range(output_tokens, "--output")
    mix = LoopMix(streams, *lengths, seconds=seconds, seed=seed)
    total = span(rounds * (mix.seconds + mix.settle_s))
    with tempfile.TemporaryDirectory() as kept, progress(f"{rounds} rounds of {streams} streams: {total}.") as step:
        found = measure(folder or Path(kept), shape, device, mix, rounds, step)
    if as_json:
        print_json(found)
        return
    for one in found:
        typer.echo(
            f"{one.tokens_per_s:.0f} tokens/s beside {one.prompt_tokens_per_s:.0f} of prompts; gap p50 "
            f"{one.gap_s['p50'] * 1000:.1f}, p99 {one.gap_s['p99'] * 1000:.1f}, longest {one.gap_s['max'] * 1000:.0f} "
            f"ms; first text p50 {one.first_s['p50'] * 1000:.0f}, p95 {one.first_s['p95'] * 1000:.0f} ms; "
            f"{one.turns:.1f} iterations a second"
        )
