"""`dovetail plan fleet.yaml`: the cheapest nodes for a catalogue, found with the simulator in the loop."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.cli.output import print_json, print_table
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.plan.fleet import Fleet, FleetPlanner, Try

SEEDS = 3  # of the confirmation, the search's own first


def plan_fleet(file: Path, out: Path | None, prices: str | None, plot: Path | None, as_json: bool) -> None:
    from dovetail.plan.fleet import FleetPlanner, fleet_plan
    from dovetail.plan.plan_file import write_plan

    planner = FleetPlanner(file, prices)
    fleet = _search(planner, quiet=as_json)
    best = fleet.best()
    if best is None:
        most = "; ".join(f"{kind}: {limit.max}" for kind, limit in planner.file.nodes.items())
        closest = max(fleet.tries, key=lambda found: found.attainment)
        raise ConfigError(
            f"{file}: nodes: {fleet.target:.1%} is not reached with as many as are allowed ({most}); "
            f"the best try was {_counts(fleet, closest.counts)} with {closest.attainment:.1%}"
        )
    confirmed = [best, *(planner.simulate(best.counts, planner.file.seed + more) for more in range(1, SEEDS))]
    references = _references(planner, fleet)
    if out is not None:
        write_plan(out, fleet_plan(planner, fleet, best))
    if plot is not None:
        plot.write_text(_draw(fleet, best))
    result = _result(fleet, best, confirmed, references)
    if as_json:
        print_json(result)
        return
    _print(planner, fleet, best, result)
    for path in (out, plot):
        if path is not None:
            print(f"wrote {path}")


def _search(planner: FleetPlanner, quiet: bool) -> Fleet:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty()) as progress:
        task = progress.add_task("simulating", total=None)

        def show(found: Try) -> None:
            counts = ", ".join(f"{n} {kind}" for n, kind in zip(found.counts, planner.kinds, strict=True))
            progress.update(task, description=f"{counts}: {found.attainment:.1%}")

        return planner.run(show)


def _references(planner: FleetPlanner, fleet: Fleet) -> list[dict[str, Any]]:
    """One machine for each model, priced; and the test bed of SLINFER, simulated, where both kinds are there."""
    from dovetail.sim.trace import read_trace

    arrivals = read_trace(planner.trace)
    models = planner.file_layout().assign(sorted({arrival.model for arrival in arrivals}))
    found: list[dict[str, Any]] = []
    gpus = [place for place, machine in enumerate(fleet.machines) if machine.device == "gpu"]
    if gpus:
        counts = tuple(len(models) if place == gpus[0] else 0 for place in range(len(fleet.kinds)))
        found.append({"fleet": f"{len(models)} {fleet.kinds[gpus[0]]}, one for each model", "policy": "",
                      "per_hour": fleet.per_hour(counts), "attainment": None})  # fmt: skip
    if {machine.device for machine in fleet.machines} == {"cpu", "gpu"}:
        for policy in ("slinfer", planner.file.policy):
            tried = planner.simulate((4, 4), policy_name=policy)
            found.append({"fleet": _counts(fleet, (4, 4)), "policy": policy, "per_hour": fleet.per_hour((4, 4)),
                          "attainment": tried.attainment})  # fmt: skip
    return found


def _counts(fleet: Fleet, counts: tuple[int, ...]) -> str:
    return " + ".join(f"{count} {kind}" for count, kind in zip(counts, fleet.kinds, strict=True) if count)


def _result(fleet: Fleet, best: Try, confirmed: list[Try], references: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "nodes": dict(zip(fleet.kinds, best.counts, strict=True)),
        "per_hour": fleet.per_hour(best.counts),
        "attainment": best.attainment,
        "attainment_by_seed": [round(tried.attainment, 4) for tried in confirmed],
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
    currency = planner.sheet.currency
    tries = [
        [tried["fleet"], f"{tried['per_hour']:.2f}", ("" if tried["is_complete"] else "under ") +
         f"{tried['attainment']:.2%}", f"{tried['wall_s']:.1f} s"]
        for tried in result["tries"]
    ]  # fmt: skip
    print_table(("fleet", f"{currency}/h", "attainment", "simulated in"), tries)
    seeds = ", ".join(f"{share:.2%}" for share in result["attainment_by_seed"])
    print(f"\ncheapest for {fleet.target:.1%}: {_counts(fleet, best.counts)}, {result['per_hour']:.2f} {currency}/h")
    print(f"confirmed by full simulations with {SEEDS} seeds: {seeds}")
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
    from xml.sax.saxutils import escape

    costs = [fleet.per_hour(tried.counts) for tried in fleet.tries]
    shares = [tried.attainment for tried in fleet.tries]
    low, high = min(shares) - 0.002, 1.0
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="320" font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/><path d="M60,20V280H620" fill="none" stroke="#999"/>',
        '<text x="60" y="305">price per hour</text><text x="8" y="14">share of requests within their SLO</text>',
    ]
    for tried, cost, share in zip(fleet.tries, costs, shares, strict=True):
        x, y = 60 + 540 * cost / max(costs), 280 - 255 * (share - low) / (high - low)
        colour = "#c2410c" if tried is best else "#2563eb" if share >= fleet.target and tried.is_complete else "#9ca3af"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 3:.1f}">{escape(_counts(fleet, tried.counts))}</text>')
    line = 280 - 255 * (fleet.target - low) / (high - low)
    parts.append(f'<path d="M60,{line:.1f}H620" stroke="#111" stroke-dasharray="4 3"/></svg>\n')
    return "\n".join(parts)
