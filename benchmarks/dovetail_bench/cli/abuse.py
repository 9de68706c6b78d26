"""`bench abuse`: noisy neighbours beside a client that measures."""

from __future__ import annotations

import sys
from itertools import count
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.output import human_bytes, print_json
from dovetail_bench.cli.progress import progress, span

if TYPE_CHECKING:
    from dovetail_bench.abuse import CaseResult


def abuse(
    model: Annotated[str, typer.Argument(help="A name from `dovetail list`; served under two names.")],
    case: Annotated[list[str] | None, typer.Option(help="Only these; may be repeated.  [default: all]")] = None,
    seconds: Annotated[float, typer.Option(help="Of each phase, before and during.", min=0.5)] = 5.0,
    tpot: Annotated[
        float, typer.Option(help="Milliseconds a token that the measured model promises; 0 = the default.")
    ] = 0,
    threads: Annotated[int, typer.Option(help="That compute; 0 = one per core.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """What clients see while another one misbehaves: the time of /live and the gaps in another model's stream, in
    milliseconds and in token times of that stream alone.

    Attackers are a process of its own with a low priority (nice 10), so that what they compute themselves takes little
    from the server. On a machine of few cores `busy-core` shows what is left of that, and so does the percentile
    without the time in which attackers ran while the server's threads waited for a core. With fewer --threads than
    cores the rest of the server has cores of its own.

    Example: dovetail bench abuse smollm2-135m-instruct --case tokenize --case half-bodies
    """
    from dovetail_bench.abuse import run_cases
    from dovetail_bench.abuse_cases import CASES

    names = case or list(CASES)
    for name in names:
        if name not in CASES:
            raise typer.BadParameter(f"{name} is none of {', '.join(CASES)}", param_hint="--case")
    counter = count(1)

    def end_case(done: CaseResult) -> None:
        _say(done)
        step(done.name, next(counter), len(names))

    phases = f"{len(names)} cases of two phases of {seconds:g} s: {span(2 * seconds * len(names))}"
    with progress(f"{phases}, after the start of a server.") as step:
        results = run_cases(model, names, seconds, end_case, tpot_ms=tpot, threads=threads)
    if as_json:
        return print_json(results)
    _print(results)


def _say(done: CaseResult) -> None:
    before, during = done.before, done.during
    live, gap = f"{before.live_p99:.0f} → {during.live_p99:.0f}", f"{before.gap_p99:.0f} → {during.gap_p99:.0f}"
    tokens = f"{done.p99_tokens:.1f} token times of {done.token_ms:.1f} ms, longest {done.longest_tokens:.1f}"
    tokens += f", {done.p99_alone_tokens:.1f} without the attackers' own computing"
    print(f"{done.name}: /live p99 {live} ms, stream p99 {gap} ms, {tokens}", file=sys.stderr, flush=True)


def _print(results: list[CaseResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    caption = (
        "milliseconds, before → during; token times: of the stream by itself (p50 before); alone: without what the "
        "attackers' own computing took from the server's threads, at most; gateway's memory"
    )
    table = Table(box=None, pad_edge=False, caption=caption)
    headings = ("case", "/live p50", "p99", "max", "stream p50", "p99", "max", "p99, alone, max in token times")
    for heading in (*headings, "failed", "memory, peak, after"):
        table.add_column(heading, justify="left" if heading == "case" else "right", no_wrap=True)
    for each in results:
        times = [
            f"{getattr(each.before, field):.1f} → {getattr(each.during, field):.1f}"
            for field in ("live_p50", "live_p99", "live_max", "gap_p50", "gap_p99", "gap_max")
        ]
        memory = ", ".join(human_bytes(size) for size in (each.memory_before, each.memory_peak, each.memory_after))
        tokens = f"{each.p99_tokens:.1f}, {each.p99_alone_tokens:.1f}, {each.longest_tokens:.1f}"
        table.add_row(each.name, *times, tokens, str(each.during.failures), memory)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
