"""`bench`: measurements, side by side with peers where there are any."""

from __future__ import annotations

import signal
import sys
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.output import human_bytes, print_json
from dovetail.modelspec import KvKind
from dovetail_bench.cli.abuse import abuse
from dovetail_bench.cli.adapters import adapters
from dovetail_bench.cli.bucket import bucket
from dovetail_bench.cli.engines import engines
from dovetail_bench.cli.first import first
from dovetail_bench.cli.gaps import batch
from dovetail_bench.cli.loop import loop
from dovetail_bench.cli.many import many
from dovetail_bench.cli.progress import progress
from dovetail_bench.cli.register import record, report
from dovetail_bench.cli.sampling import sampling
from dovetail_bench.cli.speculation import speculation
from dovetail_bench.cli.store import store
from dovetail_bench.cli.streaming import streaming
from dovetail_bench.cli.switches import switches
from dovetail_bench.cli.thesis import templates, thesis

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from dovetail_bench.cold_start import ColdStart, Summary

app = typer.Typer(help="Measure this machine and this build.", no_args_is_help=True)
app.command("adapters")(adapters)
app.command("many")(many)
app.command("engines")(engines)
app.command("abuse")(abuse)
app.command("speculation")(speculation)
app.command("batch")(batch)
app.command("loop")(loop)
app.command("sampling")(sampling)
app.command("streaming")(streaming)
app.command("switches")(switches)
app.command("first")(first)
app.command("store")(store)
app.command("bucket")(bucket)
app.command("thesis")(thesis)
app.command("templates")(templates)
app.command("record")(record)
app.command("report")(report)


@app.callback()
def _group() -> None:
    """Measure this machine and this build. Run it while nothing else does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exit, so that what was started ends too


@app.command("iterations")
def iterations(
    model: Annotated[str, typer.Option(help="Shape of the random model: 135M, 0.5B or 1B.")] = "135M",
    stored: Annotated[str, typer.Option(help="Type or layout of the weights: f32, bf16, f16, int8, int4.")] = "bf16",
    levels: Annotated[str | None, typer.Option(help="Of kernels, in turns.  [default: torch and the best one]")] = None,
    rounds: Annotated[int, typer.Option(help="Timed rounds of each cell; levels take turns.", min=1)] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Milliseconds of one iteration by level of kernels, and its share of what the machine can do at best.

    The share in native code is of whole steps, with scheduler and executor as a worker has them.

    Example: dovetail bench iterations --model 0.5B --json
    """
    from dovetail.engine.dtypes import compute_dtype
    from dovetail.machine import preferred_dtype
    from dovetail.native import levels as levels_here
    from dovetail_bench.iterations import BATCHES, PROMPTS, compare
    from dovetail_bench.shapes import SHAPES

    if model not in SHAPES:
        raise typer.BadParameter(f"{model} is none of {', '.join(SHAPES)}", param_hint="--model")
    found = levels_here()
    chosen = list(dict.fromkeys((found[0], found[-1]) if levels is None else levels.split(",")))
    for level in chosen:
        if level not in found:
            raise typer.BadParameter(f"{level} is none of {', '.join(found)}", param_hint="--levels")
    total = (rounds + 1) * (len(PROMPTS) + len(BATCHES))
    with progress(f"{total} rounds of {len(chosen)} levels of kernels; the first takes longest.") as step:
        counter = count(1)
        dtype = compute_dtype("auto", preferred_dtype() if stored in ("int8", "int4") else stored)
        cells = compare(model, stored, dtype, chosen, rounds, lambda: step("rounds", next(counter), total))
    if as_json:
        return print_json(cells)
    for cell in cells:
        share = "no roofline" if cell.roofline is None else f"{cell.roofline:.0%} of the roofline"
        native = "" if cell.native is None else f", {cell.native:.1%} of a step in native code"
        what = f"{cell.model} {cell.stored} {cell.metric} {cell.size:5} {cell.level:7}"
        print(f"{what} {cell.median_ms:9.1f} ms  {share}{native}")


@app.command("fidelity")
def fidelity(
    model: Annotated[str, typer.Argument(help="A name from `dovetail list`, quantised, say.")],
    reference: Annotated[str, typer.Argument(help="The same model in another form.")],
    text: Annotated[list[Path], typer.Option(help="What both read; again for more files.", exists=True)],
    tokens: Annotated[int, typer.Option(help="Read so many of it.", min=2)] = 1024,
    kv: Annotated[KvKind, typer.Option(help="Keys and values of the first, as `kv` in the configuration.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, or cuda:N: both on that GPU, the second in float32.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the first on a GPU: auto, bf16, f16, f32, fp8.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """How far a model's predictions are from those of another form of it, token by token of a text.

    Example: dovetail bench fidelity smollm2-int8 smollm2 --text docs/design/structures.md
    """
    from tokenizers import Tokenizer

    from dovetail.store import Catalogue, open_checkpoint
    from dovetail_bench.fidelity import compare, compare_on_gpu

    card, other = Catalogue().get(model), Catalogue().get(reference)
    words = "".join(path.read_text() for path in text)
    read = Tokenizer.from_file(card.tokenizer_file).encode(words).ids[:tokens]
    ours, theirs = open_checkpoint(Path(card.path)), open_checkpoint(Path(other.path))
    with progress(f"Both models read {len(read)} tokens."):
        if device == "cpu":
            found = compare(theirs, ours, read, kv=kv)
        else:
            found = compare_on_gpu(theirs, ours, read, device, dtype)
    if as_json:
        return print_json(found)
    print(f"{found.tokens} tokens, perplexity {found.perplexity:.2f} (reference {found.reference_perplexity:.2f})")
    print(
        f"KL {found.mean_kl:.4f} nats per token, median {found.median_kl:.4f}; same token first: {found.same_first:.1%}"
    )


@app.command("cold-start")
def cold_start(
    model: Annotated[str, typer.Argument(help="A name from `dovetail list`.")] = "smollm2-135m-instruct",
    runs: Annotated[int, typer.Option(help="Starts of each contender, in turns.", min=1)] = 5,
    transformers_folder: Annotated[
        Path | None, typer.Option(help="An HF folder of the same model, for transformers to load in the same run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Seconds from the start of a worker process to its first token (128-token prompt).

    Example: dovetail bench cold-start smollm2-135m-instruct --runs 5
    """
    from dovetail.store import Catalogue
    from dovetail_bench.cold_start import compare, import_torch_s, start_transformers, start_worker

    starts: list[Callable[[], ColdStart]] = [partial(start_worker, Catalogue().get(model))]
    if transformers_folder is not None:
        starts.append(partial(start_transformers, str(transformers_folder)))
    with progress(f"{runs * len(starts)} starts of a process that imports torch, seconds each.") as step:
        summaries = compare(starts, runs, partial(step, "starts"))
        plain_s = import_torch_s()
    if as_json:
        print_json({"import_torch_s": plain_s, "engines": summaries})
    else:
        _print(summaries, plain_s)


@app.command("memory")
def memory(
    models: Annotated[list[str], typer.Argument(help="Names from `dovetail list`.", metavar="MODEL...")],
    prompt: Annotated[int, typer.Option(help="Tokens of the one prompt that is computed first.", min=1)] = 1024,
    batch: Annotated[int, typer.Option(help="Sequences that are decoded together afterwards.", min=1)] = 8,
    store: Annotated[Path | None, typer.Option(help="Folder of models.  [default: $DOVETAIL_HOME]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """What a served model takes beyond an idle worker, and how much of that is neither weights nor KV cache.

    Example: dovetail bench memory smollm2-135m-instruct
    """
    from dovetail.store import Catalogue
    from dovetail_bench.served_memory import measure

    with progress(f"{len(models)} models, a worker for each.") as step:
        found = []
        for at, name in enumerate(models):
            step(name, at, len(models))
            found.append(measure(Catalogue(store).get(name), prompt, batch))
    if as_json:
        return print_json(found)
    for each in found:
        sizes = {"weights": each.weight_bytes, "KV": each.kv_bytes, "grown by": each.growth_bytes}
        parts = ", ".join(f"{what} {human_bytes(size)}" for what, size in sizes.items())
        idle, served = human_bytes(each.idle.total), human_bytes(each.served.total)
        print(f"{each.model} ({each.kept}): {parts} ({each.over:+.1%}); idle worker {idle}, now {served}")


@app.command("chaos")
def chaos(
    model: Annotated[str, typer.Argument(help="A name from `dovetail list`.")] = "smollm2-135m-instruct",
    streams: Annotated[int, typer.Option(help="Clients that read at once.", min=1)] = 50,
    max_tokens: Annotated[int, typer.Option(help="Of each answer.", min=2)] = 64,
    nodes: Annotated[int, typer.Option(help="Workers, which share the cores; the busiest is killed.", min=1)] = 1,
    resume_timeout: Annotated[str, typer.Option(help="How long streams wait for the new worker.")] = "4s",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Kill the worker (-9) when half of the text is there: who gets the rest, the same as undisturbed, and how soon.

    Example: dovetail bench chaos smollm2-135m-instruct --streams 50
    """
    from dovetail.config import parse_duration
    from dovetail_bench.chaos import kill_under_streams

    with progress(f"{streams} answers of {max_tokens} tokens undisturbed, then the same with a kill."):
        result = kill_under_streams(model, streams, max_tokens, parse_duration(resume_timeout), nodes)
    if as_json:
        print_json(result)
        return
    went_on = (
        f"{result.identical} went on to the same text, {result.different} to another, {result.errors} got an error"
    )
    typer.echo(f"{result.streams} streams: {result.ended_before} had ended, {went_on}")
    typer.echo(f"after the kill: p50 {result.back_p50_s:.2f} s, longest {result.back_max_s:.2f} s")
    typer.echo(f"computing their prompts and texts anew takes {result.prefill_s:.2f} s")
    typer.echo(f"the next request {'works' if result.next_request_works else 'FAILS'}")


@app.command("migrate")
def migrate(
    model: Annotated[str, typer.Argument(help="A name from `dovetail list`.")] = "smollm2-135m-instruct",
    streams: Annotated[int, typer.Option(help="Clients that read at once.", min=1)] = 8,
    max_tokens: Annotated[int, typer.Option(help="Of each answer.", min=32)] = 160,
    prompt_words: Annotated[int, typer.Option(help="Of each prompt.", min=1)] = 60,
    nodes: Annotated[int, typer.Option(help="Workers of the server, one thread each.", min=2)] = 2,
    url: Annotated[
        str, typer.Option(help="A server on this machine, instead of one for the bench.", show_default=False)
    ] = "",
    event_log: Annotated[
        Path | None, typer.Option(help="The `event_log` of that server's nodes.", show_default=False)
    ] = None,
    drains: Annotated[int, typer.Option(help="Nodes to empty, one after the other.", min=1)] = 1,
    tpot: Annotated[
        str,
        typer.Option(
            help="What a token may take, such as 2s: nodes take in no more streams than keep to it.  [default: 0.25 s]",
            show_default=False,
        ),
    ] = "",
    store: Annotated[str, typer.Option(help="Folder of the store.  [default: the usual one]", show_default=False)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Drain one of several nodes under streams: who goes on elsewhere with the same text, and how long each pauses.

    With --json each move is told by itself.

    Example: dovetail bench migrate smollm2-135m-instruct --streams 8
    """
    from dovetail_bench.migration import measure, measure_at

    if bool(url) != (event_log is not None):
        raise typer.BadParameter("--url and --event-log go together: the log says when answers moved")
    with progress(f"{streams} answers of {max_tokens} tokens undisturbed, then the same with {drains} drains."):
        if event_log is not None:
            report = measure_at(url, event_log, model, streams, max_tokens, prompt_words, drains)
        else:
            report = measure(model, streams, max_tokens, prompt_words, nodes, store, drains, tpot)
    if as_json:
        print_json(report)
        return
    typer.echo(
        f"{report.moved} of {report.streams} streams moved ({report.moves} moves), "
        f"{report.identical} have the same text as undisturbed"
    )
    typer.echo(f"a token takes {report.token_p50_s * 1000:.1f} ms; the pause of a stream that moves:")
    typer.echo(
        f"p50 {report.pause_p50_s * 1000:.1f} ms ({report.pause_p50_tokens:.2f} token times), "
        f"p99 {report.pause_p99_s * 1000:.1f} ms ({report.pause_p99_tokens:.2f}); in token times of where it moved to "
        f"{report.pause_p50_after:.2f} and {report.pause_p99_after:.2f}"
    )
    typer.echo(
        f"rounds p50 {report.rounds_p50:g}, gap p50 {report.gap_p50:g} tokens; drained in {report.drain_s:.2f} s; "
        f"longest silence of a stream, p99: {report.silence_p99_s:.2f} s, undisturbed {report.plain_silence_p99_s:.2f}"
    )


@app.command("fronts")
def fronts(
    model: Annotated[str, typer.Argument(help="A name from `dovetail list`, or an HF folder.")],
    streams: Annotated[int, typer.Option(help="Clients that read at once.", min=1)] = 64,
    max_tokens: Annotated[int, typer.Option(help="Of each answer.", min=8)] = 200,
    runs: Annotated[int, typer.Option(help="Of each way; the fastest counts.", min=1)] = 3,
    pin: Annotated[bool, typer.Option("--pin", help="A core for each process, as far as there are cores.")] = False,
    store: Annotated[str, typer.Option(help="Folder of the store.  [default: the usual one]", show_default=False)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Compare one gateway with two: tokens per second, and processor time per token in each process.

    Example: dovetail bench fronts smollm2-135m-instruct --streams 64
    """
    from dovetail_bench.fronts import measure

    with progress(f"{runs} runs each way, of {streams} answers of {max_tokens} tokens."):
        ways = measure(model, streams, max_tokens, runs, store, pins=pin)
    if as_json:
        print_json(ways)
        return
    table = _table("through", "tokens/s", "leader", "front", "worker", "readers")
    for way in ways:
        costs = (f"{cost:.0f} us" for cost in (way.leader_us, way.front_us, way.worker_us, way.client_us))
        table.add_row(way.through, f"{way.tokens_per_s:.0f}", *costs)
    _show(table)


def _print(summaries: list[Summary], plain_s: float) -> None:
    table = _table("engine", "import", "load", "first token", "total (spread)")
    for each in summaries:
        parts = [f"{value:.3f} s" for value in (each.import_s, each.load_s, each.first_token_s)]
        table.add_row(each.engine, *parts, f"{each.total_s:.3f} s ({each.total_spread_s:.3f})")
    _show(table)
    typer.echo(f"A plain `import torch` takes {plain_s:.2f} s here.")


@app.command("mapped-start")
def mapped_start(
    shape: Annotated[list[str] | None, typer.Option(help="0.5b (Qwen2.5) or 1b (Llama 3.2); may be repeated.")] = None,
    runs: Annotated[int, typer.Option(help="Starts of each model.", min=1)] = 20,
    folder: Annotated[Path | None, typer.Option(help="Where to write the random models for the time being.")] = None,
    dtype: Annotated[str, typer.Option(help="f32, bf16, f16, or what this machine prefers.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Seconds from host memory to a model that is ready on a CPU, and the bytes that were copied for it.

    Example: dovetail bench mapped-start --shape 0.5b --shape 1b --runs 20
    """
    from dovetail_bench.mapped_start import SHAPES, measure

    shapes = shape or ["0.5b", "1b"]
    for name in shapes:
        if name not in SHAPES:
            raise typer.BadParameter(f"{name} is not one of {', '.join(SHAPES)}", param_hint="--shape")
    results = []
    with progress(f"Writes {' and '.join(shapes)} (gigabytes), then {runs} starts of each.") as step:
        for name in shapes:
            results.append(measure(name, runs, folder, dtype, partial(step, f"writing and measuring {name}")))
    if as_json:
        print_json(results)
        return
    table = _table("model", "weights", "ready (worst)", "copied", "private memory", "first token")
    for each in results:
        ready = f"{1e3 * each.start_s_median:.1f} ms ({1e3 * each.start_s_worst:.1f})"
        growth = f"{each.private_growth_bytes / 1e6:+.1f} MB"
        weights, copied = human_bytes(each.weight_bytes), human_bytes(each.copied_bytes)
        table.add_row(
            f"{each.model} {each.dtype}", weights, ready, copied, growth, f"{each.first_token_s_median:.3f} s"
        )
    _show(table)


def _table(*columns: str) -> Table:
    from rich.table import Table

    return Table(*columns, box=None)


def _show(table: Table) -> None:
    from rich.console import Console

    Console().print(table)
