"""`dovetail plan profile`: measures a network as functions of several sizes, and fits what plans are made with."""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.output import print_json, print_table
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.plan.function_profile import FunctionProfile
    from dovetail.plan.profiling import Error

GPU_FITTED = "1,2,3,4,6,8,10,12,16,20,24,28,32"  # closely: kernels change from size to size
GPU_HELD_OUT = "5,7,14,18,22,26,30"
SILENT_S = 10.0  # without a terminal at most a line for so long
_STAGE = re.compile(r"(\d+)-(\d+)(?:x(\d+))?")


def profile(
    model: Annotated[str, typer.Argument(help="A .onnx file, or wrn50-K.")],
    vcpus: Annotated[str, typer.Option(help="Sizes that are fitted.")] = "0.5,0.75,1,1.2,1.6,2",
    held_out: Annotated[str, typer.Option(help="Sizes that the fit is judged by.")] = "0.6,0.9,1.4,1.8",
    batches: Annotated[str, typer.Option(help="Batch sizes on a CPU.")] = "1",
    runs: Annotated[int, typer.Option(help="Rounds over all sizes.", min=1)] = 5,
    template: Annotated[
        list[str] | None, typer.Option(help="Stages as FIRST-ENDxWORKERS, such as 0-9x2,9-18; again for more.")
    ] = None,
    stages: Annotated[
        list[int] | None, typer.Option(help="Also cut into so many stages, even by weights; again for more.", min=2)
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda:N: then the GPU's part alone is measured.")] = "cpu",
    gpu_batches: Annotated[str, typer.Option(help="Batch sizes that are fitted on a GPU.")] = GPU_FITTED,
    gpu_held_out: Annotated[str, typer.Option(help="Batch sizes that the GPU's fit is judged by.")] = GPU_HELD_OUT,
    limit_s: Annotated[
        float | None, typer.Option("--seconds", help="On a GPU, begin no further round after so many seconds.", min=1)
    ] = None,
    base: Annotated[str | None, typer.Option(help="Profile that a GPU's part is put into.  [default: MODEL]")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the profile here (YAML).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Measure a network on this machine by vCPUs, batch sizes and stages, and fit its profile.

    Run it while nothing else does. Errors are of sizes that were not fitted.

    Example: dovetail plan profile resnet50.onnx --stages 2 --stages 3 --out resnet50.yaml; on a GPU, dovetail plan
    profile wrn50-4 --device cuda:0 --runs 100 --seconds 60
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from dovetail.plan.function_profile import read_function_profile, write_function_profile
    from dovetail.plan.known_chains import even_stages, open_chain
    from dovetail.plan.onnx_graph import is_onnx
    from dovetail.plan.profiling import GpuSweep, Sweep, profile_cpu, profile_gpu

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=as_json or not sys.stderr.isatty()) as progress:
        task = progress.add_task(model, total=None)
        said_s = time.monotonic()

        def show(what: str) -> None:
            nonlocal said_s
            progress.update(task, description=f"{model}: {what}")
            if not sys.stderr.isatty() and time.monotonic() - said_s >= SILENT_S:
                said_s = time.monotonic()
                print(f"{model}: {what}", file=sys.stderr, flush=True)

        if device == "cpu":
            chain = open_chain(model)
            templates = [_stages(text, len(chain.layers)) for text in template or ()]
            templates += [even_stages(chain, count) for count in stages or ()]
            sizes = (_numbers(vcpus, "--vcpus"), _numbers(held_out, "--held-out"), _whole(batches, "--batches"))
            sweep = Sweep(*sizes, runs, tuple(templates))
            count = runs * len(sweep.sizes) * len(sweep.batches) * (1 + len(templates))
            what = "whole and in stages" if templates else "whole"
            print(f"{model}: {count} runs, {runs} of each of {len(sweep.sizes)} sizes, {what}", file=sys.stderr)
            found, errors = asyncio.run(profile_cpu(chain, sweep, show))
        else:
            if is_onnx(model):
                raise ConfigError(f"{model}: functions of ONNX files run on CPUs; leave out --device")
            known = read_function_profile(base or model)
            if known.model != model:
                raise ConfigError(f"--base {base}: a profile of {known.model}, not of {model}")
            sizes_gpu = _whole(gpu_batches, "--gpu-batches"), _whole(gpu_held_out, "--gpu-held-out")
            found, errors = asyncio.run(profile_gpu(known, device, GpuSweep(*sizes_gpu, runs, limit_s), show))
    if out is not None:
        write_function_profile(out, found)
    _print(found, errors, out, as_json)


def _print(found: FunctionProfile, errors: list[Error], out: Path | None, as_json: bool) -> None:
    if as_json:
        print_json({"profile": found.model_dump(mode="json", exclude_none=True), "errors": errors})
        return
    rows = [
        [error.what, f"{error.mean:.1%}", f"{error.p99:.1%}",
         ", ".join(f"{x:g}: {measured:.3g} s ({predicted:.3g})" for x, measured, predicted in error.points)]
        for error in errors
    ]  # fmt: skip
    print_table(("sizes held out", "error, mean", "error, p99", "measured (predicted)"), rows)
    stages = [f"{max(stage.memory_gb for stage in part.stages):.2f}" for part in found.partitions]
    print(f"memory: {found.memory_gb:.2f} GB in one function; largest stage of each template: {', '.join(stages)} GB")
    beside = found.beside
    print(f"while functions have all cores: {beside.mean:.3f} times as long in the mean, {beside.p99:.3f} times at p99")
    print(f"start: {found.cold_start_s.cpu:.2f} s, of a stage {found.cold_start_s.stage:.2f} s")
    if out is not None:
        print(f"wrote {out}")


def _stages(text: str, layers: int) -> tuple[tuple[int, int, int], ...]:
    stages: list[tuple[int, int, int]] = []
    for part in text.split(","):
        match = _STAGE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"--template {text}: expected stages such as 0-9x2,9-18")
        stages.append((int(match[1]), int(match[2]), int(match[3] or 1)))
    borders = [0, *(end for _, end, _ in stages)]
    if len(stages) < 2 or borders[-1] != layers or any(a >= b for a, b in itertools.pairwise(borders)):
        raise ConfigError(f"--template {text}: expected at least two stages that together have layers 0 to {layers}")
    if [first for first, _, _ in stages] != borders[:-1] or any(workers < 1 for _, _, workers in stages):
        raise ConfigError(f"--template {text}: each stage must begin where the one before ends, with a worker or more")
    return tuple(stages)


def _numbers(text: str, option: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{option} {text}: expected numbers with commas between them") from error


def _whole(text: str, option: str) -> tuple[int, ...]:
    return tuple(int(number) for number in _numbers(text, option))
