"""`bench adapters`: many LoRA adapters of one model, next to as many merged models and to one adapter at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.output import human_bytes, print_json
from dovetail.errors import ConfigError
from dovetail.machine import usable_cores
from dovetail_bench.cli.many import _range, _show, _table, by_popularity
from dovetail_bench.cli.progress import progress, span

if TYPE_CHECKING:
    from dovetail_bench.adapters import AdapterContest

ALL = "adapters,one,merged"
BATCHES = (1, 4, 16)


def adapters(
    count: Annotated[int, typer.Option("--adapters", help="Adapters of the model.", min=1)] = 64,
    rank: Annotated[str, typer.Option(help="Their ranks, from-to.")] = "8-16",
    minutes: Annotated[float, typer.Option(help="Length of the run of each contender.", min=0.01)] = 1.5,
    rate: Annotated[float, typer.Option(help="Requests a second over all adapters.", min=0.001)] = 1.5,
    zipf: Annotated[float, typer.Option(help="Popularity of rank r falls as r^-ZIPF.", min=0.0)] = 1.0,
    cv: Annotated[float, typer.Option(help="Of the gaps between arrivals; 1 = Poisson.", min=0.01)] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.")] = 0,
    input_tokens: Annotated[str, typer.Option("--input", help="Prompt tokens, from-to.")] = "32-96",
    output_tokens: Annotated[str, typer.Option("--output", help="Answer tokens, from-to.")] = "16-64",
    contenders: Annotated[str, typer.Option(help=f"Which of {ALL}, in this order; empty = steps only.")] = ALL,
    share: Annotated[float, typer.Option(help="Of the merged models that fit into memory.", min=0.01, max=1.0)] = 1 / 3,
    keep_alive: Annotated[float, typer.Option(help="Seconds that an idle model stays.", min=0.0)] = 30.0,
    base: Annotated[str | None, typer.Option(help="A source for `pull`.  [default: SmolLM2-135M-Instruct]")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Of models and logs.  [default: bench/adapters under $DOVETAIL_HOME]"),
    ] = None,
    targets: Annotated[bool, typer.Option(help="Send targets, so that what cannot be in time is refused.")] = False,
    prepare: Annotated[bool, typer.Option("--prepare", help="Write models and adapters, measure nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Many adapters of one model: what came within its SLO and how fast, together, one at a time, and merged.

    Contenders run one after another on the same requests and have the same memory. Run it while nothing else does.

    Example: dovetail bench adapters --adapters 64 --minutes 1.5 --rate 1.5
    """
    from dovetail.machine import default_root
    from dovetail.store import Catalogue
    from dovetail_bench.adapters import AdapterContest, compete, make_adapters, make_copies, measure_steps
    from dovetail_bench.fleet import DEMO
    from dovetail_bench.load import Mix, arrivals_of
    from dovetail_bench.servers import Settings

    names = [name for name in contenders.split(",") if name]
    if set(names) - set(ALL.split(",")):
        raise ConfigError(f"--contenders {contenders}: expected some of {ALL}")
    place = folder or default_root() / "bench" / "adapters"
    place.mkdir(parents=True, exist_ok=True)
    ranks = _range(rank, "--rank")
    mix = Mix(minutes, rate, zipf, cv, _range(input_tokens, "--input"), _range(output_tokens, "--output"), seed)
    runs = f"Contenders: {len(names)}, for {minutes:g} min each, one after another: {span(60 * len(names) * minutes)}"
    with progress(f"{runs}. First it writes {count} adapters and as many merged models unless they are there.") as step:
        catalogue = Catalogue(place / "store")
        card = catalogue.pull(base or DEMO, name="base")
        models = by_popularity(make_copies(catalogue, card, count, step), seed)
        names_of = sorted(model.name for model in models)
        made = make_adapters(catalogue, place / "adapters", card, names_of, ranks, step)
        if prepare:
            return
        arrivals = arrivals_of(mix, len(models))
        settings = Settings(place, usable_cores(), share, keep_alive, sends_targets=targets)
        steps, each = measure_steps(card, [Path(card.path).parent / name for name in made.values()], BATCHES)
        outcomes = compete(models, card, made, arrivals, settings, seed, step, names)
    contest = AdapterContest(count, *ranks, each * count, settings.cores, len(arrivals), steps, outcomes)
    if as_json:
        import msgspec

        plain = [msgspec.structs.replace(outcome, answers=[], samples=[]) for outcome in outcomes]
        print_json({"mix": mix, **msgspec.structs.asdict(msgspec.structs.replace(contest, outcomes=plain))})
    else:
        _print(contest)


def _print(contest: AdapterContest) -> None:
    ranks = f"{contest.rank_from}-{contest.rank_to}"
    typer.echo(
        f"{contest.adapters} adapters of rank {ranks}, about {human_bytes(contest.adapter_bytes)} in memory; "
        f"{contest.requests} requests, {contest.cores} cores\n"
    )
    steps = _table("rows", "adapters", "iteration", "without")
    for one in contest.steps:
        steps.add_row(str(one.batch), str(one.adapters), f"{1e3 * one.seconds:.1f} ms", f"{one.over_none:.2f} times")
    _show(steps)
    if not contest.outcomes:
        return
    table = _table("", *(outcome.contender for outcome in contest.outcomes))
    figures = [outcome.figures for outcome in contest.outcomes]
    table.add_row("within SLO", *(f"{one.attained} ({one.attainment:.1%})" for one in figures))
    table.add_row("  with grace", *(f"{one.attainment_with_grace:.1%}" for one in figures))
    table.add_row("tokens/s", *(f"{one.tokens / max(one.seconds, 1e-9):.1f}" for one in figures))
    table.add_row("TTFT p50 / p99", *(f"{one.ttft_p50_s:.2f} / {one.ttft_p99_s:.2f} s" for one in figures))
    table.add_row("TPOT p50 / p99", *(f"{1e3 * one.tpot_p50_s:.0f} / {1e3 * one.tpot_p99_s:.0f} ms" for one in figures))
    table.add_row("refused, errors", *(f"{one.refused}, {one.errors}" for one in figures))
    table.add_row("memory at the peak", *(human_bytes(one.memory_peak_bytes) for one in contest.outcomes))
    _show(table)
