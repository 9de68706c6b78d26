"""The models and adapters that were pulled: finds, adds, removes. Serves nothing.

Where they lie is `store.place`, what a folder holds `store.format`, how one is made `store.convert`.
"""

from __future__ import annotations

import difflib
import os
import shutil
import time
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from dovetail.errors import CheckpointError, ModelNotFound, SourceError
from dovetail.layouts import LAYOUTS
from dovetail.machine import preferred_dtype
from dovetail.store.arrange import Arrangement, arrange
from dovetail.store.checkpoints import ModelFiles, open_checkpoint, read_any_card
from dovetail.store.convert import JOURNAL_BYTES, Conversion
from dovetail.store.format import (
    FORMAT,
    MANIFEST,
    TEMPLATE,
    TOKENIZER,
    VERSION,
    Manifest,
    Partition,
    is_stored,
    read_manifest,
)
from dovetail.store.place import STORE_LOCK, Place, source_key
from dovetail.store.publish import digests_of, publish, recover, withdraw
from dovetail.store.sources import Fetched, Progress, fetch, files_identity
from dovetail.store.version_one import is_version_one
from dovetail.types import ModelCard

DTYPES = ("f32", "bf16", "f16")


def default_root() -> Path:
    home = os.environ.get("DOVETAIL_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "dovetail"


class Form(NamedTuple):
    """What a pull makes of the weights."""

    dtype: str
    layout: str = "plain"
    ranks: int = 1


class Entry(NamedTuple):
    """A folder of the store, whatever its state."""

    name: str
    kind: Literal["model", "adapter"]
    card: ModelCard | None = None  # of a usable model
    manifest: Manifest | None = None  # None where it is of the first form or cannot be read
    problem: str = ""  # why it cannot be used


class Catalogue:
    def __init__(self, root: str | Path | None = None) -> None:
        self.root = Path(root).expanduser() if root is not None else default_root()
        self.place = Place(self.root)

    def cards(self) -> list[ModelCard]:
        """Every usable model, by name. One that cannot be read is left out here and explained by `get`."""
        return [entry.card for entry in self.entries() if entry.card is not None]

    def entries(self) -> list[Entry]:
        return [_examine(folder) for folder in self.place.folders()]

    def get(self, name: str) -> ModelCard:
        return read_any_card(self._existing(name), name)

    def find(self, source: str) -> ModelCard | None:
        """A model that was pulled from exactly this source, if there is one."""
        wanted = _canonical_source(source)
        return next((card for card in self.cards() if card.source == wanted), None)

    def remove(self, name: str) -> int:
        """Returns the bytes that became free: blobs that another model names too stay."""
        self._existing(name)
        return withdraw(self.place, name)

    def pull(
        self,
        source: str,
        name: str | None = None,
        dtype: str = "auto",
        progress: Progress | None = None,
        force: bool = False,
        layout: str = "plain",
        ranks: int = 1,
        journal_bytes: int = JOURNAL_BYTES,
    ) -> ModelCard:
        """Fetch and convert, unless exactly this is already here (and its files, where local, have not changed)."""
        if dtype not in ("auto", *DTYPES):
            raise SourceError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
        if layout not in LAYOUTS:
            raise SourceError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")
        if name is not None:
            self.place.folder(name)
        form = Form(preferred_dtype() if dtype == "auto" else dtype, layout, ranks)
        before = self._present(source, name, form)
        if before is not None and not force and is_stored(Path(before.path)):
            return before
        pull = _Pull(self.place, _canonical_source(source), name, form, progress, force, journal_bytes)
        stamp = _stamp(before)
        try:
            with self.place.lock(f"source-{pull.key}"):
                present = self._present(source, name, form)
                if present is not None and is_stored(Path(present.path)) and (not force or _stamp(present) != stamp):
                    return present  # another pull did the work while this one waited
                return pull.upgrade(present) if present is not None and not force else pull.run(source)
        except OSError as error:  # a full disk, a folder that is not ours
            raise SourceError(f"{source}: cannot be written to {self.root}: {error.strerror or error}") from error

    def _present(self, source: str, name: str | None, form: Form) -> ModelCard | None:
        wanted = _canonical_source(source)
        for card in self.cards():
            is_same = card.source == wanted and Form(card.dtype, card.layout, card.partitions) == form
            if is_same and name in (None, card.name) and _newest_change(wanted) <= card.created:
                return card
        return None

    def _existing(self, name: str) -> Path:
        folder = self.place.folder(name)
        if not folder.exists() and self.place.models.is_dir():
            with self.place.lock(STORE_LOCK):
                recover(self.place, folder)
        if not (is_stored(folder) or is_version_one(folder)):
            raise ModelNotFound(self._not_found(name), param="model", code="model_not_found")
        return folder

    def _not_found(self, name: str) -> str:
        known = [card.name for card in self.cards()]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        if near:
            return f"model {name!r} not found; did you mean {' or '.join(near)}?"
        return f"model {name!r} not found; " + (f"there are {', '.join(known)}" if known else "nothing is pulled yet")


class _Pull(NamedTuple):
    """One source on its way into the store; its lock is held."""

    place: Place
    source: str
    name: str | None
    form: Form
    progress: Progress | None
    force: bool
    journal_bytes: int

    @property
    def key(self) -> str:
        return source_key(self.source)

    def run(self, given: str) -> ModelCard:
        download = self.place.staging / f"fetch-{self.key}"
        if self.force:
            shutil.rmtree(download, ignore_errors=True)
        try:
            with fetch(given, self.progress, download) as fetched:
                card = self._convert(fetched, beside=False)
        except CheckpointError:  # the files are whole and of no use: an interrupted download is kept, these are not
            shutil.rmtree(download, ignore_errors=True)
            raise
        shutil.rmtree(download, ignore_errors=True)
        return card

    def upgrade(self, present: ModelCard) -> ModelCard:
        """A folder of the first form gets its manifest from its own files."""
        return self._convert(Fetched(Path(present.path), present.name), beside=True)

    def _convert(self, fetched: Fetched, beside: bool) -> ModelCard:
        name = self.name or fetched.name
        folder = self.place.folder(name)
        checkpoint = open_checkpoint(fetched.path)
        try:
            arrangement = arrange(checkpoint.spec, *self.form)
            staging = self.place.staging / f"convert-{self.key}"
            written = self._write(checkpoint, arrangement, staging, files_identity(fetched.path))
            files = _texts(checkpoint)
            manifest = self._manifest(checkpoint, arrangement, [part for _, part in written], files)
        finally:
            checkpoint.close()
        publish(self.place, name, manifest, files, written, renew_blobs=self.force, beside=beside)
        shutil.rmtree(staging, ignore_errors=True)
        return read_any_card(folder, name)

    def _write(
        self, checkpoint: ModelFiles, arrangement: Arrangement, staging: Path, identity: str
    ) -> list[tuple[Path, Partition]]:
        checkpoint.tokenizer()  # what is wrong with it should be known before an hour of work
        staging.mkdir(exist_ok=True)
        identity = f"{FORMAT} {VERSION} {self.form} {identity}"
        conversion = Conversion(staging, identity, self.journal_bytes)
        if self.force:
            shutil.rmtree(staging)
            staging.mkdir()
        needed = sum(arrangement.sizes) - conversion.resumable_bytes()
        free = shutil.disk_usage(staging).free
        if needed > free:
            raise SourceError(
                f"{self.source}: needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free in {self.place.root}"
            )
        progress = self.progress
        report = None if progress is None else lambda done, total: progress("convert", done, total)
        partitions = conversion.run(checkpoint, arrangement, report)
        return [(conversion.path(rank), partition) for rank, partition in enumerate(partitions)]

    def _manifest(
        self, checkpoint: ModelFiles, arrangement: Arrangement, partitions: list[Partition], files: dict[str, bytes]
    ) -> Manifest:
        tokens, _ = checkpoint.tokenizer()
        return Manifest(
            format=FORMAT,
            version=VERSION,
            checksum="",
            kind="model",
            source=self.source,
            created=int(time.time()),
            dtype=self.form.dtype,
            layout=self.form.layout,
            partitions=tuple(partitions),
            tensors=tuple(share for tensor in arrangement.tensors for share in tensor.shares),
            files=digests_of(files),
            spec=checkpoint.spec,
            tokens=msgspec.structs.replace(tokens, chat_template=None),
        )


def _texts(checkpoint: ModelFiles) -> dict[str, bytes]:
    tokens, tokenizer = checkpoint.tokenizer()
    files = {TOKENIZER: tokenizer.encode()}
    return files if tokens.chat_template is None else files | {TEMPLATE: tokens.chat_template.encode()}


def _examine(folder: Path) -> Entry:
    try:
        manifest = read_manifest(folder) if is_stored(folder) else None
        if manifest is not None and manifest.kind == "adapter":
            return Entry(folder.name, "adapter", None, manifest)
        return Entry(folder.name, "model", read_any_card(folder, folder.name), manifest)
    except CheckpointError as error:
        return Entry(folder.name, "model", problem=str(error))


def _stamp(card: ModelCard | None) -> int:
    """Changes whenever this model is written."""
    manifest = None if card is None else Path(card.path) / MANIFEST
    return manifest.stat().st_mtime_ns if manifest is not None and manifest.exists() else 0


def _canonical_source(source: str) -> str:
    """Paths are kept absolute, so that the same folder is known again from elsewhere."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def _newest_change(source: str) -> int:
    """The second in which a local source was last written, as cards count time; 0 for what comes from elsewhere."""
    path = Path(source)
    if not path.exists():
        return 0
    files = [*path.iterdir(), path] if path.is_dir() else [path]
    return int(max(file.stat().st_mtime for file in files))
