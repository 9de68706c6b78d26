"""`dovetail plan`: what serving should cost. A file of applications or of a fleet becomes a plan; the other commands
measure what plans are made with, and try them out in virtual time.

Only reads options and prints; the work is in `dovetail.plan`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from dovetail import plots
from dovetail.cli.output import print_json, print_table
from dovetail.cli.plan_fleet import plan_fleet
from dovetail.cli.plan_profile import profile
from dovetail.cli.plan_stages import stages
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.plan.apps import Inputs
    from dovetail.plan.billing import Totals
    from dovetail.plan.plan_file import FunctionPlan
    from dovetail.plan.provision import Provisioner


class FileFirst(TyperGroup):
    """`plan apps.yaml` is `plan file apps.yaml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["file", *args]
        return super().parse_args(ctx, args)


_HELP = """Find the cheapest functions for applications, or the cheapest nodes for a fleet: dovetail plan FILE [OPTIONS]

Example: dovetail plan apps.yaml --explain --out plan.yaml

The options of FILE (--out, --explain, --compare, --plot, --prices, --json) are in `dovetail plan file --help`.
"""
app = typer.Typer(cls=FileFirst, no_args_is_help=True, help=_HELP)
app.command("profile")(profile)
app.command("stages")(stages)

PricesOption = Annotated[str | None, typer.Option(help="Another price sheet than the file's: a name, or a .yaml file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@app.command("file")
def plan_command(
    file: Annotated[Path, typer.Argument(help="Applications (`apps:`), or a fleet (`catalogue:`).")],
    out: Annotated[Path | None, typer.Option(help="Write the plan here (YAML), for `dovetail apply`.")] = None,
    prices: PricesOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say why each group is what it is.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Beside HarmonyBatch and the exact answer.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw cost against SLO and rate (.svg).")] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Simulations of a fleet at once.  [default: one per core]", min=1)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """The cheapest functions for applications within their SLOs, or the cheapest nodes for a fleet of models.

    Example: dovetail plan apps.yaml --explain --out plan.yaml
    """
    from dovetail.plan.prices import read_yaml

    if plot is not None:
        plots.require()
    if "catalogue" in read_yaml(file):
        if explain or compare:
            raise ConfigError("--explain and --compare are for applications; a fleet's table has every try")
        plan_fleet(file, out, prices, plot, jobs, as_json)
        return
    _plan_apps(file, out, prices, explain, compare, plot, as_json)


def _plan_apps(
    file: Path, out: Path | None, prices: str | None, explain: bool, compare: bool, plot: Path | None, as_json: bool
) -> None:
    from dovetail.plan.apps import read_apps
    from dovetail.plan.compare import explain as explained
    from dovetail.plan.compare import provisioners_of
    from dovetail.plan.grouping import plan_groups
    from dovetail.plan.plan_file import make_plan, write_plan

    inputs = read_apps(file, prices)
    begun = time.perf_counter()
    options = inputs.file
    provisioners = provisioners_of(
        inputs.profiles, inputs.sheet, options.modes, cold_starts=options.cold_starts, reserve=options.reserve
    )
    priced = time.perf_counter()
    groups = plan_groups(options.applications(), provisioners)
    planned = time.perf_counter()
    times = {"priced_ms": round((priced - begun) * 1e3, 2), "planned_ms": round((planned - priced) * 1e3, 2)}
    plan = make_plan(groups, provisioners)
    if out is not None:
        write_plan(out, plan)
    if plot is not None:
        plot.write_text(_drawing(inputs, provisioners))
    others = _compared(inputs) if compare else []
    if as_json:
        result = plan.model_dump(mode="json", exclude={"profiles", "prices"}, exclude_none=True)
        result |= {"cost_per_hour": plan.cost_per_hour, "cost_per_request": plan.cost_per_request, **times}
        print_json(result | ({"compared": others} if compare else {}))
        return
    _print_plan(plan)
    print(f"what is for sale was priced in {times['priced_ms']:g} ms, the plan found in {times['planned_ms']:g} ms")
    if explain:
        print()
        for group in groups:
            print("\n".join(explained(group, provisioners[group.apps[0].model])))
    if compare:
        print()
        headings = ("", "cost/h", "against plan", "groups", "modes")
        print_table(headings, [[str(value) for value in other.values()] for other in others])
    for path in (out, plot):
        if path is not None:
            print(f"wrote {path}")
    on_gpus = [app for group in plan.groups if group.mode == "gpu" for app in group.apps]
    if out is not None and on_gpus:
        names = ", ".join(on_gpus)
        print(
            f"{names}: on GPU functions, which `dovetail apply` does not run; --prices own-machines plans without them"
        )


def _print_plan(plan: FunctionPlan) -> None:
    rows = []
    for group in plan.groups:
        forecast = group.forecast
        sizes = " + ".join(f"{vcpus:g}" for vcpus in group.vcpus)
        rows.append(
            [
                ", ".join(group.apps),
                group.mode,
                f"{group.gpu_gb:g} GB" if group.gpu_gb else f"{sizes} vCPU",
                f"{max(group.memory_gb):.3g} GB",
                str(group.batch),
                f"{max(app.wait_s for app in group.apps.values()):.3g} s",
                f"{forecast.p99_s:.3g} s",
                f"{min(app.slo_s for app in group.apps.values()):.3g} s",
                str(group.warm),
                f"{forecast.cost_per_request * 1e6:.4g}",
                f"{forecast.cost_per_hour:.4g}",
            ]
        )
    headings = ["applications", "mode", "size", "memory", "batch", "wait", "p99", "SLO", "warm"]
    print_table([*headings, "cost/million", "cost/h"], rows)
    currency = plan.prices.currency
    print(f"{plan.cost_per_hour:.4g} {currency} an hour, {plan.cost_per_request * 1e6:.4g} a million requests")


def _compared(inputs: Inputs) -> list[dict[str, Any]]:
    from dovetail.plan.compare import alternatives

    found = alternatives(inputs)
    return [
        {
            "name": other.name,
            "cost_per_hour": float(f"{other.cost_per_s * 3600:.6g}"),
            "against_plan": f"{other.cost_per_s / found[0].cost_per_s - 1:+.1%}",
            "groups": len(other.groups),
            "modes": ", ".join(sorted({group.config.option.mode for group in other.groups})),
        }
        for other in found
    ]


def _drawing(inputs: Inputs, provisioners: dict[str, Provisioner]) -> str:
    """Of the first model: around its applications' rates and SLOs."""
    from dovetail.plan.frontier import draw, over_rate, over_slo, spaced

    model, provisioner = next(iter(provisioners.items()))
    own = [app for app in inputs.file.applications() if app.model == model]
    rates, slos = sorted(app.rate for app in own), sorted(app.slo_s for app in own)
    rate, slo_s = rates[len(rates) // 2], slos[len(slos) // 2]
    panels = [
        (f"SLO (s) at {rate:.3g} requests/s", over_slo(provisioner, rate, spaced(slos[0] / 10, slos[-1] * 10))),
        (
            f"requests/s at an SLO of {slo_s:.3g} s",
            over_rate(provisioner, slo_s, spaced(rates[0] / 10, rates[-1] * 10)),
        ),
    ]
    return draw(f"{model}: cheapest cost per request, {inputs.sheet.name}", panels)


@app.command("frontier")
def frontier(
    profile: Annotated[str, typer.Argument(help="A function profile: a name, or a .yaml file.")],
    prices: Annotated[str, typer.Option(help="A price sheet: a name, or a .yaml file.")] = "alibaba-fc",
    rate: Annotated[float, typer.Option(help="Requests/s of the sweep over SLOs.")] = 0.05,
    slo: Annotated[float, typer.Option(help="Seconds, of the sweep over rates.")] = 4.0,
    cold_starts: Annotated[bool, typer.Option(help="Whether functions that fall idle must start again.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw both sweeps (.svg).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Which mode is cheapest at which SLO and rate, for one application.

    Example: dovetail plan frontier wrn50-5 --no-cold-starts --plot frontier.svg
    """
    from dovetail.plan.frontier import draw, over_rate, over_slo, regions, spaced
    from dovetail.plan.function_profile import read_function_profile
    from dovetail.plan.prices import read_sheet
    from dovetail.plan.provision import Provisioner

    provisioner = Provisioner(read_function_profile(profile), read_sheet(prices), cold_starts=cold_starts)
    slos = over_slo(provisioner, rate, spaced(0.05, 20, 120))
    rates = over_rate(provisioner, slo, spaced(0.01, 50, 120))
    if plot is not None:
        panels = [(f"SLO (s) at {rate:g} requests/s", slos), (f"requests/s at an SLO of {slo:g} s", rates)]
        plot.write_text(draw(f"{provisioner.profile.model}: cheapest cost per request, {prices}", panels))
    found = {"slo_s": regions(slos), "rate": regions(rates)}
    if as_json:
        print_json(found)
        return
    for what, parts in found.items():
        rows = []
        for part in parts:
            costs, sizes = (f"{part.cost_start * 1e6:.4g} to {part.cost_end * 1e6:.4g}", sorted(set(part.batch)))
            rows.append([f"{part.start:.3g} to {part.end:.3g}", part.mode, costs, " to ".join(map(str, sizes))])
        print_table((what, "mode", "cost/million", "batch"), rows)
        print()


@app.command("replay")
def replay_command(
    plan: Annotated[Path, typer.Argument(help="A plan of functions.")],
    hours: Annotated[float, typer.Option(help="Virtual time.", min=0.001)] = 1.0,
    seed: int = 0,
    cv: Annotated[float, typer.Option(help="Coefficient of variation of the gaps; 1 = Poisson.", min=0.1)] = 1.0,
    cores: Annotated[
        float | None, typer.Option(help="That functions share, as under `apply`.  [default: a platform's]", min=0.1)
    ] = None,
    change: Annotated[list[str] | None, typer.Option(help="APP*TIMES@SECONDS, such as search*3@120.")] = None,
    kill: Annotated[list[float] | None, typer.Option(help="Kill a function at this second.")] = None,
    window: Annotated[
        float | None, typer.Option(help="Seconds over which rates are watched.  [default: not watched]", min=1)
    ] = None,
    threshold: Annotated[float, typer.Option(help="Share by which a rate may leave the plan.", min=0.05)] = 0.5,
    as_json: JsonOption = False,
) -> None:
    """A plan in virtual time: late requests, and what the price sheet bills beside the forecast.

    Example: dovetail plan replay plan.yaml --hours 10; what `apply` would do on 2 cores: dovetail plan replay plan.yaml
    --hours 0.2 --cores 2 --kill 150 --change search*3@300 --window 60
    """
    from dovetail.cli.apply import check_changes, parse_changes, print_changes
    from dovetail.plan.drive import Load
    from dovetail.plan.plan_file import read_plan
    from dovetail.plan.replay import replay

    found_plan = read_plan(plan)
    load = Load(hours * 3600, seed, cv, parse_changes(change), tuple(kill or ()))
    check_changes(load.changes, [name for group in found_plan.groups for name in group.apps])
    result = replay(found_plan, load, cores, window, threshold)
    found = _replayed(result.totals)
    for key in ("undisturbed_late_share", "changes", "late_requests"):
        found[key] = result.report[key]
    if as_json:
        print_json(found)
        return
    _print_replay(found)
    print_changes(found["changes"])


def _replayed(result: Totals) -> dict[str, Any]:
    groups = [
        {
            "name": group.group,
            "requests": group.requests,
            "late": group.late,
            "batches": group.runs,
            "cold": group.starts,
            "cost": group.cost + group.start_cost,
            "forecast": group.forecast,
        }
        for group in result.groups
    ]
    totals = {"requests": result.requests, "late_share": result.late_share, "cost": result.billed}
    error = result.forecast_error(result.billed)
    return {**totals, "forecast": result.forecast, "forecast_error": error, "groups": groups}


def _print_replay(found: dict[str, Any]) -> None:
    rows = [
        [group["name"], str(group["requests"]), f"{group['late'] / max(group['requests'], 1):.2%}",
         str(group["batches"]), str(group["cold"]), f"{group['cost']:.4g}", f"{group['forecast']:.4g}"]
        for group in found["groups"]
    ]  # fmt: skip
    print_table(("group", "requests", "late", "runs", "cold", "billed", "forecast"), rows)
    print(
        f"{found['requests']} requests, {found['late_share']:.2%} late; billed {found['cost']:.4g}, "
        f"forecast {found['forecast']:.4g} ({found['forecast_error']:+.1%})"
    )
