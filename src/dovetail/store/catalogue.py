"""The models and adapters that were pulled: finds, adds, removes. Serves nothing.

Where they lie is `store.paths`, what a folder holds `store.format.manifest`, how one is made `store.pull`.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from dovetail.errors import CheckpointError, ModelNotFound, SourceError, UnsupportedModel
from dovetail.layouts import LAYOUTS, OUTDATED
from dovetail.machine import default_root
from dovetail.store.checkpoints import read_any_card
from dovetail.store.convert import JOURNAL_BYTES
from dovetail.store.format.manifest import DAMAGED, MANIFEST, Manifest, is_stored, read_arriving_card, read_manifest
from dovetail.store.format.version_one import is_version_one
from dovetail.store.hf.adapters import StoredAdapter
from dovetail.store.paths import STORE_LOCK, StorePaths
from dovetail.store.publish import is_interrupted, recover, recover_all, withdraw
from dovetail.store.pull import AUTO, Form, Pull
from dovetail.store.sources.bucket_model import EarlyServing, has_form_of_store
from dovetail.store.sources.fetch import EXAMPLE_SOURCE, Fetched, Progress, full_source, is_remote
from dovetail.types import ModelCard

DTYPES = ("f32", "bf16", "f16")


class CatalogueEntry(NamedTuple):
    """A folder of the store, whatever its state."""

    name: str
    kind: Literal["model", "adapter"]
    card: ModelCard | None = None  # of a usable model
    manifest: Manifest | None = None  # None where it is of the first form or cannot be read; damaged ones may have it
    problem: str = ""  # why it cannot be used

    @property
    def source(self) -> str:
        return self.card.source if self.card is not None else self.manifest.source if self.manifest is not None else ""

    @property
    def created(self) -> int:
        return self.card.created if self.card is not None else self.manifest.created if self.manifest is not None else 0


class Catalogue:
    def __init__(self, root: str | Path | None = None) -> None:
        self.root = Path(root).expanduser() if root is not None else default_root()
        self.paths = StorePaths(self.root)

    def cards(self) -> list[ModelCard]:
        """Every usable model, by name. One that cannot be read is left out here and explained by `get`."""
        return [entry.card for entry in self.entries() if entry.card is not None]

    def entries(self) -> list[CatalogueEntry]:
        """Everything, adapters and what is damaged included."""
        return [_examine(folder) for folder in self.paths.folders()]

    def get(self, name: str) -> ModelCard:
        folder = self.existing(name)
        if problem := _marked(folder):
            raise CheckpointError(problem)
        return read_any_card(folder, name)

    def entry(self, name: str) -> CatalogueEntry:
        found = _examine(self.existing(name))
        if found.problem:
            raise CheckpointError(found.problem)
        return found

    def find(self, source: str) -> ModelCard | None:
        """A model that was pulled from exactly this source, if there is one."""
        wanted = _canonical_source(source)
        return next((card for card in self.cards() if card.source == wanted), None)

    def present(self, source: str, name: str | None = None, layout: str = AUTO) -> ModelCard | None:
        """What `pull` would return without fetching or converting anything; None if it has to."""
        source = _canonical_source(full_source(source))
        entry = self._present(Pull(self.paths, source, name, Form(layout=layout), keep_dtype=True))
        return entry.card if entry is not None and entry.manifest is not None else None

    def open_adapter(self, name: str, buffers: Sequence[memoryview] | None = None) -> StoredAdapter:
        return StoredAdapter(self.existing(name), buffers)

    def remove(self, name: str) -> int:
        """Returns the bytes that became free: blobs that another model names too stay."""
        self.existing(name)
        return withdraw(self.paths, name)

    def pull(
        self,
        source: str,
        name: str | None = None,
        dtype: str = "auto",
        progress: Progress | None = None,
        force: bool = False,
        layout: str = AUTO,
        ranks: int = 1,
        journal_bytes: int = JOURNAL_BYTES,
        early: EarlyServing | None = None,
    ) -> ModelCard:
        """`take` for what must be a model."""
        entry = self.take(source, name, dtype, progress, force, layout, ranks, journal_bytes, early)
        if entry.card is None:
            raise UnsupportedModel(f"{source}: an adapter, not a model that can be served by itself")
        return entry.card

    def take(
        self,
        source: str,
        name: str | None = None,
        dtype: str = "auto",
        progress: Progress | None = None,
        force: bool = False,
        layout: str = AUTO,
        ranks: int = 1,
        journal_bytes: int = JOURNAL_BYTES,
        early: EarlyServing | None = None,
    ) -> CatalogueEntry:
        """Fetch and convert, unless exactly this is already here (and its files, where local, have not changed).

        `dtype` "auto" is `machine.kept_dtype`; an adapter keeps its own. `layout` "auto" is "gguf" for what comes
        quantised (every matrix in the blocks that it comes in), else plain. `ranks` is the number of devices
        that the weights are cut for. `early`: how a model that comes from a bucket in the store's own form is served
        meanwhile.
        """
        if dtype not in ("auto", *DTYPES):
            raise SourceError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
        if layout not in (AUTO, *LAYOUTS):
            raise SourceError(f"layout {layout!r} is not one of {AUTO}, {', '.join(LAYOUTS)}")
        if name is not None:
            self.paths.folder(name)
        form = Form(dtype, layout, ranks)
        source = full_source(source)
        wanted = _canonical_source(source)
        pull = Pull(self.paths, wanted, name, form, progress, force, dtype == "auto", journal_bytes, early)
        before = self._present(pull)
        if before is not None and before.manifest is not None and not force:
            return before
        if self._is_marked(pull):
            pull = pull._replace(force=True)  # what is there is not to be kept
        try:
            with self.paths.lock(f"source-{pull.key}"):
                present = self._present(pull)
                if _is_newer(present, before, pull.force):
                    assert present is not None
                    return present  # another pull did the work while this one waited
                return self.entry(self._run(pull, source, present))
        except OSError as error:  # a full disk, a folder that is not ours
            raise SourceError(f"{source}: cannot be written to {self.root}: {error.strerror or error}") from error

    def arriving(self, name: str) -> ModelCard:
        """A model that can be served while it downloads."""
        return read_arriving_card(self.paths.folder(name), name)

    def _run(self, pull: Pull, source: str, present: CatalogueEntry | None) -> str:
        if present is not None and present.manifest is None and not pull.force:
            return pull.take_over(Fetched(self.paths.folder(present.name), present.name), beside=True)
        return pull.run(source)

    def _present(self, pull: Pull) -> CatalogueEntry | None:
        folders = self.paths.folders() if pull.name is None else [self.paths.folder(pull.name)]
        for entry in (_examine(folder) for folder in folders if folder.is_dir()):
            is_same = entry.source == pull.source and not entry.problem
            if is_same and _has_form(entry, pull) and _newest_change(pull.source) <= entry.created:
                return entry
        return None

    def _is_marked(self, pull: Pull) -> bool:
        folders = self.paths.folders() if pull.name is None else [self.paths.folder(pull.name)]
        return any(_marked(folder) and _examine(folder).source == pull.source for folder in folders)

    def recover(self) -> None:
        """Bring back what pulls that crashed have left, where the store can be written to."""
        if any(self.paths.models.glob(".replaced-*")):
            with suppress(OSError), self.paths.lock(STORE_LOCK):
                recover_all(self.paths)

    def existing(self, name: str) -> Path:
        """The folder of a model or an adapter."""
        folder = self.paths.folder(name)
        if not folder.exists() and is_interrupted(self.paths, folder):
            with self.paths.lock(STORE_LOCK):
                recover(self.paths, folder)
        if not (is_stored(folder) or is_version_one(folder)):
            raise ModelNotFound(self._not_found(name), param="model", code="model_not_found")
        return folder

    def _not_found(self, name: str) -> str:
        known = [entry.name for entry in self.entries()]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        if near:
            return f"model {name!r} not found; did you mean {' or '.join(near)}?"
        if not known:
            return f"model {name!r} not found; nothing is pulled yet: try `dovetail pull {EXAMPLE_SOURCE}`"
        return f"model {name!r} not found; there are {', '.join(known)}; `dovetail pull SOURCE` fetches another"


def _has_form(entry: CatalogueEntry, pull: Pull) -> bool:
    if entry.manifest is not None and any(tensor.layout in OUTDATED for tensor in entry.manifest.tensors):
        return False  # quantised by an earlier release, in an order that must be copied, or with one scale per row
    if pull.form == Form() and has_form_of_store(pull.source):
        return True  # it was taken as it is
    if entry.card is not None:
        is_encoder = entry.card.spec.encoder is not None
        return pull.form.allows(Form(entry.card.dtype, entry.card.layout, entry.card.partitions), is_encoder)
    assert entry.manifest is not None
    return pull.form.is_whole_and_plain and (pull.keep_dtype or entry.manifest.dtype == pull.form.dtype)


def _is_newer(present: CatalogueEntry | None, before: CatalogueEntry | None, force: bool) -> bool:
    """There now, in the present form, and (where a new one is wanted in any case) written meanwhile."""
    if present is None or present.manifest is None:
        return False
    return not force or before is None or before.manifest != present.manifest


def _examine(folder: Path) -> CatalogueEntry:
    kind: Literal["model", "adapter"] = "model"
    try:
        manifest = read_manifest(folder) if is_stored(folder) else None
        kind = "model" if manifest is None else manifest.kind
        if problem := _marked(folder):
            return CatalogueEntry(folder.name, kind, None, manifest, problem)
        card = read_any_card(folder, folder.name) if kind == "model" else None
        if kind == "adapter":
            StoredAdapter(folder).close()
        return CatalogueEntry(folder.name, kind, card, manifest)
    except CheckpointError as error:
        is_known = is_stored(folder) or is_version_one(folder)
        return CatalogueEntry(folder.name, kind, problem=str(error) if is_known else f"{folder / MANIFEST}: missing")


def _marked(folder: Path) -> str:
    """What `store verify` found wrong with it; empty where nothing is known."""
    try:
        found = (folder / DAMAGED).read_text()
    except OSError:
        return ""
    return f"{folder.name} is damaged: {found}; pull its source again, or `dovetail rm {folder.name}`"


def _canonical_source(source: str) -> str:
    """Paths are kept absolute, so that the same folder is known again from elsewhere."""
    path = Path(source).expanduser()
    return source if is_remote(source) or not path.exists() else str(path.resolve())


def _newest_change(source: str) -> int:
    """The second in which a local source was last written, as cards count time; 0 for what comes from elsewhere."""
    path = Path(source)
    if not path.exists():
        return 0
    files = [*path.iterdir(), path] if path.is_dir() else [path]
    return int(max(file.stat().st_mtime for file in files))
