"""`dovetail plan fleet.yaml`: the cheapest nodes for a catalogue, found with the simulator in the loop."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.cli.output import print_json, print_table
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.plan.fleet import Confirmed, Fleet, FleetPlanner
    from dovetail.plan.fleet_try import Try

LABEL_POINTS = 8
SEEDS = 3  # of the confirmation, the search's own first


def plan_fleet(
    file: Path, out: Path | None, prices: str | None, plot: Path | None, jobs: int | None, as_json: bool
) -> None:
    from dovetail.machine import usable_cores
    from dovetail.plan.fleet import fleet_plan, fleet_planner
    from dovetail.plan.plan_file import write_plan

    with fleet_planner(file, prices, jobs or usable_cores()) as planner:
        fleet, confirmed = _search(planner, quiet=as_json)
        if not confirmed or not confirmed[-1].holds(fleet.target):
            raise ConfigError(_too_few(planner, fleet))
        references = _references(planner, fleet)
    best = confirmed[-1].best
    if out is not None:
        write_plan(out, fleet_plan(planner.inputs, fleet, best))
    if plot is not None:
        plot.write_text(_draw(fleet, best))
    result = _result(fleet, confirmed, references)
    if as_json:
        print_json(result)
        return
    _print(planner, fleet, best, result)
    for path in (out, plot):
        if path is not None:
            print(f"wrote {path}")


def _too_few(planner: FleetPlanner, fleet: Fleet) -> str:
    most = "; ".join(f"{kind}: {limit.max}" for kind, limit in planner.inputs.file.nodes.items())
    closest = max(fleet.tries, key=lambda found: found.attainment)
    if fleet.enough():
        return (
            f"{planner.inputs.path}: nodes: {fleet.target:.1%} is reached with one seed, but with all of {SEEDS} "
            f"not by any fleet that was tried ({most})"
        )
    return (
        f"{planner.inputs.path}: nodes: {fleet.target:.1%} is not reached with as many as are allowed ({most}); "
        f"the best try was {_counts(fleet, closest.counts)} with {closest.attainment:.1%}"
    )


def _search(planner: FleetPlanner, quiet: bool) -> tuple[Fleet, list[Confirmed]]:
    """Tells a moving line on a terminal, else a line for each try."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    is_terminal = sys.stderr.isatty()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet or not is_terminal) as progress:
        task = progress.add_task("the first simulations", total=None)
        done = itertools.count(1)

        def show(found: Try) -> None:
            counts = ", ".join(f"{n} {kind}" for n, kind in zip(found.counts, planner.inputs.kinds, strict=True))
            share = f"{found.attainment:.2%}" if found.is_complete else f"under {found.attainment:.1%}, stopped"
            said = f"simulation {next(done)}: {counts}: {share}"
            progress.update(task, description=said)
            if not quiet and not is_terminal:
                print(f"{said} ({found.wall_s:.0f} s)", file=sys.stderr, flush=True)

        fleet = planner.run(show)
        return fleet, planner.confirm(fleet, SEEDS, show)


def _references(planner: FleetPlanner, fleet: Fleet) -> list[dict[str, Any]]:
    """One machine for each model, priced; SLINFER's test bed, simulated, where both kinds are there."""
    found = _one_each(planner, fleet)
    if {machine.device for machine in fleet.machines} == {"cpu", "gpu"}:
        beds = [planner.trial((4, 4), policy=name) for name in ("slinfer", planner.inputs.file.policy)]
        for bed, result in zip(beds, planner.simulate(beds), strict=True):
            found.append({"fleet": _counts(fleet, bed.counts), "policy": bed.policy,
                          "per_hour": fleet.per_hour(bed.counts), "attainment": result.attainment})  # fmt: skip
    return found


def _one_each(planner: FleetPlanner, fleet: Fleet) -> list[dict[str, Any]]:
    from dovetail.sim.trace import read_trace

    gpus = [place for place, machine in enumerate(fleet.machines) if machine.device == "gpu"]
    if not gpus:
        return []
    arrivals = read_trace(planner.inputs.trace)
    layout = planner.inputs.layout(tuple(1 for _ in fleet.kinds))
    models = layout.assign(sorted({arrival.model for arrival in arrivals}))
    counts = tuple(len(models) if place == gpus[0] else 0 for place in range(len(fleet.kinds)))
    said = f"{len(models)} {fleet.kinds[gpus[0]]}, one for each model"
    return [{"fleet": said, "policy": "", "per_hour": fleet.per_hour(counts), "attainment": None}]


def _counts(fleet: Fleet, counts: tuple[int, ...]) -> str:
    return " + ".join(f"{count} {kind}" for count, kind in zip(counts, fleet.kinds, strict=True) if count)


def _result(fleet: Fleet, confirmed: list[Confirmed], references: list[dict[str, Any]]) -> dict[str, Any]:
    best = confirmed[-1].best
    return {
        "nodes": dict(zip(fleet.kinds, best.counts, strict=True)),
        "per_hour": fleet.per_hour(best.counts),
        "attainment": best.attainment,
        "attainment_by_seed": [round(share, 4) for share in confirmed[-1].attainments],
        "refuted": [
            {
                "fleet": _counts(fleet, other.best.counts),
                "per_hour": fleet.per_hour(other.best.counts),
                "attainment_by_seed": [round(share, 4) for share in other.attainments],
            }
            for other in confirmed[:-1]
        ],
        "search_s": round(fleet.wall_s, 1),
        "simulations": len(fleet.tries),
        "tries": [
            {
                "fleet": _counts(fleet, tried.counts),
                "per_hour": fleet.per_hour(tried.counts),
                "attainment": round(tried.attainment, 4),
                "is_complete": tried.is_complete,
                "wall_s": round(tried.wall_s, 1),
            }
            for tried in sorted(fleet.tries, key=lambda tried: fleet.per_hour(tried.counts))
        ],
        "references": references,
        "price_sensitivity": [
            {"kind": kind, "times": factor, "best": _counts(fleet, found.counts) if found else None}
            for kind, factor, found in fleet.price_sensitivity()
        ],
    }


def _print(planner: FleetPlanner, fleet: Fleet, best: Try, result: dict[str, Any]) -> None:
    currency = planner.inputs.sheet.currency
    tries = [
        [tried["fleet"], f"{tried['per_hour']:.2f}", ("" if tried["is_complete"] else "under ") +
         f"{tried['attainment']:.2%}", f"{tried['wall_s']:.1f} s"]
        for tried in result["tries"]
    ]  # fmt: skip
    print_table(("fleet", f"{currency}/h", "attainment", "simulated in"), tries)
    seeds = ", ".join(f"{share:.2%}" for share in result["attainment_by_seed"])
    print(f"\ncheapest for {fleet.target:.1%}: {_counts(fleet, best.counts)}, {result['per_hour']:.2f} {currency}/h")
    print(f"confirmed by full simulations with {SEEDS} seeds: {seeds}")
    for row in result["refuted"]:
        seeds = ", ".join(f"{share:.2%}" for share in row["attainment_by_seed"])
        print(f"cheaper, but not with every seed: {row['fleet']}, {row['per_hour']:.2f} {currency}/h: {seeds}")
    print(f"found in {result['search_s']:.0f} s with {result['simulations']} simulations\n")
    rows = [
        [row["fleet"], row["policy"], f"{row['per_hour']:.2f}", f"{row['per_hour'] / result['per_hour']:.2f}×",
         "" if row["attainment"] is None else f"{row['attainment']:.2%}"]
        for row in result["references"]
    ]  # fmt: skip
    if rows:
        print_table(("beside it", "policy", f"{currency}/h", "price", "attainment"), rows)
    print("\nif prices change:")
    rows = [[row["kind"], f"{row['times']:g}×", str(row["best"])] for row in result["price_sensitivity"]]
    print_table(("machine", "price", "cheapest fleet"), rows)


def _draw(fleet: Fleet, best: Try) -> str:
    """Attainment against price: every fleet that was tried."""
    from dovetail.plots import new_figure, plain_axes, svg_of

    figure = new_figure(7, 4)
    axes = plain_axes(figure)
    axes.set_xlabel("price per hour")
    axes.set_ylabel("requests within their SLO (%)")
    for tried in fleet.tries:
        is_good = tried.attainment >= fleet.target and tried.is_complete
        colour = "#c2410c" if tried is best else "#2563eb" if is_good else "#9ca3af"
        place = (fleet.per_hour(tried.counts), 100 * tried.attainment)
        axes.plot(*place, "o", color=colour, markersize=5)
    axes.axhline(100 * fleet.target, color="#111111", linestyle="--", linewidth=1)
    axes.set_xlim(0.0, 1.35 * max(fleet.per_hour(tried.counts) for tried in fleet.tries))  # room for the last name
    points = [(fleet.per_hour(one.counts), 100 * one.attainment, _counts(fleet, one.counts)) for one in fleet.tries]
    (width, height), right, (low, high) = figure.get_size_inches() * 72, axes.get_xlim()[1], axes.get_ylim()
    letter = 0.6 * LABEL_POINTS
    boxes = [(x / right * width, len(name) * letter, (y - low) / (high - low) * height) for x, y, name in points]
    for (x, y, name), rise in zip(points, spread_labels(boxes, LABEL_POINTS + 1), strict=True):
        axes.annotate(
            name,
            (x, y),
            xytext=(5, rise),
            textcoords="offset points",
            va="center",
            fontsize=LABEL_POINTS,
            arrowprops={"arrowstyle": "-", "color": "#9ca3af", "linewidth": 0.5} if rise else None,
            annotation_clip=False,
        )
    return svg_of(figure)


def spread_labels(boxes: Sequence[tuple[float, float, float]], height: float) -> list[float]:
    """By how much each label (left edge, width, middle) has to rise so that no two lie over each other."""
    rises = [0.0] * len(boxes)
    placed: list[tuple[float, float, float]] = []  # left, right, middle
    for number in sorted(range(len(boxes)), key=lambda number: boxes[number][2]):
        left, width, natural = boxes[number]
        at = natural
        beside = [line for begin, end, line in placed if left < end and left + width > begin]
        while hit := [line for line in beside if abs(line - at) < height]:
            at = max(hit) + height
        placed.append((left, left + width, at))
        rises[number] = at - natural
    return rises
