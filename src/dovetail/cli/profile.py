"""`profile`: measures how fast models run on this machine, and keeps it for the scheduler and the simulator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.completion import local_models
from dovetail.cli.output import print_json
from dovetail.errors import ConfigError
from dovetail.modelspec import KvKind

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from dovetail.types import ModelCard
    from dovetail.worker.profiling import Errors, Measured


def profile(
    models: Annotated[
        list[str],
        typer.Argument(help="Names from `dovetail list`; one of each shape is enough.", autocompletion=local_models),
    ],
    threads: Annotated[int, typer.Option(help="As the node has; 0 = every core.", min=0)] = 0,
    device: Annotated[str, typer.Option(help="cpu, or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Compute type: auto, f32, bf16, f16.")] = "auto",
    kv: Annotated[KvKind, typer.Option(help="Keys and values, as `kv` in the configuration.")] = "auto",
    max_tokens: Annotated[int, typer.Option(help="Longest prompt measured.", min=64)] = 2048,
    max_batch: Annotated[int, typer.Option(help="Largest batch measured.", min=1)] = 32,
    check: Annotated[int, typer.Option(help="Compare predictions with so many random loads.", min=0)] = 0,
    store: Annotated[Path | None, typer.Option(help="Folder of the store.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Measure prefill and decode times of models on this machine.

    Run it while nothing else does: the scheduler plans with these times. A server finds them when it starts; what was
    never measured it estimates, and corrects as it serves.

    Example: dovetail profile smollm2-135m-instruct --check 100
    """
    from functools import partial

    from rich.progress import Progress

    from dovetail.config import StoreConfig
    from dovetail.engine.torch_import import import_torch_for_worker
    from dovetail.machine import usable_cores
    from dovetail.store import Catalogue

    import_torch_for_worker()
    import torch

    threads = threads or usable_cores()
    torch.set_num_threads(threads)
    folder = StoreConfig(path=store).profiles
    results = []
    for name in models:
        card = Catalogue(store).get(name)
        with Progress(disable=as_json or not sys.stderr.isatty()) as progress:
            task = progress.add_task(name, total=None)

            show = partial(_show, progress, task, name)
            results.append(_profile(card, folder, device, threads, dtype, kv, max_tokens, max_batch, check, show))
    if as_json:
        print_json(results)
        return
    for result in results:
        _print(result)


def _show(progress: Progress, task: TaskID, name: str, what: str, done: int, total: int) -> None:
    progress.update(task, description=f"{name}: {what}", completed=done, total=total)


def _profile(
    card: ModelCard,
    folder: Path,
    device: str,
    threads: int,
    dtype: str,
    kv: KvKind,
    max_tokens: int,
    max_batch: int,
    check: int,
    show: Any,
) -> dict[str, Any]:
    from dovetail.engine.devices.opening import open_device
    from dovetail.worker.hosting import Profiles
    from dovetail.worker.loading import InstanceConfig, build_runner
    from dovetail.worker.profiling import Profiler

    if card.spec.encoder is not None:
        raise ConfigError(f"{card.name} is an encoder: it has no decodes to measure; a node learns its pace as it runs")
    opened = open_device(device, threads)
    kind = opened.compute_dtype(dtype, card.dtype or "f32")
    longest = min(max_tokens, card.spec.context_length)
    kv_bytes = card.spec.kv_bytes_per_token(kind, kv) * (longest + 64) * max_batch
    config = InstanceConfig(card, kind, kv_bytes, 16, max_batch, opened.max_turn_tokens, longest + 64, kv)
    runner, _ = build_runner(config, opened)
    try:
        profiler = Profiler(runner, max_tokens, max_batch)
        measured = profiler.run(show)
        profiles = Profiles(folder, opened)
        prefill = [[sample.tokens, sample.seconds * 1e3] for sample in measured.prefill]
        profiles.store(card, kind, prefill, _rows(measured), kv)
        errors = profiler.check(measured.model, check, show) if check else None
    finally:
        runner.close()
    return {
        "model": card.name,
        "shape": profiles.shape_name(card, kind, kv),
        "device": profiles.device,
        "file": str(profiles.path),
        "prefill_ms": [[sample.tokens, round(sample.seconds * 1e3, 3)] for sample in measured.prefill],
        "decode_ms": _rows(measured),
        "errors": _shares(errors),
        "points": len(measured.spread),
        "unsteady": {what: round(ratio, 2) for what, ratio in measured.unsteady().items()},
    }


def _rows(measured: Measured) -> list[dict[str, Any]]:
    rows: dict[float, list[list[float]]] = {}
    for sample in measured.decode:
        rows.setdefault(sample.mean_length, []).append([sample.batch, round(sample.seconds * 1e3, 4)])
    return [{"mean_length": length, "batch_ms": points} for length, points in rows.items()]


def _shares(errors: Errors | None) -> dict[str, float] | None:
    return None if errors is None else {key: round(value, 4) for key, value in vars(errors).items()}


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{result['model']} ({result['shape']}) on {result['device']}", highlight=False)
    table = Table("prompt tokens", *[str(tokens) for tokens, _ in result["prefill_ms"]])
    table.add_row("ms", *[f"{ms:.1f}" for _, ms in result["prefill_ms"]])
    console.print(table)
    batches = sorted({batch for row in result["decode_ms"] for batch, _ in row["batch_ms"]})
    table = Table("decode ms: length \\ batch", *[str(batch) for batch in batches])
    for row in result["decode_ms"]:
        times = dict(map(tuple, row["batch_ms"]))
        table.add_row(str(row["mean_length"]), *[f"{times[b]:.1f}" if b in times else "" for b in batches])
    console.print(table)
    if result["errors"]:
        errors = result["errors"]
        console.print(
            f"predictions on {errors['loads']} random loads: prefill off by {errors['prefill_mean']:.1%} in the mean "
            f"(p90 {errors['prefill_p90']:.1%}), decode by {errors['decode_mean']:.1%} (p90 {errors['decode_p90']:.1%})"
        )
    console.print(f"kept in {result['file']}", highlight=False)
    warning = unsteady_warning(result["unsteady"], result["points"])
    if warning:
        console.print(warning, highlight=False, soft_wrap=True)


def unsteady_warning(unsteady: dict[str, float], points: int) -> str:
    """What to say of points that were measured beside other work; empty where none was."""
    if not unsteady:
        return ""
    worst = max(unsteady, key=lambda what: unsteady[what])
    return (
        f"warning: {len(unsteady)} of {points} points varied more than twofold between repeats (worst: {worst}, "
        f"{unsteady[worst]:.1f} times). Something else used this machine; measure again while nothing else runs"
    )
