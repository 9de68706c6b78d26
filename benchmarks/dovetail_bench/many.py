"""Many models behind one server, the same requests for each contender, one contender after another.

Says what came in time, how fast, what a start took, and what memory and CPU it cost. Starting the servers is
`servers`', asking them `load`'s.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from dovetail.sim.trace import Arrival
from dovetail_bench.attainment import Figures, no_grace, summarise
from dovetail_bench.fleet import FleetModel, prompts_for
from dovetail_bench.load import Answer, Load
from dovetail_bench.node_log import Start, grace_of, read_starts
from dovetail_bench.peers import PeerUnavailable
from dovetail_bench.process_tree import Sample, TreeSampler
from dovetail_bench.servers import Running, ServerFailed, Settings, make_contender, running

Step = Callable[[str, int, int], None]  # whose turn it is, requests done, of how many


class ColdStarts(msgspec.Struct, frozen=True):
    """Loads of models during the run, as the server tells them."""

    by_tier: dict[str, int]  # cold starts that a request waited for, by where the weights were
    loads: int
    load_s_p50: float  # from the decision to load until the model can take turns
    load_s_max: float
    build_s_mean: float  # opening and building alone


class Outcome(msgspec.Struct, frozen=True):
    """One contender's run."""

    contender: str
    precision: str
    note: str
    ready_s: float  # from the start of its process
    memory_budget_bytes: int | None
    figures: Figures
    has_grace: bool  # the server says what its cold starts took; else both attainments are the same
    cold_starts: ColdStarts | None
    server_outcomes: dict[str, int]  # requests by outcome, in the server's own count
    memory_peak_bytes: int  # PSS of all of its processes
    memory_mean_bytes: int
    cpu_share: float  # of all cores
    samples: list[Sample]
    event_log: str | None
    answers: list[Answer] = []
    turn_overhead_p50_s: dict[str, float] = {}  # by node: between two iterations, of the last ones, by the server


class Failure(msgspec.Struct, frozen=True):
    """A contender that did not take part, and why."""

    contender: str
    reason: str


class Contest(msgspec.Struct, frozen=True):
    models: list[str]  # by popularity
    cores: int
    requests: int
    outcomes: list[Outcome]
    failures: list[Failure]
    best_peer: str | None
    ratio_to_best_peer: float | None  # requests within their SLO, ours to the best peer's


def compete(
    names: Sequence[str],
    models: Sequence[FleetModel],
    arrivals: Sequence[Arrival],
    settings: Settings,
    seed: int,
    step: Step = lambda who, done, total: None,
) -> Contest:
    """`names` of contenders, in this order; `models` by popularity."""
    outcomes: list[Outcome] = []
    failures: list[Failure] = []
    for name in names:
        try:
            contender = make_contender(name, models, settings, lambda text: step(text, 0, len(arrivals)))
            with running(contender, settings.folder / f"{name}.log") as server:
                outcomes.append(run_one(server, models, arrivals, settings, seed, step))
        except (PeerUnavailable, ServerFailed) as error:
            failures.append(Failure(name, str(error)))
    ours = _attained(outcomes, "dovetail")
    peers = [outcome for outcome in outcomes if not outcome.contender.startswith("dovetail")]
    best = max(peers, key=lambda outcome: outcome.figures.attained, default=None)
    return Contest(
        models=[model.name for model in models],
        cores=settings.cores,
        requests=len(arrivals),
        outcomes=outcomes,
        failures=failures,
        best_peer=best.contender if best is not None else None,
        ratio_to_best_peer=_ratio(ours, best.figures.attained if best is not None else None),
    )


def run_one(
    server: Running,
    models: Sequence[FleetModel],
    arrivals: Sequence[Arrival],
    settings: Settings,
    seed: int,
    step: Step,
) -> Outcome:
    contender = server.contender
    done: list[Answer] = []

    def on_end(answer: Answer) -> None:
        done.append(answer)
        step(contender.name, len(done), len(arrivals))

    load = Load(
        server.url,
        [model.name for model in models],
        prompts_for(models, seed),
        on_end,
        sends_targets=settings.sends_targets,
    )
    with TreeSampler(server.pid) as sampler:
        answers = asyncio.run(load.run(arrivals))
    starts = read_starts(contender.event_log) if contender.event_log is not None else []
    metrics = read_metrics(server.url) if contender.event_log is not None else {}
    grace = grace_of(starts, load.began) if contender.event_log is not None else no_grace
    memory = [sample.pss_bytes for sample in sampler.samples]
    last = sampler.samples[-1]
    return Outcome(
        contender=contender.name,
        precision=contender.precision,
        note=contender.note,
        ready_s=server.ready_s,
        memory_budget_bytes=contender.memory_bytes,
        figures=summarise(answers, settings.cores, grace, keep_alive_s=settings.keep_alive_s),
        has_grace=contender.event_log is not None,
        cold_starts=_cold_starts(starts, metrics) if contender.event_log is not None else None,
        server_outcomes=_totals(metrics, "dovetail:slo_requests_total", "outcome"),
        memory_peak_bytes=max(memory),
        memory_mean_bytes=int(statistics.mean(memory)),
        cpu_share=last.cpu_s / max(last.at_s, 1e-9) / settings.cores,
        samples=sampler.samples,
        event_log=str(contender.event_log) if contender.event_log is not None else None,
        answers=answers,
        turn_overhead_p50_s={
            labels["node"]: value for labels, value in metrics.get("dovetail:turn_overhead_p50_seconds", ())
        },
    )


Metrics = Mapping[str, list[tuple[dict[str, str], float]]]  # samples by name: labels and value


def read_metrics(url: str) -> Metrics:
    text = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def _totals(metrics: Metrics, name: str, label: str) -> dict[str, int]:
    totals: dict[str, int] = {}
    for labels, value in metrics.get(name, ()):
        totals[labels[label]] = totals.get(labels[label], 0) + int(value)
    return totals


def _cold_starts(starts: Sequence[Start], metrics: Metrics) -> ColdStarts:
    seconds = [start.seconds for start in starts]
    built = sum(value for _, value in metrics.get("dovetail:model_load_seconds_sum", ()))
    builds = sum(value for _, value in metrics.get("dovetail:model_load_seconds_count", ()))
    return ColdStarts(
        by_tier=_totals(metrics, "dovetail:cold_starts_total", "tier"),
        loads=len(starts),
        load_s_p50=statistics.median(seconds) if seconds else 0.0,
        load_s_max=max(seconds, default=0.0),
        build_s_mean=built / builds if builds else 0.0,
    )


def _attained(outcomes: Sequence[Outcome], contender: str) -> int | None:
    return next((outcome.figures.attained for outcome in outcomes if outcome.contender == contender), None)


def _ratio(ours: int | None, theirs: int | None) -> float | None:
    """None where one of them did not run, or where there is nothing to divide by."""
    return ours / theirs if ours is not None and theirs else None


def twin_command(log: Path | str) -> str:
    """What shows the same run in the simulator."""
    return f"dovetail sim replay {log}"
