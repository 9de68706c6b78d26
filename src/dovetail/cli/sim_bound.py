"""`dovetail sim bound`: how many requests any policy could serve in time, for each row of a table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.cli.output import print_table
from dovetail.policy.headroom import SloRule
from dovetail.sim.bound import Terms, bound
from dovetail.sim.compositions import DOVETAIL, POLICIES
from dovetail.sim.setup import Setup, build
from dovetail.sim.sweeps import SWEEPS, sweep

Labels = tuple[str, ...]


def bounds(
    trace: Annotated[Path, typer.Option(help="CSV of arrival_s, model, input_tokens, output_tokens; may be .gz")],
    profile: Annotated[Path, typer.Option(help="JSON of measured iteration times")],
    name: Annotated[str, typer.Option("--sweep", help=", ".join(SWEEPS))] = "policies",
    only: Annotated[list[str] | None, typer.Option(help="only rows with these labels; may be repeated")] = None,
    shape: Annotated[str, typer.Option("--shape", "--size", help="model shape, a name in the profile")] = "llama-2-7b",
    models: Annotated[int | None, typer.Option(help="keep this many of the trace's models")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="this many CPU nodes and this many GPU nodes")] = None,
    limit: Annotated[float | None, typer.Option(help="leave out arrivals after this many seconds")] = None,
    seed: int = 0,
    seeds: Annotated[int, typer.Option(min=1, help="traces of each row, from --seed on, counted as one")] = 1,
    silence: Annotated[float, typer.Option(min=0.1, help="seconds that 99 of 100 answers are silent at most")] = 2.0,
    slot: Annotated[float, typer.Option(min=0.5, help="seconds; coarser is sooner computed and bounds less")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON list")] = False,
) -> None:
    """The most requests that any policy could serve in time, clairvoyant ones included, by row of a sweep.

    With grace (a cold start excuses a late first token) and without; the bound is not always within reach.

    Example: dovetail sim bound --trace t.csv --profile p.json --sweep workloads --only arxiv --limit 150 --json
    """
    rows = []
    for labels, setup in _settings(sweep(name, trace, profile, shape, models, seed, limit)):
        if only and not set(only) <= set(labels):
            continue
        if nodes is not None:
            setup = replace(setup, cpu_nodes=nodes, gpu_nodes=nodes)
        rows.append(_row(labels, [replace(setup, seed=seed + more) for more in range(seeds)], silence, slot))
    if as_json:
        typer.echo(json.dumps(rows))
        return
    headings = ("row", "requests", "met at most", "rate", "without grace", "rate")
    print_table(headings, (_cells(row) for row in rows))


def _settings(runs: Iterator[tuple[Any, Setup]]) -> Iterator[tuple[Labels, Setup]]:
    """Each once, whatever the policy; with the memory that dovetail leaves to models, which is the most."""
    seen: list[Setup] = []
    for cell, setup in runs:
        setup = replace(setup, composition=DOVETAIL)
        if setup not in seen:
            seen.append(setup)
            yield tuple(str(label) for label in cell.labels if label not in POLICIES), setup


def _row(labels: Labels, setups: list[Setup], silence_s: float, slot_s: float) -> dict[str, Any]:
    row: dict[str, Any] = {"labels": labels, "requests": 0, "met_at_most": 0, "without_grace_at_most": 0}
    for setup in setups:
        simulation = build(setup)
        devices, arrivals = simulation.devices, simulation.arrivals
        terms = Terms(grace=False, silence_s=silence_s, noise=setup.noise, slot_s=slot_s)
        without = met = bound(devices, arrivals, SloRule(), terms).met
        if without < len(arrivals):  # else grace adds nothing
            met = bound(devices, arrivals, SloRule(), replace(terms, grace=True)).met
        for key, count in (("requests", len(arrivals)), ("met_at_most", met), ("without_grace_at_most", without)):
            row[key] += count
    return row


def _cells(row: dict[str, Any]) -> list[str]:
    met, without, requests = row["met_at_most"], row["without_grace_at_most"], row["requests"]
    name = " ".join(row["labels"]) or "all"
    return [name, str(requests), str(met), f"{met / requests:.1%}", str(without), f"{without / requests:.1%}"]
