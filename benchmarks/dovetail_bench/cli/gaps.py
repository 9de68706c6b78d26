"""`bench batch`: clients alone, and beside a batch that never ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.output import print_json
from dovetail.machine import usable_cores
from dovetail_bench.cli.many import _default_folder, _range
from dovetail_bench.cli.progress import progress, span

if TYPE_CHECKING:
    from dovetail_bench.shares import SharesReport


def batch(
    seconds: Annotated[float, typer.Option(help="Of each run of clients.", min=10.0)] = 60.0,
    rounds: Annotated[int, typer.Option(help="Of the batch alone, clients alone, and both.", min=1)] = 3,
    rate: Annotated[float, typer.Option(help="Requests of clients a second.", min=0.01)] = 0.5,
    models: Annotated[int, typer.Option(help="Copies of SmolLM2-135M, or random models of --shape.", min=1)] = 2,
    device: Annotated[str, typer.Option(help="cpu, or a GPU as cuda:N.")] = "cpu",
    shape: Annotated[str, typer.Option(help="Of the random models on a GPU: tiny, 1b, 3b or 8b.")] = "8b",
    input_tokens: Annotated[str, typer.Option("--input", help="Prompt tokens, from-to.")] = "64-256",
    output_tokens: Annotated[str, typer.Option("--output", help="Answer tokens, from-to.")] = "16-64",
    keys: Annotated[
        bool, typer.Option("--keys", help="Two keys with a batch each, and clients of a third: shares of tokens.")
    ] = False,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.")] = 0,
    folder: Annotated[
        Path | None, typer.Option(help="Of models and logs.  [default: bench/many under $DOVETAIL_HOME]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """What a batch costs clients (targets met, first token, gaps between tokens), and what it makes of idle time.

    Run it while nothing else does.

    Example: dovetail bench batch --seconds 60 --rounds 3
    """
    from dovetail.errors import ConfigError
    from dovetail_bench.fleet import Fleet
    from dovetail_bench.gaps import SETTLE_S, measure
    from dovetail_bench.load import Mix
    from dovetail_bench.shares import measure as measure_shares

    place = folder or _default_folder()
    place.mkdir(parents=True, exist_ok=True)
    lengths = _range(input_tokens, "--input"), _range(output_tokens, "--output")
    mix = Mix(seconds / 60, rate, 1.0, 1.0, *lengths, seed)
    total = span(rounds * (2 * seconds + (0 if keys else seconds / 3) + 2 * SETTLE_S))
    if keys and device != "cpu":
        raise ConfigError("--keys: shares of keys are measured on CPUs, not with --device")
    if keys:
        with progress(f"{rounds} rounds of clients alone and beside the batches of two keys: {total}.") as step:
            made = Fleet(place).make(models, 0, step)
            shares = measure_shares(made, mix, rounds, place, usable_cores(), step)
        return print_json(shares) if as_json else _show_shares(shares)
    with progress(f"{rounds} rounds of the batch alone, clients alone and both: {total}.") as step:
        if device == "cpu":
            made = Fleet(place).make(models, 0, step)
        else:
            from dovetail_bench.random_models import random_models  # wants Triton

            made = random_models(place, shape, models, step)
        report = measure(made, mix, rounds, place, usable_cores(), step, device)
    if as_json:
        print_json(report)
        return
    for number, one in enumerate(report.rounds, start=1):
        typer.echo(
            f"round {number}: batch alone {one.full_tokens_per_s:.0f} tokens/s, beside clients {one.tokens_per_s:.0f}; "
            f"clients alone take {one.busy:.0%} of the time; first token p50 {one.alone.first_p50_s * 1000:.1f} and "
            f"{one.beside.first_p50_s * 1000:.1f} ms, p95 {one.alone.first_p95_s * 1000:.1f} and "
            f"{one.beside.first_p95_s * 1000:.1f} ms, gap p99 {one.alone.gap_p99_s * 1000:.1f} and "
            f"{one.beside.gap_p99_s * 1000:.1f} ms; {'processors' if device == 'cpu' else 'the card'} busy: "
            f"{one.cores_full:.2f} with the batch alone, {one.cores_beside:.2f} with both"
        )
    low, high = report.spread["of_idle"]
    typer.echo(
        f"targets met {report.attainment_alone:.1%} alone, {report.attainment_beside:.1%} beside; first token p95 "
        f"{report.first_p95:.2f}, gap p99 {report.gap_p99:.2f} of alone; {report.of_idle:.0%} of what clients leave is "
        f"used ({low:.0%} to {high:.0%})"
    )


def _show_shares(report: SharesReport) -> None:
    for number, one in enumerate(report.rounds, start=1):
        typer.echo(
            f"round {number}: {' and '.join(map(str, one.tokens))} tokens; of {one.alone.requests} requests each "
            f"{one.alone.attained} in time alone and {one.beside.attained} beside; first token p95 "
            f"{one.alone.first_p95_s * 1000:.0f} and {one.beside.first_p95_s * 1000:.0f} ms"
        )
    typer.echo(
        f"{' and '.join(map(str, report.tokens))} tokens: the smaller share is {report.apart:.1%} less; targets met "
        f"{report.attainment_alone:.1%} alone, {report.attainment_beside:.1%} beside"
    )
