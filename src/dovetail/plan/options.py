"""All that a platform sells for one model, priced: options by mode and batch size, those kept that no other beats (P4).

The thesis tunes stages by ternary search. Billed quanta make a stage's cost neither smooth nor unimodal, so the stages'
options are joined exactly instead: a sum of latencies against a sum of costs, of which the frontier is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from dovetail.plan.function_profile import FunctionProfile, PartitionSection, StageSection
from dovetail.plan.latency import CpuLatency, mean_billed_s
from dovetail.plan.prices import GpuSizes, PriceSheet

GPU_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)


class Mode(StrEnum):
    CPU = "cpu"
    GPU = "gpu"
    PARTITIONED = "partitioned"


ALL_MODES = tuple(Mode)


@dataclass(frozen=True)
class Option:
    """A mode, sizes and a batch size, with what a batch takes and costs."""

    mode: Mode
    batch: int  # the most requests in one run
    vcpus: tuple[float, ...]  # of the function, or of a worker of each stage
    memory_gb: tuple[float, ...]
    gpu_gb: float
    p99_s: float  # of a full batch, with the reserve
    mean_s: tuple[float, ...]  # of a batch of 1, 2, …
    costs: tuple[float, ...]  # of a batch of 1, 2, …: every function of it
    cold_s: float  # start of the functions, when none is warm
    cold_cost: float
    per_second: float  # of all its functions while they run
    template: int = 0  # which of the profile's, if partitioned


@dataclass(frozen=True)
class OptionTable:
    """Options of one mode and batch size by rising latency and falling cost."""

    mode: Mode
    batch: int
    options: tuple[Option, ...]


def build_tables(profile: FunctionProfile, sheet: PriceSheet, reserve: float = 0.0) -> list[OptionTable]:
    """`reserve`: the share by which a run on CPUs may be longer than profiled."""
    cpu = ((batch, _reserved(_cpu(profile, sheet, batch), reserve)) for batch in sorted(profile.cpu))
    tables = [OptionTable(Mode.CPU, batch, _frontier(options)) for batch, options in cpu]
    if profile.gpu is not None and sheet.gpu is not None:
        sizes = [batch for batch in GPU_BATCHES if batch <= profile.gpu.max_batch]
        tables += [OptionTable(Mode.GPU, b, _frontier(_gpu(profile, sheet, sheet.gpu, b))) for b in sizes]
    usable = [template for template in enumerate(profile.partitions) if len(template[1].stages) <= sheet.max_stages]
    for batch in sorted({batch for _, template in usable for batch in template.stages[0].cpu}):
        own = [template for template in usable if batch in template[1].stages[0].cpu]
        priced = (option for place, template in own for option in _partitioned(profile, place, template, sheet, batch))
        tables.append(OptionTable(Mode.PARTITIONED, batch, _frontier(_reserved(priced, reserve))))
    return [table for table in tables if table.options]


def _reserved(options: Iterable[Option], reserve: float) -> Iterable[Option]:
    return (replace(option, p99_s=option.p99_s * (1 + reserve)) for option in options) if reserve else options


def _frontier(options: Iterable[Option]) -> tuple[Option, ...]:
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (option.p99_s, option.costs[-1])):
        if not kept or option.costs[-1] < kept[-1].costs[-1]:
            kept.append(option)
    return tuple(kept)


def _profiled(profile: FunctionProfile, sheet: PriceSheet) -> list[float]:
    least, most = profile.vcpus
    return [vcpus for vcpus in sheet.cpu.vcpus if least <= vcpus <= most]


def _cold_cost(sheet: PriceSheet, per_second: float, seconds: float) -> float:
    return per_second * sheet.billed_s(seconds) if sheet.cold_start_billed else 0.0


def _run_cost(sheet: PriceSheet, per_second: float, mean_s: float, p99_s: float) -> float:
    return sheet.rates.invocation + per_second * mean_billed_s(mean_s, p99_s, sheet.quantum)


def _cpu(profile: FunctionProfile, sheet: PriceSheet, batch: int) -> Iterable[Option]:
    latency, cold_s = profile.cpu_latency, profile.cold_start_s.cpu
    return _on_cpus(Mode.CPU, latency, profile.memory_gb, 1, cold_s, _profiled(profile, sheet), sheet, batch)


def _stage(stage: StageSection, profile: FunctionProfile, sheet: PriceSheet, batch: int) -> Iterable[Option]:
    cold_s, sizes = profile.cold_start_s.stage, _profiled(profile, sheet)
    return _on_cpus(Mode.PARTITIONED, stage.latency, stage.memory_gb, stage.workers, cold_s, sizes, sheet, batch)


def _on_cpus(
    mode: Mode,
    latency: CpuLatency,
    need_gb: float,
    workers: int,
    cold_s: float,
    sizes: Iterable[float],
    sheet: PriceSheet,
    batch: int,
) -> Iterable[Option]:
    """So many functions alike, side by side."""
    for vcpus in sizes:
        memory_gb, p99_s = sheet.cpu.memory_gb(vcpus, need_gb), latency.p99_s(batch, vcpus)
        if memory_gb is None or p99_s > sheet.run_limit:
            continue
        rate = sheet.per_second(vcpus, memory_gb)
        means = tuple(latency.mean_s(n, vcpus) for n in range(1, batch + 1))
        tails = (latency.p99_s(n, vcpus) for n in range(1, batch + 1))
        one = (_run_cost(sheet, rate, mean, p99) for mean, p99 in zip(means, tails, strict=True))
        costs = tuple(workers * cost for cost in one)
        cold_cost = workers * _cold_cost(sheet, rate, cold_s)
        size = (mode, batch, (vcpus,), (memory_gb,), 0.0)
        yield Option(*size, p99_s, means, costs, cold_s, cold_cost, workers * rate)


def _gpu(profile: FunctionProfile, sheet: PriceSheet, gpu: GpuSizes, batch: int) -> Iterable[Option]:
    latency, section = profile.gpu_latency, profile.gpu
    assert latency is not None
    assert section is not None
    cold_s = profile.cold_start_s.gpu
    for part_gb in gpu.memory_gb:
        if part_gb < section.memory_gb:
            continue
        rate = sheet.per_second(gpu.vcpus, gpu.host_memory_gb, part_gb)
        runs = [(latency.mean_s(n), latency.p99_s(n, part_gb, gpu.card_gb, gpu.slice)) for n in range(1, batch + 1)]
        # A part of a card that is served in turns is billed while it waits for them: (mean + longest)/2 in the mean.
        waits = [latency.longest_s(n, part_gb, gpu.card_gb, gpu.slice) for n in range(1, batch + 1)]
        means = tuple((mean + longest) / 2 for (mean, _), longest in zip(runs, waits, strict=True))
        costs = tuple(_run_cost(sheet, rate, mean, p99) for mean, (_, p99) in zip(means, runs, strict=True))
        memory = (gpu.host_memory_gb,)
        cold_cost = _cold_cost(sheet, rate, cold_s)
        yield Option(Mode.GPU, batch, (gpu.vcpus,), memory, part_gb, runs[-1][1], means, costs, cold_s, cold_cost, rate)


def _partitioned(
    profile: FunctionProfile, template: int, partition: PartitionSection, sheet: PriceSheet, batch: int
) -> Iterable[Option]:
    master = sheet.smallest_per_second(partition.master_memory_gb)
    if master is None:
        return
    stages = [list(_stage(stage, profile, sheet, batch)) for stage in partition.stages]
    passing_s = [(len(stages) - 1) * partition.passing(n) for n in range(1, batch + 1)]
    for choice in _joined(stages, master):
        parts = [options[place] for options, place in zip(stages, choice, strict=True)]
        yield replace(_with_master(_in_sequence(parts), sheet, master, passing_s), template=template)


def _joined(stages: Sequence[Sequence[Option]], master: float) -> Iterable[tuple[int, ...]]:
    """One option of each stage, so that none is both faster and cheaper. Cost has the master's time in it, because it
    runs for as long as all stages together."""
    kept: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for options in stages:
        priced = [(o.p99_s, o.costs[-1] + master * o.mean_s[-1], (place,)) for place, o in enumerate(options)]
        joined = sorted((a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a in kept for b in priced)
        kept, best = [], float("inf")
        for entry in joined:
            if entry[1] < best:
                best = entry[1]
                kept.append(entry)
    return (choice for _, _, choice in kept)


def _in_sequence(stages: Sequence[Option]) -> Option:
    """One stage after another. Tails add up as in (4.11), which overstates them: not every stage is slow at once."""
    return replace(
        stages[0],
        vcpus=tuple(stage.vcpus[0] for stage in stages),
        memory_gb=tuple(stage.memory_gb[0] for stage in stages),
        p99_s=sum(stage.p99_s for stage in stages),
        mean_s=tuple(map(sum, zip(*(stage.mean_s for stage in stages), strict=True))),
        costs=tuple(map(sum, zip(*(stage.costs for stage in stages), strict=True))),
        cold_s=max(stage.cold_s for stage in stages),
        cold_cost=sum(stage.cold_cost for stage in stages),
        per_second=sum(stage.per_second for stage in stages),
    )


def _with_master(option: Option, sheet: PriceSheet, master: float, passing_s: Sequence[float]) -> Option:
    means = tuple(mean + passing for mean, passing in zip(option.mean_s, passing_s, strict=True))
    p99_s = option.p99_s + passing_s[-1]
    tail = p99_s / means[-1]
    costs = tuple(
        cost + _run_cost(sheet, master, mean, mean * tail) for cost, mean in zip(option.costs, means, strict=True)
    )
    return replace(option, p99_s=p99_s, mean_s=means, costs=costs)
