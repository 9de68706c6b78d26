"""The catalogue as a server asks it at every request: what is known is answered from memory, without locks and without
reading a manifest again that has not changed. Another process may pull and remove meanwhile."""

from __future__ import annotations

import difflib
import threading
from pathlib import Path

from dovetail.errors import CheckpointError, ModelNotFound
from dovetail.store.catalogue import Catalogue
from dovetail.store.format.manifest import MANIFEST
from dovetail.types import ModelCard

_MAX_GUESSED_CHARS = 64  # of a name for which similar ones are looked up
_MAX_LISTED = 20

Stamp = tuple[int, int]  # of a folder and its manifest, as the file system counts time


class WatchedCatalogue:
    def __init__(self, catalogue: Catalogue) -> None:
        """Finishes first what a pull that crashed has left, which is not looked for again."""
        catalogue.recover()
        self._catalogue = catalogue
        self._lock = threading.Lock()  # the loop asks, threads list
        self._cards: dict[str, tuple[Stamp, ModelCard]] = {}
        self._names: tuple[int, tuple[str, ...]] = (-1, ())  # of the folder of models, by its time

    def cards(self) -> list[ModelCard]:
        """Every usable model, by name."""
        found = []
        for folder in self._catalogue.paths.folders():
            try:
                found.append(self.get(folder.name))
            except (ModelNotFound, CheckpointError):
                continue  # it is explained by `get`
        return found

    def get(self, name: str) -> ModelCard:
        folder = self._catalogue.paths.folder(name)
        stamp = _stamp(folder)
        if stamp is None:
            raise ModelNotFound(self._not_found(name), param="model", code="model_not_found")
        with self._lock:
            known = self._cards.get(name)
        if known is not None and known[0] == stamp:
            return known[1]
        card = self._catalogue.get(name)
        with self._lock:
            self._cards[name] = (stamp, card)
        return card

    def _not_found(self, name: str) -> str:
        names = self._known_names()
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) if len(name) <= _MAX_GUESSED_CHARS else []
        if near:
            return f"model {name!r} not found; did you mean {' or '.join(near)}?"
        listed = ", ".join(names[:_MAX_LISTED]) + (", …" if len(names) > _MAX_LISTED else "")
        return f"model {name!r} not found; " + (f"there are {listed}" if names else "nothing is pulled yet")

    def _known_names(self) -> tuple[str, ...]:
        models = self._catalogue.paths.models
        try:
            changed = models.stat().st_mtime_ns
        except OSError:
            return ()
        if self._names[0] != changed:
            self._names = (changed, tuple(folder.name for folder in self._catalogue.paths.folders()))
        return self._names[1]


def _stamp(folder: Path) -> Stamp | None:
    """None where there is no such folder. A model is put in place by a rename, which gives its folder another time."""
    try:
        about = folder.stat()
        manifest = folder / MANIFEST
        return about.st_mtime_ns ^ about.st_ino, manifest.stat().st_mtime_ns if manifest.exists() else 0
    except (FileNotFoundError, NotADirectoryError):
        return None
