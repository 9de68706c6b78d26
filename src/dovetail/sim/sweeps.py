"""Sets of runs that reproduce the paper's evaluation (S12), each beside the published figures where there are any.

Published figures are SLINFER's: Fig 22 and Table III (SLO rate and GPUs for 7B), and the ranges in its section IX-B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from dovetail.errors import ConfigError
from dovetail.policy.compositions import Composition
from dovetail.policy.parameters import Shadow
from dovetail.sim.compositions import DOVETAIL, IMPROVEMENTS, SERVED_ON_TIME, SLINFER, SLLM_CS, policy
from dovetail.sim.layout import Layout, ModelSection, NodeSection
from dovetail.sim.metrics import Result
from dovetail.sim.setup import Setup

SHAPES = {"3B": "llama-3.2-3b", "7B": "llama-2-7b", "13B": "llama-2-13b"}
SYSTEMS = ("sllm", "sllm+c", "sllm+c+s", "slinfer", "dovetail")
# (size, models, system) → (SLO rate in percent or None, GPUs or None, CPUs or None)
PUBLISHED: dict[tuple[str, int, str], tuple[int | None, float | None, float | None]] = {
    ("7B", 32, "slinfer"): (99, 0.9, None),
    ("7B", 64, "slinfer"): (99, 2.5, None),
    ("7B", 128, "slinfer"): (86, 4.0, None),
    ("7B", 32, "sllm+c+s"): (99, 2.0, None),
    ("7B", 64, "sllm+c+s"): (93, 3.6, None),
    ("7B", 128, "sllm+c+s"): (65, 4.0, None),
    ("7B", 32, "sllm+c"): (None, 1.5, None),
    ("3B", 32, "slinfer"): (None, 0.0, 3.0),
    ("3B", 32, "sllm"): (None, 3.2, None),
}
PUBLISHED_PD = {("sllm+c+s", 32): (93, 3.0), ("sllm+c+s", 64): (70, 3.9), ("sllm+c+s", 128): (35, 4.0)} | {
    ("slinfer", 32): (99, 1.0),
    ("slinfer", 64): (98, 2.9),
    ("slinfer", 128): (69, 4.0),
}
MIXES = ((4, 1, 1, 1), (1, 4, 1, 1), (1, 1, 4, 1), (2, 2, 2, 0), (0, 0, 0, 1))  # of 3B, 7B, 13B, 34B in every eight
# CodeLlama-34B by roofline on one GPU each: the paper splits it over two, which one node cannot show.
LARGE = {"weights": "62.8GiB", "kv_per_token": "192KiB", "layers": 48, "devices": ["gpu"], "concurrency": 16}


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: what varies, and what the paper has for it."""

    labels: tuple[str | int | float, ...]
    published: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {"labels": list(self.labels), "published": self.published}


FIGURES = (
    *("met", "rate", "no grace", "strict", "late", "broken", "silence p50", "p99"),
    *("GPUs", "CPUs", "TTFT p50", "TTFT p95", "cold", "batch", "resizing", "spare tokens/s"),
)
Runs = Iterator[tuple[Cell, Setup]]


@dataclass(frozen=True)
class Sweep:
    title: str
    columns: tuple[str, ...]
    runs: Callable[[Setup], Runs]

    def table(self, rows: list[tuple[Cell, Result]]) -> Table:
        table = Table(*self.columns, *FIGURES, "published", title=self.title, box=box.MARKDOWN)
        for cell, result in rows:
            table.add_row(*[str(label) for label in cell.labels], *_figures(result), cell.published)
        return table


def _figures(result: Result) -> list[str]:
    summary = result.summary()
    total = len(result.waited_for)
    return [
        str(summary["slo_met"]),
        f"{100 * result.met() / total:.1f}%",
        f"{100 * result.met_without_grace() / total:.1f}%",
        f"{100 * result.met_strictly() / total:.1f}%",
        str(summary["broken_promises"]),
        str(summary["broken_answers"]),
        f"{summary['silence_p50_s']:.2f}",
        f"{summary['silence_p99_s']:.2f}",
        f"{summary['gpu_nodes_mean']:.2f}",
        f"{summary['cpu_nodes_mean']:.2f}",
        f"{summary['ttft_p50_s']:.2f}",
        f"{summary['ttft_p95_s']:.2f}",
        str(summary["cold_starts"]),
        f"{summary['batch_mean']:.2f}",
        f"{100 * result.resize_share():.1f}%",
        str(summary["best_effort_tokens_per_s"]),
    ]


def sweep(
    name: str,
    trace: Path,
    profile: Path,
    shape: str,
    models: int | None,
    seed: int,
    limit_s: float | None = None,
) -> Runs:
    if name not in SWEEPS:
        raise ConfigError(f"--sweep {name}: unknown, expected one of {', '.join(SWEEPS)}")
    return SWEEPS[name].runs(Setup(trace, profile, SLINFER, shape=shape, models=models, seed=seed, limit_s=limit_s))


def _policies(base: Setup) -> Runs:
    for system in SYSTEMS:
        yield Cell((system,)), replace(base, composition=policy(system))


def _reproduction(base: Setup) -> Runs:
    for size, shape in SHAPES.items():
        for models in (32, 64, 128):
            for system in SYSTEMS:
                rate, gpus, cpus = PUBLISHED.get((size, models, system), (None, None, None))
                parts = [f"{rate} %" if rate else "", f"{gpus} GPU" if gpus is not None else ""]
                parts += [f"{cpus} CPU" if cpus is not None else ""]
                cell = Cell((size, models, system), ", ".join(part for part in parts if part))
                yield cell, replace(base, composition=policy(system), shape=shape, models=models)


def _improvements(base: Setup) -> Runs:
    """From SLINFER to Dovetail one step at a time, then Dovetail without each."""
    composition: Composition = SLINFER
    yield Cell(("slinfer",)), replace(base, composition=composition)
    for name, changes in IMPROVEMENTS.items():
        composition = composition.having(**changes)
        yield Cell((f"+ {name}",)), replace(base, composition=composition)
    for left_out in IMPROVEMENTS:
        composition = SLINFER.named("dovetail")
        for name, changes in IMPROVEMENTS.items():
            composition = composition if name == left_out else composition.having(**changes)
        yield Cell((f"dovetail without {left_out}",)), replace(base, composition=composition)


def _ablation(base: Setup) -> Runs:
    yield Cell(("full",), "99 %"), base
    for part, published in (("no-cpu", ""), ("no-consolidation", ""), ("no-sharing", "89 %")):
        yield Cell((part,), published), replace(base, composition=policy("slinfer", (part,)))


def _cpu_scaling(base: Setup) -> Runs:
    for gpus, cpus in ((2, 0), (2, 1), (2, 2), (2, 4), (2, 6), (2, 8), (3, 0), (4, 0)):
        yield Cell((gpus, cpus)), replace(base, cpu_nodes=cpus, gpu_nodes=gpus)


def _nodes(base: Setup) -> Runs:
    for system in ("sllm", "sllm+c", "sllm+c+s", "slinfer"):
        for count in (1, 2, 3, 4):
            yield Cell((system, count)), replace(base, composition=policy(system), cpu_nodes=count, gpu_nodes=count)


def _keep_alive(base: Setup) -> Runs:
    for composition in (SLLM_CS, SLINFER):
        for seconds in (0.0, 1.0, 2.0, 4.0, 8.0, 16.0):
            yield Cell((composition.name, seconds)), replace(base, composition=composition.having(keep_alive_s=seconds))


def _watermark(base: Setup) -> Runs:
    published = {0.0: "11.3 % of life resizing", 0.25: "1.4 %"}
    for share in (0.0, 0.1, 0.25, 0.5, 1.0):
        cell = Cell((share,), published.get(share, ""))
        yield cell, replace(base, composition=SLINFER.having(watermark=share))


def _datasets(base: Setup) -> Runs:
    folder = base.trace.parent
    for dataset in ("conversation", "sharegpt", "humaneval"):
        for composition in (SLLM_CS, SLINFER):
            trace = folder / f"azure_128_{dataset}.csv.gz"
            yield (
                Cell((dataset, composition.name)),
                replace(base, trace=trace, composition=composition, shape="llama-3.1-8b"),
            )


def _burstgpt(base: Setup) -> Runs:
    published = {("slinfer", 4): "99.0 %", ("sllm+c+s", 4): "92.3 %"}
    for rate in (1, 4):
        for system in ("sllm+c+s", "slinfer", "dovetail"):
            trace = base.trace.parent / f"burstgpt_64_rps{rate}.csv.gz"
            cell = Cell((rate, system), published.get((system, rate), ""))
            yield cell, replace(base, trace=trace, models=None, composition=policy(system))


def _disaggregation(base: Setup) -> Runs:
    for system in ("sllm+c+s", "slinfer"):
        for models in (32, 64, 128):
            rate, gpus = PUBLISHED_PD[(system, models)]
            cell = Cell((system, models), f"{rate} %, {gpus} GPU")
            yield cell, replace(base, models=models, composition=policy(system, ("pd",)))


def _mixed(base: Setup) -> Runs:
    """4 CPU and 6 GPU nodes, models of several sizes at once."""
    nodes = (NodeSection(name="cpu", device="cpu", count=4), NodeSection(name="gpu", device="gpu", count=6))
    for mix in MIXES:
        sections = [{"shape": shape} for shape in SHAPES.values()] + [LARGE]
        named = zip((*SHAPES, "34B"), sections, mix, strict=True)
        models = {name: ModelSection.model_validate({**section, "share": n}) for name, section, n in named if n}
        layout = Layout(nodes=nodes, models=models)
        for system in ("sllm+c", "sllm+c+s", "slinfer", "dovetail"):
            cell = Cell((":".join(map(str, mix)), system))
            yield cell, replace(base, composition=policy(system), models=None, layout=layout)


# Lengths of generated workloads, beside the trace's folder: (name, kind, file).
WORKLOADS = (
    ("arxiv", "lengths", "lengths/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz"),
    ("cnn", "lengths", "lengths/cnn_dailymail_sample_llama2tok.csv.gz"),
    ("gsm8k", "lengths", "lengths/gsm8k_test_llama2tok.csv.gz"),
    ("servegen", "clients", "servegen_client_summary.csv"),
)
# What policies were tuned on; the other rows of the sweep are what they are judged by.
TUNED_ON = ("conversation", "arxiv")


def _workloads(base: Setup) -> Runs:
    """Other lengths over the trace's arrivals, which the seed varies; every size alone, and three together."""
    three = {name: ModelSection.model_validate({"shape": shape, "share": 2}) for name, shape in SHAPES.items()}
    nodes = (NodeSection(name="cpu", device="cpu", count=4), NodeSection(name="gpu", device="gpu", count=4))
    layouts = {**dict.fromkeys(SHAPES), "mixed": Layout(nodes=nodes, models=three)}
    kinds: tuple[tuple[str, str, str | None], ...] = (("conversation", "lengths", None), *WORKLOADS)
    for workload, kind, file in kinds:
        path = None if file is None else base.trace.parent / file
        for size, layout in layouts.items():
            for system in ("slinfer", "dovetail"):
                setup = replace(base, composition=policy(system), shape=SHAPES.get(size, base.shape), layout=layout)
                changes: dict[str, Any] = {kind: path}
                setup = replace(setup, varied=True, **changes)
                cell = Cell((workload, size, system), "tuned on" if workload in TUNED_ON else "")
                yield cell, replace(setup, models=None) if layout else setup


# SLINFER as published (S4 as a closed form), with admission that plays the node's turns, and what a server runs. The
# last is that without its bound on inter-token gaps: requests are computed by due time.
COMPOSITIONS = {
    "published": SLINFER.having(shadow=Shadow.CLOSED, paced_from_first_token=False),
    "played": SLINFER,
    "served": SERVED_ON_TIME,
    "by due time": SERVED_ON_TIME.having(smooth_answers=False),
}


def _compositions(base: Setup) -> Runs:
    """The generated workloads at 7B and 13B, where not all policies meet everything."""
    for workload, kind, file in WORKLOADS:
        path: Any = base.trace.parent / file
        for size in ("7B", "13B"):
            for name, composition in COMPOSITIONS.items():
                changes: dict[str, Any] = {kind: path}
                setup = replace(base, composition=composition, shape=SHAPES[size], varied=True, **changes)
                yield Cell((workload, size, name), "tuned on" if workload in TUNED_ON else ""), setup


def _silence(base: Setup) -> Runs:
    """What a bound on silence within answers costs."""
    for size in ("7B", "13B"):
        for seconds in (1.0, 2.0, 4.0, 8.0, float("inf")):
            composition = DOVETAIL.having(max_silence_s=seconds)
            yield Cell((size, f"{seconds:g} s")), replace(base, shape=SHAPES[size], composition=composition)


# Requests of best effort a second beside a trace's, from none to more than the devices have time for.
BEST_EFFORT_PER_S = (0.0, 1.0, 2.0, 4.0, 8.0)


def _best_effort(base: Setup) -> Runs:
    """What a server runs, on two traces at three loads each."""
    for dataset in ("conversation", "humaneval"):
        trace = base.trace.parent / f"azure_128_{dataset}.csv.gz"
        for models in (16, 32, 48):
            for per_s in BEST_EFFORT_PER_S:
                setup = replace(base, trace=trace, composition=SERVED_ON_TIME, models=models, best_effort_per_s=per_s)
                yield Cell((dataset, models, per_s)), setup


SWEEPS = {
    "policies": Sweep("Policies", ("policy",), _policies),
    "reproduction": Sweep("SLINFER's Fig 22 and Table III", ("size", "models", "policy"), _reproduction),
    "improvements": Sweep("From SLINFER to Dovetail", ("policy",), _improvements),
    "ablation": Sweep("Ablation (Fig 23)", ("slinfer",), _ablation),
    "cpu-scaling": Sweep("CPU scaling (Fig 24)", ("GPU nodes", "CPU nodes"), _cpu_scaling),
    "nodes": Sweep("Node counts (Fig 32)", ("policy", "nodes of each kind"), _nodes),
    "keep-alive": Sweep("Keep-alive (Fig 30)", ("policy", "seconds"), _keep_alive),
    "watermark": Sweep("Watermark (Fig 31)", ("watermark",), _watermark),
    "datasets": Sweep("Datasets (Fig 35)", ("dataset", "policy"), _datasets),
    "burstgpt": Sweep("BurstGPT (Fig 27)", ("requests/s", "policy"), _burstgpt),
    "mixed": Sweep("Mixed sizes (Fig 26)", ("3B:7B:13B:34B", "policy"), _mixed),
    "workloads": Sweep("Generated workloads", ("workload", "size", "policy"), _workloads),
    "compositions": Sweep("Published, played and served", ("workload", "size", "policy"), _compositions),
    "silence": Sweep("Attainment against the longest silence", ("size", "longest silence"), _silence),
    "best-effort": Sweep("Beside best effort", ("trace", "models", "requests/s of it"), _best_effort),
    "pd": Sweep("Prefill–decode disaggregation (Table III)", ("policy", "models"), _disaggregation),
}
