"""`dovetail apply`: runs a plan on this machine, as function processes or as nodes and models of a server."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.output import print_json, print_table
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from dovetail.plan.drive import Driven, Load, RateChange
    from dovetail.plan.plan_file import FunctionPlan
    from dovetail.plan.runtime import PlanRuntime

_CHANGE = re.compile(r"(.+)\*([\d.]+)@([\d.]+)")


def apply(
    plan: Annotated[Path, typer.Argument(help="What `dovetail plan --out` wrote.")],
    port: Annotated[int, typer.Option(help="Of the HTTP endpoint.", min=0, max=65535)] = 8800,
    drive: Annotated[float, typer.Option(help="Instead: send the planned load for so many seconds.", min=0)] = 0.0,
    change: Annotated[
        list[str] | None, typer.Option(help="While driving: APP*TIMES@SECONDS, such as search*3@120.")
    ] = None,
    kill: Annotated[list[float] | None, typer.Option(help="While driving: kill -9 a function at this second.")] = None,
    window: Annotated[float, typer.Option(help="Seconds over which rates are watched.", min=1)] = 30.0,
    threshold: Annotated[float, typer.Option(help="Share by which a rate may leave the plan.", min=0.05)] = 0.5,
    seed: int = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Run a plan: functions with CPU limits behind POST /apps/NAME, or a fleet's models in a server.

    Rates are watched: when one leaves the plan, a new plan is made, its functions are started, and requests go there;
    the old ones answer what they have. Example: dovetail apply plan.yaml --drive 600 --change search*3@300 --kill 120
    """
    from dovetail.plan.prices import read_yaml

    if read_yaml(plan).get("kind") == "fleet":
        _serve_fleet(plan, port)
        return
    from dovetail.plan.drive import Load
    from dovetail.plan.plan_file import read_plan

    load = Load(drive, seed, changes=parse_changes(change), kills_s=tuple(kill or ()))
    if (change or kill) and not drive:
        raise ConfigError("--change and --kill need --drive")
    found = asyncio.run(_run(read_plan(plan), port, load, window, threshold))
    if found is None:
        return
    if as_json:
        print_json(found)
        return
    _print(found)


def parse_changes(texts: list[str] | None) -> tuple[RateChange, ...]:
    return tuple(_change(text) for text in texts or ())


def _change(text: str) -> RateChange:
    from dovetail.plan.drive import RateChange

    match = _CHANGE.fullmatch(text)
    if match is None:
        raise ConfigError(f"--change {text}: expected APP*TIMES@SECONDS, such as search*3@120")
    return RateChange(match[1], float(match[2]), float(match[3]))


def check_changes(changes: Sequence[RateChange], apps: Iterable[str]) -> None:
    unknown = [change.app for change in changes if change.app not in apps]
    if unknown:
        raise ConfigError(f"--change {unknown[0]}: no such application; there are {', '.join(apps)}")


async def _run(plan: FunctionPlan, port: int, load: Load, window: float, threshold: float) -> dict[str, Any] | None:
    from dovetail.plan.drive import drive, report, sample_inputs
    from dovetail.plan.runtime import PlanRuntime

    runtime = PlanRuntime.on_this_machine(plan, window, threshold)
    check_changes(load.changes, runtime.apps)
    await runtime.start()
    ready = [len(group.instances) for group in runtime.groups()]
    print(f"{len(ready)} groups ready, {sum(ready)} functions", file=sys.stderr)
    driven: Driven | None = None
    try:
        if load.duration_s:
            print(f"sends the planned load for {load.duration_s:g} s", file=sys.stderr, flush=True)
            driven = await drive(runtime, load, sample_inputs(runtime, load.seed))
        else:
            await _listen(runtime, port)
    finally:
        await runtime.close()
    return report(runtime, driven) if driven is not None else None


async def _listen(runtime: PlanRuntime, port: int) -> None:
    import uvicorn

    from dovetail.plan.endpoint import make_app

    server = uvicorn.Server(uvicorn.Config(make_app(runtime), host="127.0.0.1", port=port, log_level="warning"))
    print(f"POST http://127.0.0.1:{port}/apps/NAME, GET /status", file=sys.stderr)
    await server.serve()


def _print(found: dict[str, Any]) -> None:
    rows = [
        [group["group"], str(group["requests"]), str(group["late"]), str(group["runs"]), str(group["starts"]),
         str(group["deaths"]), f"{group['cost']:.4g}", f"{group['forecast_per_request'] * group['requests']:.4g}"]
        for group in found["groups"]
    ]  # fmt: skip
    print_table(("group", "requests", "late", "runs", "starts", "deaths", "billed", "forecast"), rows)
    print_changes(found["changes"])
    print(
        f"{found['sent']} sent, {found['answered']} answered, {found['failed']} failed, {found['lost']} lost; "
        f"{found['late_share']:.2%} late ({found['undisturbed_late_share']:.2%} where nothing was disturbed)"
    )
    print(
        f"billed {found['billed']:.4g}, forecast {found['forecast']:.4g} ({found['forecast_error']:+.1%}), "
        f"starts {found['billed_starts']:.4g} besides"
    )


def print_changes(changes: Sequence[dict[str, Any]]) -> None:
    for change in changes:
        said = change["error"] or f"{change['groups']} groups, ready after {change['seconds']:.1f} s"
        print(f"replanned at {change['at_s']:.0f} s: {said}")


def _serve_fleet(plan: Path, port: int) -> None:
    """The fleet's models in a server of this machine's nodes; replaces this process."""
    import yaml

    from dovetail.plan.fleet import FleetPlan
    from dovetail.plan.prices import parse_section, read_yaml

    fleet = parse_section(FleetPlan, read_yaml(plan), str(plan), is_written_by_us=True)
    if not fleet.serve:
        raise ConfigError(
            f"{plan}: serve: names no models; write `serve: {{NAME: {{source: …}}}}` into the fleet's file"
        )
    config = {
        "models": {name: {"source": model.source} for name, model in fleet.serve.items()},
        "server": {"port": port},
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="dovetail-fleet-", delete=False) as file:
        yaml.safe_dump(config, file)
    os.execv(sys.executable, [sys.executable, "-m", "dovetail", "serve", "--config", file.name])
