"""`dovetail sim`: run a trace through a policy in virtual time, compare policies, sweep settings, break things.

Only reads options and prints; the work is in `dovetail.sim`.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from dovetail import plots
from dovetail.cli.sim_bound import bounds
from dovetail.errors import ConfigError, DovetailError
from dovetail.eventlog import EventLog
from dovetail.policy.compositions import Composition
from dovetail.profiles.files import preset_errors, read_profile
from dovetail.profiles.hardware import PRESETS
from dovetail.sim import real_log, serverlessllm, twin
from dovetail.sim import replay as replaying
from dovetail.sim.compositions import POLICIES, policy, with_text
from dovetail.sim.cost import measure_decisions, measure_placement
from dovetail.sim.driver import Simulation
from dovetail.sim.explain import Explainer, explain, explain_log
from dovetail.sim.layout import Layout, read_layout
from dovetail.sim.metrics import Result, together
from dovetail.sim.parallel import parallel_errors
from dovetail.sim.report import write_report
from dovetail.sim.scale import run_scale
from dovetail.sim.setup import Setup, build
from dovetail.sim.storm import Stuck, run_storm
from dovetail.sim.sweeps import SWEEPS, Cell, sweep
from dovetail.sim.trace import write_trace
from dovetail.sim.workload import DEFAULT_LENGTHS, Workload, read_lengths
from dovetail.sim.workload import generate as generate_workload

app = typer.Typer(no_args_is_help=True, help="Simulate token-level sharing in virtual time.")
app.command("bound")(bounds)
STORM_CPU_S = 60.0
console = Console(width=None if sys.stdout.isatty() else 200)  # a pipe gets whole rows

TraceOption = Annotated[Path, typer.Option(help="CSV of arrival_s, model, input_tokens, output_tokens; may be .gz")]
ProfileOption = Annotated[Path, typer.Option(help="JSON of measured iteration times")]
ModelsOption = Annotated[int | None, typer.Option(help="keep this many of the trace's models")]
ShapeOption = Annotated[str, typer.Option("--shape", "--size", help="model shape, a name in the profile")]
NoiseOption = Annotated[float, typer.Option(help="standard deviation of iteration times, relative")]
NodesOption = Annotated[int | None, typer.Option(min=1, help="this many CPU nodes and this many GPU nodes")]
LimitOption = Annotated[float | None, typer.Option(help="leave out arrivals after this many seconds")]
VariedOption = Annotated[bool, typer.Option("--varied", help="the seed also varies the trace: its start, its models")]
LengthsOption = Annotated[Path | None, typer.Option(help="draw lengths from this table, not from the trace")]
ClientsOption = Annotated[Path | None, typer.Option(help="draw lengths of a client of this table for each model")]
HardwareOption = Annotated[str | None, typer.Option(help="a name in the profile, or a preset of `sim presets`")]
WithoutOption = Annotated[
    list[str] | None, typer.Option(help="switch a part off: no-cpu, no-sharing, no-consolidation, watermark-0; or pd")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE, a parameter of the policy")]


def composition_of(name: str, without: list[str] | None, changes: list[str] | None) -> Composition:
    composition = policy(name, tuple(without or ()))
    for change in changes or []:
        key, _, text = change.partition("=")
        try:
            composition = with_text(composition, key, text)
        except ConfigError as error:
            raise ConfigError(f"--set {change}: {error}") from error
    return composition


def simulate(simulation: Simulation, quiet: bool, label: str) -> Result:
    """Run with a progress bar over virtual time on stderr."""
    if quiet or not sys.stderr.isatty():
        return simulation.timed_run()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f} s"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=simulation.horizon_s)
        simulation.on_sample = lambda now: progress.update(task, completed=now)
        return simulation.timed_run()


OF_A_LAYOUT = ("models", "shape", "cpu_nodes", "gpu_nodes", "nodes", "cpu_hardware", "gpu_hardware")


def _layout(context: typer.Context, config: Path | None) -> Layout | None:
    if config is None:
        return None
    for name in OF_A_LAYOUT:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise ConfigError(f"--{name.replace('_', '-')}: {config} has the nodes and models; leave one of them out")
    return read_layout(config)


@app.command()
def run(
    context: typer.Context,
    trace: TraceOption,
    profile: ProfileOption,
    models: ModelsOption = None,
    shape: ShapeOption = "llama-2-7b",
    cpu_nodes: Annotated[int, typer.Option(min=0)] = 4,
    gpu_nodes: Annotated[int, typer.Option(min=0)] = 4,
    policy: Annotated[str, typer.Option(help=", ".join(POLICIES))] = "dovetail",
    without: WithoutOption = None,
    changes: SetOption = None,
    seed: int = 0,
    noise: NoiseOption = 0.05,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    event_log: Annotated[Path | None, typer.Option(help="write every event here, one JSON object a line")] = None,
    report: Annotated[Path | None, typer.Option(help="write an HTML report here")] = None,
    request: Annotated[int | None, typer.Option("--explain", help="tell the story of this request (0 = first)")] = None,
    limit: LimitOption = None,
    nodes: NodesOption = None,
    cpu_hardware: HardwareOption = None,
    gpu_hardware: HardwareOption = None,
    varied: VariedOption = False,
    lengths: LengthsOption = None,
    clients: ClientsOption = None,
    faults: Annotated[int, typer.Option(min=0, help="inject this many faults, drawn from the seed")] = 0,
    best_effort: Annotated[
        float, typer.Option(min=0.0, help="so many requests of best effort a second beside the trace's")
    ] = 0.0,
    priority: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="this share of the trace's requests goes first")
    ] = 0.0,
    config: Annotated[Path | None, typer.Option(help="YAML with nodes and models, instead of the options")] = None,
) -> None:
    """One trace, one policy. Example: dovetail sim run --trace t.csv --profile p.json --config cluster.yaml --json"""
    if report is not None:
        plots.require()
    setup = Setup(
        trace=trace,
        profile=profile,
        composition=composition_of(policy, without, changes),
        shape=shape,
        models=models,
        cpu_nodes=cpu_nodes if nodes is None else nodes,
        gpu_nodes=gpu_nodes if nodes is None else nodes,
        seed=seed,
        noise=noise,
        limit_s=limit,
        varied=varied,
        lengths=lengths,
        clients=clients,
        cpu_hardware=cpu_hardware,
        gpu_hardware=gpu_hardware,
        faults=faults,
        best_effort_per_s=best_effort,
        priority=priority,
        layout=_layout(context, config),
        config=config,
    )
    result, story = _run(setup, event_log, request, quiet=as_json)
    if report is not None:
        write_report(report, [result], origin=_origin(trace, profile, seed, config=config))
    if as_json:
        typer.echo(json.dumps(result.summary() | ({} if story is None else {"explained": story.splitlines()})))
    elif story is not None:
        typer.echo(story)
    else:
        console.print(_summary_table([("", result)]))


def _run(setup: Setup, event_log: Path | None, request: int | None, quiet: bool) -> tuple[Result, str | None]:
    """What came of it, and the story of the request that was asked for."""
    with nullcontext() if event_log is None else event_log.open("w", encoding="utf-8") as file:
        explainer = None if request is None else Explainer(request, file)
        log = explainer or (None if file is None else EventLog(file))
        if file is not None and log is not None:
            log.header(**replaying.settings_of(setup))
        result = simulate(build(setup, log), quiet, setup.composition.name)
        return result, None if explainer is None else explain(explainer, result)


@app.command()
def replay(
    log: Annotated[Path, typer.Argument(help="an event log, of a simulation or of a real node")],
    seed: int = 0,
    seeds: Annotated[int, typer.Option(min=1, help="of a real node: simulations, of which the median is shown")] = 9,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Run a stored log again.

    A simulation must come out the same, to the byte. A real node (event_log in its config) is simulated with its own
    memory, models, latencies and requests, and shown beside what really happened.

    Example: dovetail sim replay node.jsonl
    """
    if not real_log.is_real(log):
        lines = replaying.replay(log)
        typer.echo(f"{log}: {lines} lines, identical")
        return
    stored = real_log.read_real(log)
    real = real_log.real_result(stored)
    rows = twin.side_by_side(real, [twin.simulate(stored, real, seed + i) for i in range(seeds)])
    _print_rows(rows, as_json)


def _print_rows(rows: Sequence[Mapping[str, object]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*[str(value) for value in row.values()])
    console.print(table)


@app.command("explain")
def explain_command(
    log: Annotated[Path, typer.Argument(help="an event log, of a simulation or of a real node")],
    request: Annotated[int, typer.Argument(help="the request's number in the log")],
) -> None:
    """Why a request of a stored log was placed, queued, moved or dropped.

    Example: dovetail sim explain node.jsonl 17
    """
    typer.echo(explain_log(log, request))


@app.command()
def compare(
    trace: TraceOption,
    profile: ProfileOption,
    name: Annotated[str, typer.Option("--sweep", help=", ".join(SWEEPS))] = "policies",
    shape: Annotated[str, typer.Option("--shape", "--size")] = "llama-2-7b",
    models: ModelsOption = None,
    seed: int = 0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    report: Annotated[Path | None, typer.Option(help="write an HTML report of all runs here")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="only these policies; may be repeated")] = None,
    nodes: NodesOption = None,
    limit: LimitOption = None,
    only: Annotated[list[str] | None, typer.Option(help="only rows with this label; may be repeated")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each setting, from --seed on, counted as one")] = 1,
) -> None:
    """Several policies or settings side by side, one table."""
    if report is not None:
        plots.require()
    rows: list[tuple[Cell, Result]] = []
    for cell, setup in sweep(name, trace, profile, shape, models, seed, limit):
        if policy and setup.composition.name not in policy:
            continue
        if only and not set(only) & set(map(str, cell.labels)):
            continue
        if nodes is not None:
            setup = replace(setup, cpu_nodes=nodes, gpu_nodes=nodes)
        label = " ".join(str(part) for part in cell.labels)
        runs = [simulate(build(replace(setup, seed=seed + more)), as_json, label) for more in range(seeds)]
        rows.append((cell, together(runs)))
    if report is not None:
        labels = [" ".join(map(str, cell.labels)) for cell, _ in rows]
        write_report(report, [result for _, result in rows], labels, _origin(trace, profile, seed, sweep=name))
    if as_json:
        typer.echo(json.dumps([{**cell.as_dict(), **result.summary()} for cell, result in rows]))
    else:
        console.print(SWEEPS[name].table(rows))


def _origin(trace: Path, profile: Path, seed: int, **others: object) -> dict[str, object]:
    given = {key: value for key, value in others.items() if value is not None}
    return {"trace": trace, "profile": profile, "seed": seed, **given}


def _summary_table(rows: list[tuple[str, Result]]) -> Table:
    table = Table("", *[label for label, _ in rows], show_header=False)
    for key in rows[0][1].summary():
        table.add_row(key, *[str(result.summary()[key]) for _, result in rows])
    for quarter in range(4):
        shares = [result.by_popularity() for _, result in rows]
        if all(len(share) > quarter for share in shares):
            table.add_row(f"met, popularity quartile {quarter + 1}", *[f"{share[quarter]:.1%}" for share in shares])
    return table


@app.command()
def storm(
    seeds: Annotated[int, typer.Option(min=1)] = 1000,
    first: Annotated[int, typer.Option(help="first seed; a failing run is replayed with --first SEED --seeds 1")] = 0,
) -> None:
    """Fault storms: small random clusters with dying, stalling and slow nodes; every invariant is checked."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("storm", total=seeds)
        failures = run_storm(range(first, first + seeds), lambda: progress.advance(task), _limit_cpu)
    for seed, problem in failures:
        typer.echo(f"seed {seed}: {problem}")
    typer.echo(f"{seeds} seeds, {len(failures)} violated an invariant")
    if failures:
        raise typer.Exit(1)


@contextmanager
def _limit_cpu() -> Iterator[None]:
    """A seed takes a fifth of a second; one that takes this long never ends."""

    def give_up(*_: object) -> None:
        raise Stuck(f"no end after {STORM_CPU_S:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, STORM_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


@app.command()
def generate(
    out: Annotated[Path, typer.Argument(help="trace to write, CSV")],
    requests: int = 10_000,
    models: int = 128,
    rate: Annotated[float, typer.Option(help="requests per second")] = 5.0,
    zipf: Annotated[float, typer.Option(help="popularity of rank r falls as r^-zipf")] = 1.0,
    cv: Annotated[float, typer.Option(help="coefficient of variation of the gaps; 1 = Poisson")] = 1.0,
    wave: Annotated[float, typer.Option(help="share by which the rate swings over a day")] = 0.0,
    burst_every: Annotated[float, typer.Option(help="mean seconds between bursts of one model; 0 = none")] = 0.0,
    lengths: Annotated[Path | None, typer.Option(help="table of input and output tokens")] = None,
    seed: int = 0,
) -> None:
    """Write a workload as a trace that `run` reads."""
    workload = Workload(requests, models, rate, zipf=zipf, cv=cv, wave=wave, burst_every_s=burst_every)
    arrivals = generate_workload(workload, seed, read_lengths(lengths) if lengths else DEFAULT_LENGTHS)
    write_trace(out, arrivals)
    typer.echo(f"{out}: {len(arrivals)} requests in {arrivals[-1].arrival_s:.0f} s")


@app.command()
def presets(
    profile: ProfileOption,
    parallel: Annotated[Path | None, typer.Option(help="CSV of Llama-2-70B split over 2, 4 and 8 devices")] = None,
) -> None:
    """Hardware presets, and how far their roofline is from the profile where it has the same hardware."""
    table = Table("preset", "TFLOP/s", "GB/s", "GiB", "model", "prefill mean", "worst", "decode mean", "worst")
    for name, hardware in PRESETS.items():
        figures = (f"{hardware.flops / 1e12:.0f}", f"{hardware.bandwidth / 1e9:.0f}", f"{hardware.memory_gib:.0f}")
        errors = preset_errors(read_profile(profile), name)
        for model, error in errors.items():
            table.add_row(name, *figures, model, *[f"{share:.0%}" for share in asdict(error).values()])
        if not errors:
            table.add_row(name, *figures)
    console.print(table)
    if parallel is not None:
        split = Table("preset", "devices", "prefill mean", "worst", "decode mean", "worst", title="Llama-2-70B, split")
        for (name, ways), error in parallel_errors(parallel).items():
            split.add_row(name, str(ways), *[f"{share:.0%}" for share in asdict(error).values()])
        console.print(split)


@app.command()
def cost(
    profile: ProfileOption,
    nodes: Annotated[list[int] | None, typer.Option(help="cluster sizes")] = None,
    load: Annotated[float, typer.Option(help="arrivals, as a multiple of the trace's")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Processor time of scheduling decisions of the dovetail policy, by number of nodes."""
    rows = [measure_decisions(profile, count, load=load) for count in nodes or [8, 64, 512]]
    _print_rows(rows, as_json)


@app.command()
def placements(
    servers: Annotated[list[int] | None, typer.Option(help="machines of four GPUs each")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Processor time of placements by startup time (the serverlessllm policy), by number of machines.

    Example: dovetail sim placements --servers 1000
    """
    _print_rows([measure_placement(count) for count in servers or [10, 100, 1000]], as_json)


@app.command()
def figures(
    paper: Annotated[str, typer.Argument(help="serverlessllm")] = "serverlessllm",
    figure: Annotated[str | None, typer.Option(help=", ".join(serverlessllm.FIGURES))] = None,
    system: Annotated[list[str] | None, typer.Option(help="only these systems; may be repeated")] = None,
    cv: Annotated[float, typer.Option(help="coefficient of variation of the gaps between arrivals")] = 8.0,
    per_model: Annotated[bool, typer.Option("--per-model", help="that of each model, not of all")] = False,
    span: Annotated[float, typer.Option(help="seconds of arrivals")] = serverlessllm.SPAN_S,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each setting, counted as one")] = 1,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Figures of a paper simulated on its test bed, beside its numbers (Fig 8 to 12 of ServerlessLLM).

    Example: dovetail sim figures serverlessllm --figure 8 --cv 2
    """
    if paper != "serverlessllm" or figure not in (None, *serverlessllm.FIGURES):
        known = ", ".join(serverlessllm.FIGURES)
        raise ConfigError(f"figures {paper} {figure or ''}: expected serverlessllm, and one of {known} for --figure")
    rows = []
    for cell in serverlessllm.cells(figure, cv, is_per_model=per_model):
        if not system or cell.system in system:
            rows.append(serverlessllm.run_cell(cell, range(seeds), span))
            if not as_json:
                typer.echo(" ".join(map(str, rows[-1].values())), err=True)
    _print_rows(rows, as_json)


@app.command()
def scale(
    profile: ProfileOption,
    nodes: int = 1000,
    models: int = 10_000,
    requests: int = 1_000_000,
    seed: int = 0,
    changes: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """A run of a large generated cluster, with its time and memory.

    Example: dovetail sim scale --profile p.json --nodes 100 --models 1000 --requests 20000 --json
    """
    composition = composition_of("dovetail", None, changes)
    with Progress(console=Console(stderr=True), disable=as_json or not sys.stderr.isatty()) as progress:
        task = progress.add_task("scale", total=1.0)
        figures = run_scale(
            profile, nodes, models, requests, seed, composition, lambda p: progress.update(task, completed=p)
        )
    if as_json:
        typer.echo(json.dumps(figures))
        return
    table = Table("", "", show_header=False)
    for key, value in figures.items():
        table.add_row(key, str(value))
    console.print(table)


def main() -> None:
    try:
        app(standalone_mode=True)
    except DovetailError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
