"""The models that were pulled: one canonical folder each under one root. Finds, adds, removes; serves nothing.

<root>/models/<name>/     see `store.canonical`
<root>/locks/<name>.lock  held while a pull writes that name
"""

from __future__ import annotations

import difflib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dovetail.errors import CheckpointError, InvalidRequest, ModelNotFound, SourceError
from dovetail.machine import preferred_dtype
from dovetail.store.canonical import CARD, is_canonical_folder, read_card, recover, write_canonical
from dovetail.store.checkpoints import open_checkpoint
from dovetail.store.sources import Fetched, Progress, fetch
from dovetail.types import ModelCard

DTYPES = ("f32", "bf16", "f16")
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


def default_root() -> Path:
    home = os.environ.get("DOVETAIL_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "dovetail"


class Catalogue:
    def __init__(self, root: str | Path | None = None) -> None:
        self.root = Path(root).expanduser() if root is not None else default_root()
        self._models = self.root / "models"

    def cards(self) -> list[ModelCard]:
        """Every usable model, by name. One that cannot be read is left out here and explained by `get`."""
        if not self._models.is_dir():
            return []
        found = []
        for folder in sorted(self._models.iterdir()):
            if not folder.name.startswith(".") and not folder.is_symlink() and is_canonical_folder(folder):
                try:
                    found.append(read_card(folder, folder.name))
                except CheckpointError:
                    continue
        return found

    def get(self, name: str) -> ModelCard:
        folder = self._folder(name)
        if not folder.exists():
            recover(folder)
        if not is_canonical_folder(folder):
            raise ModelNotFound(self._not_found(name), param="model", code="model_not_found")
        return read_card(folder, name)

    def find(self, source: str) -> ModelCard | None:
        """A model that was pulled from exactly this source, if there is one."""
        wanted = _canonical_source(source)
        return next((card for card in self.cards() if card.source == wanted), None)

    def remove(self, name: str) -> ModelCard:
        """Returns what was removed. A server that has it mapped keeps its pages until it lets go."""
        card = self.get(name)
        with self._lock(name):
            folder = self._folder(name)
            doomed = folder.with_name(f".removed-{name}-{os.getpid()}")
            folder.rename(doomed)  # gone at once, however long deleting takes
            shutil.rmtree(doomed)
        return card

    def pull(
        self,
        source: str,
        name: str | None = None,
        dtype: str = "auto",
        progress: Progress | None = None,
        force: bool = False,
    ) -> ModelCard:
        """Fetch and convert, unless exactly this is already here (and its files, where local, have not changed)."""
        if dtype not in ("auto", *DTYPES):
            raise SourceError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
        if name is not None:
            self._folder(name)
        kind = preferred_dtype() if dtype == "auto" else dtype
        present = self._present(source, name, kind)
        if present is not None and not force:
            return present
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # Downloads lie beside the models: a temporary folder may be in memory, and too small for them.
            with fetch(source, progress, scratch=self.root) as fetched:
                return self._take_over(fetched, source, name or fetched.name, kind, progress, force)
        except OSError as error:  # a full disk, a folder that is not ours
            raise SourceError(f"{source}: cannot be written to {self.root}: {error.strerror or error}") from error

    def _take_over(
        self, fetched: Fetched, source: str, name: str, dtype: str, progress: Progress | None, force: bool
    ) -> ModelCard:
        before = self._stamp(name)
        with self._lock(name):
            present = self._present(source, name, dtype)
            if present is not None and (not force or self._stamp(name) != before):
                return present  # another pull did the work while this one waited
            return self._convert(fetched, source, name, dtype, progress)

    def _convert(self, fetched: Fetched, source: str, name: str, dtype: str, progress: Progress | None) -> ModelCard:
        folder = self._folder(name)
        recover(folder)
        checkpoint = open_checkpoint(fetched.path)
        try:
            tokens, tokenizer_json = checkpoint.tokenizer()
            needed, free = checkpoint.spec.weight_bytes(dtype), shutil.disk_usage(self._models).free
            if needed > free:
                raise SourceError(f"{name}: needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free in {self.root}")
            write_canonical(
                checkpoint,
                folder,
                tokens=tokens,
                tokenizer_json=tokenizer_json,
                dtype=dtype,
                source=_canonical_source(source),
                progress=None if progress is None else lambda done, total: progress("convert", done, total),
            )
        finally:
            checkpoint.close()
        return read_card(folder, name)

    def _present(self, source: str, name: str | None, dtype: str) -> ModelCard | None:
        wanted = _canonical_source(source)
        for card in self.cards():
            matches = card.source == wanted and card.dtype == dtype and name in (None, card.name)
            if matches and _newest_change(wanted) <= card.created:
                return card
        return None

    def _stamp(self, name: str) -> int:
        """Changes whenever this name is written."""
        card = self._folder(name) / CARD
        return card.stat().st_mtime_ns if card.exists() else 0

    def _folder(self, name: str) -> Path:
        """Where the model lies; a name can lead nowhere but into the folder of models."""
        if not _NAME.match(name) or ".." in name:
            raise InvalidRequest(f"model name {name!r}: use letters, digits and . _ - (not first)", param="model")
        folder = self._models / name
        if folder.is_symlink():
            raise InvalidRequest(f"model name {name!r}: {folder} is a symbolic link", param="model")
        return folder

    def _not_found(self, name: str) -> str:
        known = [card.name for card in self.cards()]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        if near:
            return f"model {name!r} not found; did you mean {' or '.join(near)}?"
        return f"model {name!r} not found; " + (f"there are {', '.join(known)}" if known else "nothing is pulled yet")

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """Waits for whoever writes this name. The operating system lets go of the lock of a process that dies."""
        locks = self.root / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        self._models.mkdir(parents=True, exist_ok=True)
        with (locks / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


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
