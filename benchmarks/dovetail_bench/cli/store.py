"""`bench store`: how fast checkpoints load, next to the disk's own speed and to peers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.output import human_bytes, print_json
from dovetail_bench.cli.progress import progress

if TYPE_CHECKING:
    from dovetail_bench.store_bench import Result
    from dovetail_bench.store_suite import Suite


class Device(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


def store(
    models: Annotated[str, typer.Option(help="Shapes of random checkpoints, of: 1b, 3b, tiny.")] = "1b,3b",
    rounds: Annotated[int, typer.Option(help="Loads of each contender in each state, in turns.", min=1)] = 5,
    loaders: Annotated[
        str | None, typer.Option(help="Only these contenders, by the start of their names; fio always takes part.")
    ] = None,
    device: Annotated[Device, typer.Option(help="Where the tensors are wanted.")] = Device.CPU,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="Add the parts of our loading path one by one.")
    ] = False,
    lora: Annotated[bool, typer.Option("--lora", help="Load a LoRA adapter (rank 64, all matrices) instead.")] = False,
    folder: Annotated[
        Path | None, typer.Option(help="Where to write the checkpoints: the disk to measure.  [default: the store]")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the checkpoints there, for the next run.")] = False,
    install: Annotated[bool, typer.Option(help="Install peers that are missing, each apart from all else.")] = True,
    drop_caches: Annotated[
        bool, typer.Option(help="Before a cold load empty the whole page cache, where allowed, not only of its file.")
    ] = True,
    pre_read: Annotated[
        bool, typer.Option(help="Before a cold load read its file past the page cache: caches below are alike for all.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Load checkpoints cold and warm, our way and as others do, against the disk as fio measures it.

    Run it while nothing else runs. Peers are installed once, in environments of their own.

    Example: dovetail bench store --models 1b --rounds 5 --breakdown
    """
    from dovetail_bench.store_suite import Plan, Watch, run_suite

    plan = Plan(
        models=tuple(name.strip() for name in models.split(",") if name.strip()),
        rounds=rounds,
        loaders=tuple(name.strip() for name in loaders.split(",")) if loaders else None,
        device=device.value,
        breakdown=breakdown,
        lora=lora,
        folder=folder,
        keep=keep,
        install=install,
        pre_read=pre_read,
        drop_everything=drop_caches,
    )
    expected = f"Writes {models} ({device.value}) unless kept, then loads each {rounds} times in every way"
    with progress(f"{expected}; the time left is told from the second load on.") as step:
        suite = run_suite(plan, Watch(step))
    for failure in suite.failures:
        typer.echo(f"not measured: {failure.loader}: {failure.reason}", err=as_json)
    for note in suite.notes:
        typer.echo(note, err=as_json)
    if as_json:
        print_json(suite.results)
    else:
        _print(suite)


def _print(suite: Suite) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    groups = dict.fromkeys((result.model, result.state) for result in suite.results)
    for model, state in groups:
        rows = [result for result in suite.results if (result.model, result.state) == (model, state)]
        size = human_bytes(max(result.bytes for result in rows))
        headings = ("loader", "GB/s", "median", "fastest", "slowest", "of the disk")
        table = Table(*headings, title=f"{model}, {state} ({size})", box=None, title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        for result in sorted(rows, key=lambda result: -result.gbps):
            table.add_row(*_cells(result))
        console.print(table)


def _cells(result: Result) -> tuple[str, ...]:
    name = f"{result.loader}: {result.setting}" if result.setting else result.loader
    ratio = "" if result.ratio_to_fio is None else f"{result.ratio_to_fio:.2f}"
    if result.ratio_to_pinned_copy is not None:
        ratio = f"{result.ratio_to_pinned_copy:.2f} of pinned copy"
    seconds = (result.seconds_median, result.seconds_min, result.seconds_max)
    return (name, f"{result.gbps:.2f}", *(f"{value:.3f} s" for value in seconds), ratio)
