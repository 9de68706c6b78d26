"""The folders of a store and its locks. Knows nothing of what is kept there.

<root>/blobs/     partitions by digest           <root>/tmp/    conversions and downloads that are under way
<root>/models/    a folder per model or adapter  <root>/locks/  one file per lock

A lock is the operating system's (flock), so that it goes with the process that held it. `source-<key>` is held by a
pull from before its download until its end: whoever wants the same source waits, and finds it there. `store` is held
for the moments in which blobs and manifests appear or go, by pulls, removals and `gc` alike. Who needs both takes the
source's first.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dovetail.errors import InvalidRequest

STORE_LOCK = "store"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")


class StorePaths:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.models = root / "models"
        self.blobs = root / "blobs"
        self.staging = root / "tmp"
        self._locks = root / "locks"

    def create(self) -> None:
        for folder in (self.models, self.blobs, self.staging, self._locks):
            folder.mkdir(parents=True, exist_ok=True)

    def folder(self, name: str) -> Path:
        """Where a model lies; a name can lead nowhere but into the folder of models."""
        if not _NAME.match(name) or ".." in name:
            raise InvalidRequest(f"model name {name!r}: use letters, digits and . _ - (not first)", param="model")
        folder = self.models / name
        if folder.is_symlink():
            raise InvalidRequest(f"model name {name!r}: {folder} is a symbolic link", param="model")
        return folder

    def folders(self) -> list[Path]:
        """Of all models, by name; links and folders that are on their way in or out do not count."""
        if not self.models.is_dir():
            return []
        found = (folder for folder in self.models.iterdir() if _NAME.match(folder.name))
        return sorted(folder for folder in found if folder.is_dir() and not folder.is_symlink())

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Waits for whoever holds it."""
        self.create()
        with (self._locks / f"{name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextmanager
    def try_lock(self, name: str) -> Iterator[bool]:
        """Whether it could be had at once."""
        self.create()
        with (self._locks / f"{name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True


def source_key(source: str) -> str:
    """Names the lock, the download and the conversion of a source."""
    return hashlib.sha256(source.encode()).hexdigest()[:20]
