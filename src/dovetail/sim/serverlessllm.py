"""ServerlessLLM's evaluation of schedulers and whole systems (Fig 8–12) simulated beside the paper's numbers (L9).

Its test beds, its models, its loads; what the paper leaves open is assumed here and listed in
docs/reference/cluster.md.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any

from dovetail.policy.compositions import Composition
from dovetail.policy.placement import DeviceKind
from dovetail.profiles.hardware import PRESETS, Shape, hosting_of
from dovetail.profiles.storage import GB, SLLM_CLUSTER, Storage, Tier
from dovetail.sim.compositions import LOCALITY, RANDOM, SERVERLESSLLM, SHEPHERD
from dovetail.sim.driver import Simulation
from dovetail.sim.durations import Noise
from dovetail.sim.metrics import Fate, mean, percentile
from dovetail.sim.setup import NodeGroup, make_devices
from dovetail.sim.trace import Arrival
from dovetail.sim.workload import Spread

TIMEOUT_S = 300.0  # of a request, as in the paper
TPOT_S = 60.0  # nobody is refused for the pace: the paper has no such target
SPAN_S = 660.0  # of a run: 925 requests at 1.4 a second
LONGEST = 2048  # context of OPT
MODERATE_RPS = 0.5  # of Fig 9, 10 and 12: a Ray Serve that is short of GPUs with ShareGPT and not with GSM8K
ZIPF = 0.9  # how popularity falls with rank


@dataclass(frozen=True)
class Model:
    """One shape, of which a number of copies count as different models."""

    shape: Shape
    copies: int
    hardware: str  # of one device that holds it
    devices: int  # of a server with four GPUs


MODELS = {
    "OPT-6.7B": Model(Shape(12.4, 512, 32), 32, "a40-48g", 4),
    "OPT-13B": Model(Shape(23.9, 800, 40), 16, "a40-48g", 4),
    "OPT-30B": Model(Shape(61.5, 1344, 48), 8, "a40-48g-pair", 2),
}
# Lengths of prompts and answers. The answers are such that OPT-6.7B takes what the paper says on an A40: 8.9 s for
# ShareGPT (16 GPUs, at most 1.79 requests a second), 3.7 times as long as for GSM8K.
DATASETS = {
    "GSM8K": (Spread(62, 160), Spread(68, 190)),
    "ShareGPT": (Spread(120, 1400), Spread(200, 1100)),
}


@dataclass(frozen=True)
class System:
    """A scheduler, and how weights are loaded."""

    name: str
    composition: Composition
    storage: Storage = SLLM_CLUSTER
    is_stocked: bool = True  # disks have the models from the start
    kept_as: Tier = Tier.DISK  # an idle model stays for as long as a load from there takes


# Safetensors from the page cache after a download, and cold from an SSD: 12.1 s in the paper for 13.3 GB, of which the
# network takes 10.6; and 3.6 times slower than ServerlessLLM's loader where two SSDs give 12 GB/s.
RAY = replace(
    SLLM_CLUSTER,
    name="ray",
    memory_bytes=0,
    disk_bytes=0,
    link_bytes_per_s=9 * GB,
    is_queued=False,  # "assuming an exclusively occupied network"
    is_pipelined=False,
)
RAY_CACHE = replace(RAY, name="ray+cache", disk_bytes=int(160 * GB), disk_bytes_per_s=3.3 * GB)
SYSTEMS = {
    system.name: system
    for system in (
        System("serverlessllm", SERVERLESSLLM),
        System("shepherd*", SHEPHERD),
        System("random", RANDOM),
        System("locality", LOCALITY),
        System("ray serve", replace(RANDOM, name="ray serve"), RAY, is_stocked=False, kept_as=Tier.REMOTE),
        System("ray serve+cache", replace(RANDOM, name="ray serve+cache"), RAY_CACHE, is_stocked=False),
        System(
            "kserve",
            replace(RANDOM, name="kserve"),
            replace(RAY, name="kserve", network_bytes_per_s=0.125 * GB),
            False,
            Tier.REMOTE,
        ),
    )
}
SCHEDULERS = ("serverlessllm", "shepherd*", "random", "locality")
WHOLE = ("serverlessllm", "ray serve", "ray serve+cache")


@dataclass(frozen=True)
class Cell:
    """One run, and what the paper says of it."""

    figure: str
    system: str
    model: str = "OPT-6.7B"
    dataset: str = "GSM8K"
    rps: float = 0.8
    gpus: int = 4  # of each server
    models: int | None = None
    servers: int = 4
    cv: float = 8.0
    is_per_model: bool = False  # each model has a process of that CV
    published: str = ""

    def labels(self) -> dict[str, Any]:
        given = MODELS[self.model].copies if self.models is None else self.models
        facts = {"figure": self.figure, "model": self.model, "models": given, "dataset": self.dataset}
        return {**facts, "rps": self.rps, "GPUs": self.gpus, "system": self.system}


def arrivals_of(cell: Cell, seed: int, span_s: float = SPAN_S) -> list[Arrival]:
    """Calls of models drawn by popularity (Zipf). A Gamma process of the given CV makes all of them, or those of each
    model, as AlpaServe's generator does that the paper follows."""
    rng = Random(seed)
    number = max(round(cell.rps * span_s), 1)
    weights = list(accumulate(1.0 / (rank + 1) ** ZIPF for rank in range(cell.models or MODELS[cell.model].copies)))
    if cell.is_per_model:
        called = Counter(bisect(weights, rng.random() * weights[-1]) for _ in range(number))
        calls = sorted((at_s, one) for one, count in called.items() for at_s in _times(rng, count, span_s, cell.cv))
        return [_arrival(cell, rng, at_s, model) for at_s, model in calls]
    times = _times(rng, number, span_s, cell.cv)
    return [_arrival(cell, rng, at_s, bisect(weights, rng.random() * weights[-1])) for at_s in times]


def _arrival(cell: Cell, rng: Random, at_s: float, model: int) -> Arrival:
    prompts, answers = DATASETS[cell.dataset]
    prompt = prompts.draw(rng, LONGEST // 2)
    answer = answers.draw(rng, LONGEST - prompt)
    return Arrival(at_s, model, prompt, answer, ttft_s=TIMEOUT_S, tpot_s=TPOT_S)


def _times(rng: Random, count: int, span_s: float, cv: float) -> list[float]:
    """So many calls within the span, the gaps as of a Gamma process."""
    gaps = [rng.gammavariate(1.0 / cv**2, 1.0) for _ in range(count + 1)]
    scale = span_s / max(sum(gaps), 1e-300)
    return [scale * now for now in accumulate(gaps[:count])]


def build_cell(cell: Cell, seed: int = 0, span_s: float = SPAN_S) -> Simulation:
    system, model = SYSTEMS[cell.system], MODELS[cell.model]
    arrivals = arrivals_of(cell, seed, span_s)
    hardware = PRESETS[model.hardware]
    devices = max(model.devices * cell.gpus // 4, 1)
    storage = system.storage
    if model.devices < 4:  # a device of two GPUs has two links
        storage = replace(storage, link_bytes_per_s=2 * storage.link_bytes_per_s)
    hosting = hosting_of(hardware, model.shape)
    keep_alive_s = storage.load_s(system.kept_as, hosting.weight_bytes)
    hosting = replace(hosting, slots=1, concurrency=1, half_concurrency=1, keep_alive_s=keep_alive_s)
    catalogue = {str(number): hosting for number in range(cell.models or model.copies)}
    group = NodeGroup(
        name="gpu",
        kind=DeviceKind.GPU,
        count=cell.servers * devices,
        catalogue=catalogue,
        memory_gib=hardware.memory_gib,
        hardware=model.hardware,
        storage=storage,
        per_machine=devices,
        is_stocked=system.is_stocked,
    )
    nodes = make_devices([group], arrivals, system.composition, Noise(Random(seed), 0.02))
    simulation = Simulation(nodes, system.composition, arrivals, horizon_s=span_s)
    simulation.keep_samples = False
    return simulation


def run_cell(cell: Cell, seeds: Sequence[int] = (0,), span_s: float = SPAN_S) -> dict[str, Any]:
    """Over several seeds, counted as one run."""
    startups: list[float] = []
    moved = requests = finished = 0
    loads = dict.fromkeys(Tier, 0)
    for seed in seeds:
        simulation = build_cell(cell, seed, span_s)
        result = simulation.run()
        startups += [record.startup_s(TIMEOUT_S) for record in result.waited_for]
        requests += len(result.waited_for)
        finished += result.count(Fate.FINISHED)
        controller = simulation.cluster.controller
        moved += controller.migrations.completed if cell.system == "serverlessllm" else controller.displacements.evicted
        for machine in {
            device.machine.name: device.machine for device in simulation.devices if device.machine
        }.values():
            loads = {tier: loads[tier] + machine.loads[tier] for tier in Tier}
    startups.sort()
    total = max(sum(loads.values()), 1)
    return {
        **cell.labels(),
        "requests": requests,
        "mean_s": round(mean(startups), 2),
        "p50_s": round(percentile(startups, 0.50), 2),
        "p95_s": round(percentile(startups, 0.95), 2),
        "p99_s": round(percentile(startups, 0.99), 2),
        "moved": moved,
        "from_memory": f"{loads[Tier.MEMORY] / total:.0%}",
        "from_disk": f"{loads[Tier.DISK] / total:.0%}",
        "served": f"{finished / max(requests, 1):.1%}",
        "published": cell.published,
    }


def cells(figure: str | None = None, cv: float = 8.0, *, is_per_model: bool = False) -> Iterator[Cell]:
    """Every run of a figure, or of all of them."""
    for name, make in FIGURES.items():
        if figure is None or name == figure:
            for cell in make():
                yield replace(cell, figure=name, cv=cv, is_per_model=is_per_model)


def _schedulers() -> Iterator[Cell]:
    published = {
        ("GSM8K", 0.2, "random"): "40 % from SSD",
        ("GSM8K", 0.8, "random"): "P99 1.86×",
        ("GSM8K", 1.4, "random"): "P99 1.95×",
        ("GSM8K", 1.4, "shepherd*"): "P99 1.27×, 9 preemptions, SSD reads 2×",
        ("GSM8K", 1.4, "serverlessllm"): "53 migrations",
        ("ShareGPT", 0.2, "random"): "40 % from SSD",
        ("ShareGPT", 0.8, "shepherd*"): "P99 2×, 40 preemptions",
        ("ShareGPT", 0.8, "serverlessllm"): "114 migrations",
        ("ShareGPT", 1.4, "shepherd*"): "P95 1.5×, 166 preemptions",
        ("ShareGPT", 1.4, "random"): "P95 1.05×",
        ("ShareGPT", 1.4, "serverlessllm"): "64 migrations",
    }
    for dataset in DATASETS:
        for rps in (0.2, 0.8, 1.4):
            for system in SCHEDULERS:
                yield Cell("", system, dataset=dataset, rps=rps, published=published.get((dataset, rps, system), ""))


def _larger_models() -> Iterator[Cell]:
    published = {
        ("OPT-13B", "GSM8K", "random"): "35–40 % from SSD",
        ("OPT-30B", "GSM8K", "random"): "35–40 % from SSD",
        ("OPT-30B", "ShareGPT", "random"): "P99 1.54×",
        ("OPT-30B", "ShareGPT", "shepherd*"): "P99 1.82×",
    }
    for model in ("OPT-13B", "OPT-30B"):
        for dataset in DATASETS:
            for system in SCHEDULERS:
                known = published.get((model, dataset, system), "")
                yield Cell("", system, model, dataset, rps=MODERATE_RPS, published=known)


def _whole_systems() -> Iterator[Cell]:
    published = {
        ("OPT-6.7B", "GSM8K"): ("mean 0.8 s", "mean 12.1 s", "mean 8.2 s"),
        ("OPT-30B", "GSM8K"): ("mean 7.5 s, 89 % served", "mean 213 s", "mean 199 s, 26 % served"),
        ("OPT-6.7B", "ShareGPT"): ("mean 0.8 s", "mean 182 s", "mean 162 s"),
        ("OPT-13B", "ShareGPT"): ("mean 1.6 s", "", ""),
        ("OPT-30B", "ShareGPT"): ("mean 89.9 s", "", "mean 262 s"),
    }
    for dataset in DATASETS:
        for model in MODELS:
            for system, known in zip(WHOLE, published.get((model, dataset), ("", "", "")), strict=True):
                yield Cell("", system, model, dataset, rps=MODERATE_RPS, published=known)


def _rates() -> Iterator[Cell]:
    for dataset in DATASETS:
        for rps in (0.2, 0.5, 0.8, 1.1, 1.4):
            for system in WHOLE:
                yield Cell("", system, dataset=dataset, rps=rps, published=_known_of_rate(dataset, rps, system))


def _known_of_rate(dataset: str, rps: float, system: str) -> str:
    if system == "serverlessllm":
        return "about 1 s" if dataset == "GSM8K" else "begins to rise" if rps == 1.4 else ""
    if dataset == "GSM8K":
        return "rises" if rps > 0.5 else ""
    return "up to 212×" if rps <= 1.1 else ""


def _gpus() -> Iterator[Cell]:
    published = {("serverlessllm", 1): "mean 4 s", ("ray serve+cache", 4): "mean 12 s"}
    for gpus in (1, 2, 3, 4):
        for system in ("serverlessllm", "ray serve+cache"):
            yield Cell("", system, rps=MODERATE_RPS, gpus=gpus, published=published.get((system, gpus), ""))


def _numbers_of_models() -> Iterator[Cell]:
    for models in (4, 8, 16, 32, 64):
        for system in ("serverlessllm", "ray serve+cache"):
            known = "alike" if models == 4 and system != "serverlessllm" else ""
            yield Cell("", system, rps=MODERATE_RPS, models=models, published=known)


def _kserve() -> Iterator[Cell]:
    """On test bed (i): four nodes of two GPUs, 1 Gbit/s."""
    for system, known in (("kserve", "128 s first token"), ("serverlessllm", "below 1 s")):
        yield Cell("", system, rps=0.05, gpus=2, published=known)


# By figure of the paper.
FIGURES: dict[str, Callable[[], Iterator[Cell]]] = {
    "8": _schedulers,
    "9": _larger_models,
    "10": _whole_systems,
    "11": _rates,
    "12a": _gpus,
    "12b": _numbers_of_models,
    "kserve": _kserve,
}
