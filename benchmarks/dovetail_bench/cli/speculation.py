"""`bench speculation`: tokens per second with and without drafts, on texts that repeat themselves and that do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dovetail.cli.output import print_json
from dovetail_bench.cli.many import _show, _table
from dovetail_bench.cli.progress import progress

if TYPE_CHECKING:
    from dovetail_bench.speculation import SpeculationResult


def speculation(
    model: Annotated[str, typer.Argument(help="A name from `dovetail list`.")] = "smollm2-135m-instruct",
    mode: Annotated[Literal["auto", "always"], typer.Option(help="Of `speculative` in the configuration.")] = "auto",
    tokens: Annotated[int, typer.Option(help="Proposed at a time, at most.", min=1, max=64)] = 8,
    rounds: Annotated[int, typer.Option(help="Answers to each prompt, with and without.", min=1)] = 3,
    max_tokens: Annotated[int, typer.Option(help="Of each answer.", min=2)] = 128,
    draft: Annotated[str, typer.Option(help="A smaller model that proposes, too: a name from `dovetail list`.")] = "",
    temperature: Annotated[float, typer.Option(help="0 = greedy, else drawn with a seed.", min=0, max=2)] = 0.0,
    only: Annotated[
        str, typer.Option(help="Texts to ask for, with commas: repeat,edit,summarise,advice,story,explain.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Speculative decoding: the same answers with and without drafts, in turn, one request at a time.

    Example: dovetail bench speculation smollm2-135m-instruct --rounds 3
    """
    from dovetail_bench.speculation import CASES, measure

    cases = [case for case in CASES if not only or case.name in only.split(",")]
    if not cases or len(cases) < len(only.split(",")):
        raise typer.BadParameter("one of these is no text of this bench", param_hint="--only")
    answers = 2 * rounds * len(cases)
    with progress(f"{answers} answers of up to {max_tokens} tokens, one after another.") as step:
        result = measure(model, mode, tokens, rounds, max_tokens, cases, draft, temperature, step)
    if as_json:
        gains = {"gain_repeating": result.gain(repeats=True), "gain_plain": result.gain(repeats=False)}
        print_json({**_fields(result), **gains})
    else:
        _print(result)


def _fields(result: SpeculationResult) -> dict[str, object]:
    import msgspec

    return msgspec.structs.asdict(result)


def _print(result: SpeculationResult) -> None:
    table = _table("text", "repeats", "without", "with", "gain", "right", "wrong", "same text")
    for case in result.cases:
        table.add_row(
            case.case,
            "yes" if case.repeats else "no",
            _rate(case.off, case.off_range),
            _rate(case.on, case.on_range),
            f"{case.gain:.2f}",
            str(case.accepted),
            str(case.rejected),
            "yes" if case.same_text else "NO",
        )
    _show(table)
    typer.echo(f"repeating: {result.gain(repeats=True):.2f} times, others: {result.gain(repeats=False):.2f} times")


def _rate(median: float, ends: tuple[float, float]) -> str:
    return f"{median:.1f} ({ends[0]:.1f}-{ends[1]:.1f}) tokens/s"
