"""`store ls`, `verify`, `gc`, `pin`, `upload`: what lies on disk, whether it is sound, what may go, where it goes."""

from __future__ import annotations

import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.completion import local_models
from dovetail.cli.models import AsJson, Store, cached_fraction, form, progress_bar, tier
from dovetail.cli.output import human_age, human_bytes, print_json, print_table

if TYPE_CHECKING:
    from dovetail.store.catalogue import Catalogue, CatalogueEntry
    from dovetail.store.collect import Collected
    from dovetail.store.verify import Verified

app = typer.Typer(help="What lies on disk, whether it is sound, and what may go.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """What lies on disk, whether it is sound, and what may go."""


@app.command("ls")
def list_store(store: Store = None, as_json: AsJson = False) -> None:
    """List models and adapters with what they take on disk, alone and together.

    Example: dovetail store ls
    """
    from dovetail.store.collect import staging_bytes, unnamed_blobs

    catalogue = _catalogue(store)
    rows = describe_entries(catalogue)
    totals: dict[str, Any] = {
        "root": str(catalogue.root),
        "blob_bytes": sum(path.stat().st_size for path in catalogue.paths.blobs.glob("*/*")),
        "unused_blob_bytes": sum(path.stat().st_size for path in unnamed_blobs(catalogue.paths)),
        "staging_bytes": staging_bytes(catalogue.paths),
    }
    if as_json:
        print_json({"entries": rows, **totals})
        return
    _print_rows(rows)
    sizes = {key: human_bytes(int(totals[key])) for key in ("blob_bytes", "unused_blob_bytes", "staging_bytes")}
    typer.echo(
        f"{catalogue.root}: {sizes['blob_bytes']} in blobs, {sizes['unused_blob_bytes']} of them unused, "
        f"{sizes['staging_bytes']} under way or left behind"
    )


@app.command("verify")
def verify_store(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Names from `dovetail list`.  [default: all]", autocompletion=local_models),
    ] = None,
    threads: Annotated[int, typer.Option(help="Chunks that are read at once.", min=1, max=64)] = 4,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Read models again and compare every chunk with its checksum; exit code 1 where something is damaged.

    Example: dovetail store verify smollm2-135m-instruct
    """
    from dovetail.store.verify import mark, verify

    catalogue = _catalogue(store)
    folders = [catalogue.existing(name) for name in models] if models else catalogue.paths.folders()
    with progress_bar(enabled=not as_json and sys.stderr.isatty()) as progress:
        report = None if progress is None else lambda done, total: progress("verify", done, total)
        found = verify(folders, report, threads)
    mark(folders, found)
    if as_json:
        print_json(found)
    else:
        _print_verified(found, {entry.name: entry.source for entry in catalogue.entries()} if found.damage else {})
    if found.damage:
        raise typer.Exit(1)


@app.command("gc")
def collect_garbage(
    max_size: Annotated[
        str | None, typer.Option(help="Also remove models, least recently used first, until the rest fits.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A dovetail.yaml whose store section holds.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Free disk space: remove unused blobs, what interrupted pulls left, and models beyond a limit.

    Pinned models, and those that a process has open, are never removed.

    Example: dovetail store gc --max-size 50GB --dry-run
    """
    from dovetail.store.collect import collect

    root, limit = _limits(config, max_size)
    done = collect(_catalogue(store or root).paths, limit, dry_run)
    if as_json:
        print_json(done)
    else:
        _print_collected(done, dry_run)


@app.command("pin")
def pin(
    model: Annotated[str, typer.Argument(help="A name from `dovetail list`.", autocompletion=local_models)],
    off: Annotated[bool, typer.Option("--off", help="Let it go again.")] = False,
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Keep a model whatever limit the store has.

    Example: dovetail store pin smollm2-135m-instruct
    """
    from dovetail.store.collect import set_pinned

    catalogue = _catalogue(store)
    set_pinned(catalogue.paths, catalogue.existing(model), not off)
    if as_json:
        print_json({"name": model, "pinned": not off})
    else:
        typer.echo(f"{model} is {'no longer ' if off else ''}pinned")


@app.command("upload")
def upload(
    model: Annotated[str, typer.Argument(help="A name from `dovetail list`.", autocompletion=local_models)],
    url: Annotated[str, typer.Argument(metavar="URL", help="Where a store is kept, as s3://bucket/prefix.")],
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Copy a model to an object store, from which servers can serve it while they download it.

    Credentials and endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...).

    Example: dovetail store upload smollm2-135m-instruct s3://models/v1
    """
    from dovetail.errors import SourceError
    from dovetail.store.sources.bucket_model import upload_model
    from dovetail.store.sources.object_store import is_object_address

    if not is_object_address(url):
        raise SourceError(f"{url}: expected an address as s3://bucket/prefix")
    with progress_bar(enabled=not as_json and sys.stderr.isatty()) as progress:
        sent = upload_model(_catalogue(store).existing(model), url, progress or (lambda stage, done, total: None))
    address = f"{url.rstrip('/')}/models/{model}"
    if as_json:
        print_json({"url": address, "sent_bytes": sent})
    else:
        typer.echo(f"{address}: {human_bytes(sent)} sent; dovetail serve {address}")


def describe_entries(catalogue: Catalogue) -> list[dict[str, Any]]:
    """One row per folder of the store."""
    from dovetail.store.publish import references

    named = references(catalogue.paths) or Counter()
    return [_row(catalogue, entry, named) for entry in catalogue.entries()]


def _row(catalogue: Catalogue, entry: CatalogueEntry, named: dict[str, int]) -> dict[str, Any]:
    from dovetail.store.collect import use_of

    use = use_of(catalogue.paths, catalogue.paths.folder(entry.name))
    partitions = () if entry.manifest is None else entry.manifest.partitions
    size = entry.manifest.size_bytes if entry.manifest is not None else entry.card.size_bytes if entry.card else 0
    layout = "first form" if entry.manifest is None else entry.manifest.layout
    return {
        "name": entry.name,
        "kind": entry.kind,
        "dtype": entry.manifest.dtype if entry.manifest is not None else entry.card.dtype if entry.card else "",
        "layout": "damaged" if entry.problem else layout,
        "partitions": len(partitions) or 1,
        "size_bytes": size,
        "shared_bytes": sum(part.size for part in partitions if named.get(part.digest, 0) > 1),
        "cached": cached_fraction(catalogue, entry),
        "last_used": int(use.last_used),
        "pinned": use.pinned,
        "in_use": use.in_use,
        "problem": entry.problem,
    }


def _limits(config: Path | None, max_size: str | None) -> tuple[Path | None, int | None]:
    from dovetail.config import Config, load_config, parse_size
    from dovetail.errors import ConfigError

    settings = load_config(config) if config is not None else Config()
    try:
        limit = settings.store.max_size if max_size is None else parse_size(max_size)
    except ValueError as error:
        raise ConfigError(f"--max-size: {error}") from error
    return settings.store.path, limit


def _print_rows(rows: list[dict[str, Any]]) -> None:
    now = time.time()
    shown = [
        (
            row["name"],
            row["kind"],
            form(row["dtype"], row["layout"]),
            str(row["partitions"]),
            human_bytes(row["size_bytes"]),
            human_bytes(row["shared_bytes"]),
            tier(row["cached"]),
            human_age(now - row["last_used"]),
            row["problem"] or ", ".join(word for word in ("in_use", "pinned") if row[word]).replace("_", " ") or "ok",
        )
        for row in rows
    ]
    print_table(("NAME", "KIND", "TYPE", "FILES", "SIZE", "SHARED", "TIER", "USED", "STATE"), shown)


def _print_verified(found: Verified, sources: Mapping[str, str]) -> None:
    for damage in found.damage:
        where = "" if damage.chunk is None else f" [{', '.join(damage.tensors) or 'between tensors'}]"
        typer.echo(f"damaged: {', '.join(damage.models)}: {damage.told}{where}")
    for name in sorted({name for damage in found.damage for name in damage.models}):
        source = sources.get(name) or "SOURCE"  # a manifest that cannot be read names none
        typer.echo(f"{name}: `dovetail pull {shlex.quote(source)} --name {name}` fetches it anew")
    for name in found.unchecked:
        typer.echo(f"{name}: of the first form, which has no checksums; pull it again to convert it")
    sound = "" if found.damage else ", all sound"
    typer.echo(f"{len(found.models)} checked, {human_bytes(found.bytes)} read{sound}")


def _print_collected(done: Collected, dry_run: bool) -> None:
    word = "would remove" if dry_run else "removed"
    for removal in done.removed:
        typer.echo(f"{word} {removal.kind} {removal.name} ({human_bytes(removal.bytes)})")
    for note in done.notes:
        typer.echo(f"note: {note}")
    over = f"; {human_bytes(done.over_limit_bytes)} over the limit is pinned or in use" if done.over_limit_bytes else ""
    typer.echo(f"{human_bytes(done.freed_bytes)} {'would be ' if dry_run else ''}freed{over}")


def _catalogue(root: Path | None) -> Catalogue:
    from dovetail.store import Catalogue

    return Catalogue(root)
