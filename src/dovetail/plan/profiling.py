"""Measures a network as functions of several sizes on this machine, and fits its profile; the error is that at sizes
which were not fitted.

Rounds go over all sizes in turn, so that a slow minute of the machine slows none of them alone.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dovetail.errors import ConfigError
from dovetail.machine import read_cpu, usable_cores
from dovetail.plan.chains import Chain
from dovetail.plan.fits import (
    Point,
    fit_exponential,
    fit_line,
    fit_transfer,
    mape,
    percentile_99,
)
from dovetail.plan.function_profile import (
    Beside,
    ColdStarts,
    CurveSection,
    FunctionProfile,
    GpuSection,
    OnnxFile,
    PartitionSection,
    StageSection,
    StepSection,
    Triple,
)
from dovetail.plan.instances import Array, Instance, InstanceRun, StageSize
from dovetail.plan.known_chains import chain_named
from dovetail.plan.latency import CpuLatency
from dovetail.plan.limits import threads_of

GB = 1e9
GPU_VCPUS = 8.0  # beside a GPU
GPU_WARM_ROUNDS = 3
LEAST_POINTS = 3  # that an exponential needs
Show = Callable[[str], None]


@dataclass(frozen=True)
class Sweep:
    """What to measure."""

    vcpus: tuple[float, ...]  # fitted
    held_out: tuple[float, ...]  # predicted
    batches: tuple[int, ...]
    runs: int
    templates: tuple[tuple[tuple[int, int, int], ...], ...] = ()  # of each stage: first, end, workers

    @property
    def sizes(self) -> tuple[float, ...]:
        return tuple(sorted({*self.vcpus, *self.held_out}))


@dataclass(frozen=True)
class Error:
    """Of one mode at the sizes held out, as shares."""

    what: str
    mean: float
    p99: float
    points: tuple[tuple[float, float, float], ...]  # size, measured mean, predicted


Runs = dict[tuple[int, float], list[InstanceRun]]  # by batch and vCPUs


async def profile_cpu(chain: Chain, sweep: Sweep, show: Show) -> tuple[FunctionProfile, list[Error]]:
    if not chain.any_batch and sweep.batches != (1,):
        raise ConfigError(f"{chain.file}: made for one request at a time; export it with a batch of any size")
    show("one function")
    whole, memory_gb, start_s = await _measure(chain, [(0, len(chain.layers), 1)], sweep, show)
    curves = {batch: fit_curve(_points(whole, batch, sweep.vcpus)) for batch in sweep.batches}
    errors = [_cpu_error(f"cpu, batch {b}", curves, whole, b, sweep) for b in sweep.batches]
    partitions, slowest_start_s = [], 0.0
    for number, template in enumerate(sweep.templates):
        show(f"template {number}")
        runs, stage_gb, stage_start_s = await _measure(chain, template, sweep, show)
        section = _partition(template, runs, stage_gb, sweep)
        partitions.append(section)
        errors.append(_partition_error(f"partitioned, template {number}", section, runs, sweep))
        slowest_start_s = max(slowest_start_s, stage_start_s)
    show("beside others")
    beside = await _measure_beside(chain, sweep, whole, show)
    profile = FunctionProfile(
        model=chain.name,
        onnx=OnnxFile(file=chain.file, sha256=chain.digest) if chain.file else None,
        source=f"measured on {read_cpu().model}, {sweep.runs} runs of each size; the 99th percentile is the slowest",
        memory_gb=memory_gb[0],
        vcpus=(min(sweep.sizes), max(sweep.sizes)),
        cpu=curves,
        partitions=tuple(partitions),
        cold_start_s=ColdStarts(cpu=start_s, stage=slowest_start_s),
        beside=beside,
    )
    return profile, errors


async def _measure_beside(chain: Chain, sweep: Sweep, alone: Runs, show: Show) -> Beside:
    """As many functions at once as there are cores for, of the smallest size, against the same alone."""
    vcpus, batch = min(sweep.sizes), max(sweep.batches)
    count = int(usable_cores() / vcpus)
    if count < 2:
        return Beside()
    sizes = [StageSize(0, len(chain.layers), 1, vcpus)]
    instances: list[Instance] = []
    try:
        for _ in range(count):
            instances.append(await Instance.start(chain, sizes))
            await instances[-1].run(_images(chain, batch))
        show(f"{count} functions of {vcpus:g} vCPUs")
        runs = await asyncio.gather(*(_runs_of(chain, instance, batch, sweep.runs) for instance in instances))
    finally:
        await asyncio.gather(*(instance.close() for instance in instances))
    together = [seconds for own in runs for seconds in own]
    apart = [run.stages[0].workers_s[0] for run in alone[batch, vcpus]]
    mean = sum(together) / len(together) * len(apart) / sum(apart)
    return Beside(mean=max(mean, 1.0), p99=max(percentile_99(together) / percentile_99(apart), 1.0))


async def _runs_of(chain: Chain, instance: Instance, batch: int, count: int) -> list[float]:
    """Two more than are told of: while others begin or have ended, it has more room than it should."""
    taken = [(await instance.run(_images(chain, batch))).stages[0].workers_s[0] for _ in range(count + 2)]
    return taken[1:-1]


@dataclass(frozen=True)
class GpuSweep:
    batches: tuple[int, ...]  # fitted
    held_out: tuple[int, ...]  # predicted
    runs: int
    limit_s: float | None = None  # no further round after so long

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted({*self.batches, *self.held_out}))


async def profile_gpu(
    profile: FunctionProfile, device: str, sweep: GpuSweep, show: Show
) -> tuple[FunctionProfile, list[Error]]:
    """The same profile with the GPU's part. The first error is of what plans use, the second of a straight line."""
    chain = chain_named(profile.model)
    instance = await Instance.start(chain, [StageSize(0, len(chain.layers), 1, GPU_VCPUS)], device)
    try:
        seconds = await _measure_gpu(chain, instance, sweep, lambda what: show(f"{device}, {what}"))
        function, start_s = instance.functions[0], instance.start_s
    finally:
        await instance.close()
    mean = {batch: sum(taken) / len(taken) for batch, taken in seconds.items()}
    tail = {batch: percentile_99(taken) for batch, taken in seconds.items()}
    section = _gpu_section(sweep, mean, tail, function.memory_bytes / GB)
    starts = profile.cold_start_s.model_copy(update={"gpu": start_s})
    rounds = len(seconds[sweep.batches[0]])
    source = f"GPU measured on {function.hardware}, {rounds} runs of each batch size; the rest {profile.source}"
    found = profile.model_copy(update={"gpu": section, "cold_start_s": starts, "source": source})
    latency = found.gpu_latency
    assert latency is not None
    points = [(float(batch), mean[batch]) for batch in sweep.held_out]
    tails = [(float(batch), tail[batch]) for batch in sweep.held_out]
    return found, [
        _gpu_error("gpu", lambda b: latency.mean_s(int(b)), section, points, tails),
        _gpu_error("gpu, straight line", latency.line_s, section, points, tails),
    ]


async def _measure_gpu(chain: Chain, instance: Instance, sweep: GpuSweep, show: Show) -> dict[int, list[float]]:
    seconds: dict[int, list[float]] = {batch: [] for batch in sweep.sizes}
    images = {batch: _images(chain, batch) for batch in seconds}
    for number in range(GPU_WARM_ROUNDS):  # kernels are chosen in the first run of each size, then clocks rise
        for batch in seconds:
            show(f"warm-up {number + 1} of {GPU_WARM_ROUNDS}: batch {batch}")
            await instance.run(images[batch])
    started = time.perf_counter()
    for number in range(sweep.runs):
        show(f"round {number + 1} of {sweep.runs}")
        for batch, taken in seconds.items():
            taken.append((await instance.run(images[batch])).stages[0].workers_s[0])
        if sweep.limit_s is not None and time.perf_counter() - started > sweep.limit_s:
            break
    return seconds


def _gpu_section(sweep: GpuSweep, mean: dict[int, float], tail: dict[int, float], memory_gb: float) -> GpuSection:
    line = fit_line(sweep.batches, [mean[batch] for batch in sweep.batches])
    measured = {batch: mean[batch] for batch in sorted(sweep.batches)}
    tails = fit_line(list(measured.values()), [tail[batch] for batch in measured])
    return GpuSection(mean=line, p99=tails, memory_gb=memory_gb, max_batch=max(sweep.batches), measured=measured)


def _gpu_error(
    what: str,
    predicted: Callable[[float], float],
    section: GpuSection,
    points: Sequence[tuple[float, float]],
    tails: Sequence[tuple[float, float]],
) -> Error:
    kappa1, kappa2 = section.p99
    found = tuple((batch, seconds, predicted(batch)) for batch, seconds in points)
    return Error(what, mape(predicted, points), mape(lambda b: kappa1 * predicted(b) + kappa2, tails), found)


def _images(chain: Chain, batch: int) -> Array:
    return np.random.default_rng(batch).standard_normal((batch, *chain.input_shape), dtype=np.float32)


async def _measure(
    chain: Chain, template: Sequence[tuple[int, int, int]], sweep: Sweep, show: Show
) -> tuple[Runs, list[float], float]:
    """Runs, and of each stage the memory of a worker; the slowest start."""
    sizes = [StageSize(first, end, workers, max(sweep.sizes)) for first, end, workers in template]
    instance = await Instance.start(chain, sizes)
    runs: Runs = {(batch, vcpus): [] for batch in sweep.batches for vcpus in sweep.sizes}
    try:
        for batch in sweep.batches:  # memory is taken in the first run of each size
            await instance.run(_images(chain, batch))
        threads = threads_of(max(sweep.sizes))
        for number in range(sweep.runs):
            for (batch, vcpus), taken in runs.items():
                show(f"round {number + 1} of {sweep.runs}: batch {batch} on {vcpus:g} vCPUs")
                instance.resize(vcpus)
                if threads_of(vcpus) != threads:  # a stage opens its model anew, which is neither computing nor passing
                    threads = threads_of(vcpus)
                    await instance.run(_images(chain, batch))
                taken.append(await instance.run(_images(chain, batch)))
                await asyncio.sleep(0.05)  # let a quota that was overdrawn recover
        firsts, memory = instance.functions, []
        for size in sizes:
            memory.append(max(function.memory_bytes for function in firsts[: size.workers]) / GB)
            firsts = firsts[size.workers :]
        return runs, memory, instance.start_s
    finally:
        await instance.close()


def _points(runs: Runs, batch: int, sizes: Sequence[float], stage: int | None = None) -> list[Point]:
    points = []
    for vcpus in sizes:
        taken = runs[batch, vcpus]
        seconds = [
            max(run.stages[stage].workers_s) if stage is not None else run.stages[0].workers_s[0] for run in taken
        ]
        points.append(Point(vcpus, sum(seconds) / len(seconds), percentile_99(seconds), len(seconds)))
    return points


def fit_curve(points: Sequence[Point]) -> CurveSection:
    """One curve for each number of threads where there are points enough for that, else one for all."""
    by_threads: dict[int, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.x):
        by_threads.setdefault(math.ceil(point.x), []).append(point)
    parts = list(by_threads.items())
    if any(len(own) < LEAST_POINTS for _, own in parts):
        parts = [(0, list(points))]
    (_, first), *others = parts
    steps = tuple(
        StepSection(above=threads - 1, mean=_triple(own, "mean_s"), p99=_triple(own, "p99_s"))
        for threads, own in others
    )
    return CurveSection(mean=_triple(first, "mean_s"), p99=_triple(first, "p99_s"), steps=steps)


def _triple(points: Sequence[Point], what: Literal["mean_s", "p99_s"]) -> Triple:
    curve = fit_exponential([point.x for point in points], [getattr(point, what) for point in points])
    return curve.alpha, curve.beta, curve.gamma


def _cpu_error(what: str, curves: dict[int, CurveSection], runs: Runs, batch: int, sweep: Sweep) -> Error:
    from dovetail.plan.function_profile import cpu_latency

    latency: CpuLatency = cpu_latency(curves)
    points = _points(runs, batch, sweep.held_out)
    return Error(
        what,
        mape(lambda c: latency.mean_s(batch, c), [(point.x, point.mean_s) for point in points]),
        mape(lambda c: latency.p99_s(batch, c), [(point.x, point.p99_s) for point in points]),
        tuple((point.x, point.mean_s, latency.mean_s(batch, point.x)) for point in points),
    )


def _partition(
    template: Sequence[tuple[int, int, int]], runs: Runs, memory_gb: Sequence[float], sweep: Sweep
) -> PartitionSection:
    stages = []
    for place, (first, end, workers) in enumerate(template):
        curves = {b: fit_curve(_points(runs, b, sweep.vcpus, place)) for b in sweep.batches}
        stages.append(StageSection(layers=(first, end), workers=workers, memory_gb=memory_gb[place], cpu=curves))
    passes = len(template) - 1
    passing = [(b, run.passing_s / passes) for b in sweep.batches for c in sweep.vcpus for run in runs[b, c]]
    transfer = fit_transfer([batch for batch, _ in passing], [seconds for _, seconds in passing])
    return PartitionSection(transfer=(transfer.theta0, transfer.theta1), stages=tuple(stages))


def _partition_error(what: str, section: PartitionSection, runs: Runs, sweep: Sweep) -> Error:
    """End to end, the first batch size."""
    batch, passes = sweep.batches[0], (len(section.stages) - 1) * section.passing(sweep.batches[0])
    found, tails = [], []
    for vcpus in sweep.held_out:
        seconds = [run.seconds for run in runs[batch, vcpus]]
        predicted = sum(stage.latency.mean_s(batch, vcpus) for stage in section.stages) + passes
        tail = sum(stage.latency.p99_s(batch, vcpus) for stage in section.stages) + passes
        found.append((vcpus, sum(seconds) / len(seconds), predicted))
        tails.append(abs(tail - percentile_99(seconds)) / percentile_99(seconds))
    mean = sum(abs(predicted - measured) / measured for _, measured, predicted in found) / len(found)
    return Error(what, mean, sum(tails) / len(tails), tuple(found))
