"""`bench many`: a catalogue of models behind one server, next to what else could serve it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.output import human_bytes, print_json
from dovetail.errors import ConfigError
from dovetail.machine import usable_cores
from dovetail_bench.cli.progress import progress, span

if TYPE_CHECKING:
    from rich.table import Table

    from dovetail.sim.trace import Arrival
    from dovetail_bench.fleet import FleetModel
    from dovetail_bench.lives import IdleReport, StartTime
    from dovetail_bench.load import Mix
    from dovetail_bench.many import Contest
    from dovetail_bench.servers import Settings

ALL = "dovetail,llama-server,llama-cpp-python"


def many(
    models: Annotated[int, typer.Option(help="Distinct copies of the base model.", min=1)] = 32,
    shapes: Annotated[int, typer.Option(help="Random models of 0.5B parameters beside them.", min=0)] = 0,
    minutes: Annotated[float, typer.Option(help="Length of the run of each contender.", min=0.01)] = 5.0,
    rate: Annotated[float, typer.Option(help="Requests a second over all models.", min=0.001)] = 0.7,
    zipf: Annotated[float, typer.Option(help="Popularity of rank r falls as r^-ZIPF.", min=0.0)] = 1.0,
    cv: Annotated[float, typer.Option(help="Of the gaps between arrivals; 1 = Poisson.", min=0.01)] = 3.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.")] = 0,
    input_tokens: Annotated[str, typer.Option("--input", help="Prompt tokens, from-to.")] = "32-96",
    output_tokens: Annotated[str, typer.Option("--output", help="Answer tokens, from-to.")] = "16-64",
    trace: Annotated[Path | None, typer.Option(help="A trace's first minutes, not generated requests.")] = None,
    shrink: Annotated[float, typer.Option(help="--trace: divide its lengths by this.", min=1.0)] = 1.0,
    targets: Annotated[bool, typer.Option(help="Send each request's targets; else ours serves it late.")] = True,
    contenders: Annotated[str, typer.Option(help="Which ones, in this order.")] = ALL,
    share: Annotated[float, typer.Option(help="Of the models that fit into memory.", min=0.01, max=1.0)] = 1 / 3,
    keep_alive: Annotated[float, typer.Option(help="Seconds that an idle model stays.", min=0.0)] = 30.0,
    nodes: Annotated[int, typer.Option(help="Workers of ours, which share cores and memory.", min=0)] = 1,
    device: Annotated[str, typer.Option(help="GPUs of ours beside them, cuda:N,…; --nodes 0: these alone.")] = "",
    base: Annotated[str | None, typer.Option(help="A GGUF file to copy.  [default: SmolLM2-135M-Instruct]")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where models and logs are kept.  [default: bench/many under $DOVETAIL_HOME]")
    ] = None,
    cold_start: Annotated[bool, typer.Option("--cold-start", help="Measure first tokens: warm, host, disk.")] = False,
    idle: Annotated[bool, typer.Option("--idle", help="Measure what is left after a load.")] = False,
    idle_wait: Annotated[float, typer.Option(help="--idle: seconds after the last request.", min=0.0)] = 60.0,
    runs: Annotated[int, typer.Option(help="--cold-start: starts of each kind.", min=1)] = 7,
    twin: Annotated[bool, typer.Option("--twin", help="Say how to show our run in the simulator.")] = False,
    install: Annotated[bool, typer.Option(help="Set up peers that are not here yet.")] = True,
    details: Annotated[bool, typer.Option("--details", help="With --json: every request too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Many models on this machine: what came within its SLO, from Dovetail and from what else there is.

    Contenders run one after another on the same requests. Run it while nothing else does.

    Example: dovetail bench many --models 32 --minutes 5 --rate 0.7
    """
    from dovetail_bench.fleet import DEMO, Fleet
    from dovetail_bench.load import Mix
    from dovetail_bench.servers import Settings

    gpus = _gpus(device, nodes)
    place = folder or _default_folder()
    place.mkdir(parents=True, exist_ok=True)
    lengths = _range(input_tokens, "--input"), _range(output_tokens, "--output")
    mix = Mix(minutes, rate, zipf, cv, *lengths, seed)
    names = contenders.split(",")
    with progress(_expected(names, minutes, models + shapes, lives=cold_start or idle)) as step:
        made = Fleet(place, base or DEMO).make(models, shapes, step)
        fleet = by_popularity(made, seed)
        arrivals = _requests(mix, trace, shrink, len(fleet))
        settings = Settings(
            place, usable_cores(), share, keep_alive, None, install, nodes=nodes, gpus=gpus, sends_targets=targets
        )
        if cold_start or idle:
            lives = _measure_lives(
                fleet, arrivals, settings, seed, runs if cold_start else 0, idle_wait if idle else None, step
            )
        else:
            from dovetail_bench.many import compete

            contest = compete(names, fleet, arrivals, settings, seed, step)
    if cold_start or idle:
        _show_lives(*lives, as_json=as_json)
    else:
        _show_contest(contest, mix, twin=twin, details=details, as_json=as_json)


def _requests(mix: Mix, trace: Path | None, shrink: float, models: int) -> list[Arrival]:
    from dovetail.sim.trace import read_trace
    from dovetail_bench.load import arrivals_of, cut_trace

    if trace is None:
        return arrivals_of(mix, models)
    return cut_trace(read_trace(trace), models, mix.minutes, shrink)


def _gpus(device: str, nodes: int) -> tuple[str, ...]:
    gpus = tuple(name.strip() for name in device.split(",") if name.strip())
    if not nodes and not gpus:
        raise ConfigError("--nodes: without workers on the CPU there must be a GPU (--device)")
    return gpus


def by_popularity(models: Sequence[FleetModel], seed: int) -> list[FleetModel]:
    """Any model may be the popular one, large or small."""
    import random

    order = list(models)
    random.Random(seed).shuffle(order)
    return order


def _default_folder() -> Path:
    from dovetail.machine import default_root

    return default_root() / "bench" / "many"


def _range(text: str, option: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        return int(low), int(high or low)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: expected two numbers as in 32-96") from error


def _expected(names: Sequence[str], minutes_each: float, models: int, *, lives: bool) -> str:
    first = f"writes {models} models unless they are there, and sets up peers that are missing (minutes the first time)"
    if lives:
        return f"First it {first}; then it starts models and waits, as the options say."
    total = span(60 * len(names) * minutes_each)
    return f"Contenders: {len(names)}, for {minutes_each:g} min each, one after another: {total}. First it {first}."


def _measure_lives(
    fleet: Sequence[FleetModel],
    arrivals: Sequence[Arrival],
    settings: Settings,
    seed: int,
    runs: int,
    idle_wait_s: float | None,
    step: Callable[[str, int, int], None],
) -> tuple[list[StartTime], IdleReport | None]:
    """Each in a server of its own: what the first leaves behind is not the second's."""
    import msgspec

    from dovetail_bench.lives import HOST_KEEP_ALIVE_S, measure_idle, measure_starts
    from dovetail_bench.servers import dovetail, running

    starts: list[StartTime] = []
    report = None
    if runs:
        hasty = msgspec.structs.replace(settings, host_keep_alive_s=HOST_KEEP_ALIVE_S)
        with running(dovetail(fleet, hasty), settings.folder / "cold-start.log") as server:
            starts = measure_starts(server, fleet, runs, seed, step)
    if idle_wait_s is not None:
        with running(dovetail(fleet, settings), settings.folder / "idle.log") as server:
            report = measure_idle(server, fleet, arrivals, idle_wait_s, seed, step)
    return starts, report


def _show_contest(contest: Contest, mix: Mix, *, twin: bool, details: bool, as_json: bool) -> None:
    import msgspec

    from dovetail_bench.many import twin_command

    outcomes = contest.outcomes
    if as_json:
        if not details:
            plain = [msgspec.structs.replace(outcome, answers=[]) for outcome in outcomes]
            contest = msgspec.structs.replace(contest, outcomes=plain)
        commands = [twin_command(outcome.event_log) for outcome in outcomes if outcome.event_log]
        print_json({"mix": mix, "twin": commands, **msgspec.structs.asdict(contest)})
        return
    typer.echo(f"{len(contest.models)} models, {contest.requests} requests, {contest.cores} cores\n")
    _print_outcomes(contest)
    for failure in contest.failures:
        typer.echo(f"{failure.contender}: not measured: {failure.reason}")
    if contest.ratio_to_best_peer is not None:
        typer.echo(f"\nWithin SLO against the best peer ({contest.best_peer}): {contest.ratio_to_best_peer:.2f} times.")
    for outcome in outcomes:
        if twin and outcome.event_log:
            typer.echo(f"The same run simulated: {twin_command(outcome.event_log)}")


def _print_outcomes(contest: Contest) -> None:
    rows: list[tuple[str, Callable[[Any], str]]] = [
        ("precision", lambda one: one.precision),
        ("within SLO", lambda one: f"{one.figures.attained} ({one.figures.attainment:.1%})"),
        ("  with grace", lambda one: f"{one.figures.attainment_with_grace:.1%}" if one.has_grace else "not told"),
        ("  per core and minute", lambda one: f"{one.figures.attained_per_core_minute:.2f}"),
        ("TTFT p50 / p99", lambda one: f"{one.figures.ttft_p50_s:.2f} / {one.figures.ttft_p99_s:.2f} s"),
        (
            "TTFT, first of a model",
            lambda one: f"{one.figures.first_ttft_p50_s:.2f} / {one.figures.first_ttft_max_s:.2f} s",
        ),
        ("TTFT of a start", _start_text),
        ("TPOT p50 / p99", lambda one: f"{1e3 * one.figures.tpot_p50_s:.0f} / {1e3 * one.figures.tpot_p99_s:.0f} ms"),
        ("refused, errors", lambda one: f"{one.figures.refused}, {one.figures.errors}"),
        ("cold starts", _cold_starts_text),
        ("load p50 / worst", _load_text),
        (
            "memory mean / peak",
            lambda one: f"{human_bytes(one.memory_mean_bytes)} / {human_bytes(one.memory_peak_bytes)}",
        ),
        ("CPU of all cores", lambda one: f"{one.cpu_share:.0%}"),
        ("ready after", lambda one: f"{one.ready_s:.1f} s"),
    ]
    columns = _table("", *(outcome.contender for outcome in contest.outcomes))
    for label, text in rows:
        columns.add_row(label, *(text(outcome) for outcome in contest.outcomes))
    _show(columns)


def _table(*columns: str) -> Table:
    from rich.table import Table

    return Table(*columns, box=None)


def _show(table: Table) -> None:
    from rich.console import Console

    Console().print(table)


def _cold_starts_text(outcome: Any) -> str:
    if outcome.cold_starts is None:
        return "not told"
    return ", ".join(f"{count} {tier}" for tier, count in outcome.cold_starts.by_tier.items()) or "0"


def _start_text(outcome: Any) -> str:
    figures = outcome.figures
    return f"{figures.start_ttft_p50_s:.2f} / {figures.start_ttft_max_s:.2f} s ({figures.starts})"


def _load_text(outcome: Any) -> str:
    starts = outcome.cold_starts
    return "" if starts is None else f"{1e3 * starts.load_s_p50:.0f} / {1e3 * starts.load_s_max:.0f} ms"


def _show_lives(starts: Sequence[StartTime], idle: IdleReport | None, *, as_json: bool) -> None:
    if as_json:
        print_json({"cold_start": starts, "idle": idle})
        return
    if starts:
        columns = _table("state", "first token (spread)", "over warm", "page cache", "tier, as the server says")
        for each in starts:
            spread = f"{each.seconds_median:.3f} s ({each.seconds_max - each.seconds_min:.3f})"
            tiers = ", ".join(f"{count} {tier}" for tier, count in each.tiers.items())
            columns.add_row(each.state, spread, f"{1e3 * each.over_warm_s:+.0f} ms", f"{each.cached_share:.0%}", tiers)
        _show(columns)
    if idle is not None:
        columns = _table("", "memory (PSS)", "CPU of one core")
        columns.add_row("empty", human_bytes(idle.empty.pss_bytes), f"{idle.empty.cpu_share:.1%}")
        columns.add_row("under load", human_bytes(idle.loaded_peak_pss_bytes), f"{idle.loaded_cpu_share:.0%}")
        after = f"{human_bytes(idle.after.pss_bytes)} ({idle.memory_over_empty:+.1%})"
        columns.add_row(f"{idle.after_s:.0f} s after", after, f"{idle.after.cpu_share:.1%}")
        _show(columns)
