"""What may go: blobs that no model names, what interrupted pulls left, files of the first form, and, where the store
has a limit, the models that were used longest ago.

The limit counts the blobs that models name, each once, and the weights of folders of the first form. Models go in
order of last use (opening one for serving is a use, and so is pulling it) until the rest fits; then those that turn
out not to be needed for that, because they share their blobs with one that stays, are spared. A model that is pinned,
or that some process has mapped, never goes; the limit is then missed, and said to be.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from dovetail.errors import CheckpointError
from dovetail.store.format.manifest import (
    ARRIVING,
    MANIFEST,
    PINNED,
    USED,
    Manifest,
    blob_path,
    is_arriving,
    is_stored,
    read_manifest,
)
from dovetail.store.format.version_one import OLD_FILES, WEIGHTS, is_version_one
from dovetail.store.paths import STORE_LOCK, StorePaths, source_key
from dovetail.store.publish import recover_all, references, withdraw_locked

Kind = Literal["blob", "staging", "old form", "model"]


class Removal(msgspec.Struct, frozen=True):
    kind: Kind
    name: str  # of a model, or a path under the root
    bytes: int


class Collected(msgspec.Struct, frozen=True):
    removed: tuple[Removal, ...]  # or, in a dry run, what would be
    freed_bytes: int
    size_bytes: int  # of the store afterwards, as the limit counts
    over_limit_bytes: int  # what is still too much, because it is pinned or in use
    notes: tuple[str, ...] = ()  # what could not be decided, and why


class Use(NamedTuple):
    last_used: float  # Unix seconds
    pinned: bool
    in_use: bool


def collect(
    paths: StorePaths, max_bytes: int | None = None, dry_run: bool = False, keep: Collection[str] = ()
) -> Collected:
    """`keep` names models that stay besides those that are pinned or in use."""
    if not paths.root.is_dir():
        return Collected((), 0, 0, 0)
    removed = [*_collect_staging(paths, dry_run), *_collect_arriving(paths, dry_run)]
    notes: list[str] = []
    with paths.lock(STORE_LOCK):
        if not dry_run:
            recover_all(paths)
        removed += _collect_passing(paths, dry_run)
        removed += _collect_old_files(paths, dry_run)
        removed += _collect_blobs(paths, dry_run, notes)
        before = _sizes(paths, paths.folders())
        victims = [] if max_bytes is None else _victims(paths, max_bytes, keep)
        removed += [_evict(paths, folder, dry_run) for folder in victims]
        size = _sizes(paths, [folder for folder in paths.folders() if folder not in victims])
    freed = sum(removal.bytes for removal in removed if removal.kind != "model") + before - size
    over = 0 if max_bytes is None else max(0, size - max_bytes)
    return Collected(tuple(removed), freed, size, over, tuple(notes))


def use_of(paths: StorePaths, folder: Path) -> Use:
    manifest = _manifest(folder)
    stamps = [folder / USED, folder / MANIFEST, folder]
    last = next(path.stat().st_mtime for path in stamps if path.exists())
    blobs = [] if manifest is None else [blob_path(paths.root, part.digest) for part in manifest.partitions]
    return Use(last, (folder / PINNED).exists(), any(_is_mapped(path) for path in blobs))


def set_pinned(paths: StorePaths, folder: Path, pinned: bool) -> None:
    with paths.lock(STORE_LOCK):
        if pinned:
            (folder / PINNED).touch()
        else:
            (folder / PINNED).unlink(missing_ok=True)


def staging_bytes(paths: StorePaths) -> int:
    return sum(_tree_bytes(path) for path in paths.staging.iterdir()) if paths.staging.is_dir() else 0


def unnamed_blobs(paths: StorePaths) -> Iterator[Path]:
    """Blobs that no manifest names, and whatever else lies among the blobs; nothing where that cannot be known."""
    named = references(paths)
    if named is None or not paths.blobs.is_dir():
        return
    wanted = {blob_path(paths.root, digest) for digest in named}
    for folder in sorted(paths.blobs.iterdir()):
        if folder.is_dir() and not folder.is_symlink():
            yield from (path for path in sorted(folder.iterdir()) if path not in wanted)


def _collect_staging(paths: StorePaths, dry_run: bool) -> Iterator[Removal]:
    """Of pulls that are no longer alive: their source's lock can be had."""
    for path in sorted(paths.staging.iterdir()) if paths.staging.is_dir() else []:
        kind, _, key = path.name.partition("-")
        if kind not in ("fetch", "convert"):
            continue
        with paths.try_lock(f"source-{key}") as is_ours:
            if is_ours:
                yield _remove(paths, path, "staging", dry_run)


def _collect_arriving(paths: StorePaths, dry_run: bool) -> Iterator[Removal]:
    """Models whose download from a bucket ended before they were on disk."""
    for folder in paths.folders():
        if not is_arriving(folder):
            continue
        with suppress(CheckpointError):
            source = read_manifest(folder, ARRIVING).source
            with paths.try_lock(f"source-{source_key(source)}") as is_ours:
                if is_ours:
                    yield _remove(paths, folder, "staging", dry_run)


def _collect_passing(paths: StorePaths, dry_run: bool) -> list[Removal]:
    """Folders that were on their way in or out when somebody died; only the holder of the store's lock makes them."""
    passing = [path for path in paths.staging.iterdir() if path.name.partition("-")[0] in ("model", "removed")]
    return [_remove(paths, path, "staging", dry_run) for path in sorted(passing)]


def _collect_old_files(paths: StorePaths, dry_run: bool) -> list[Removal]:
    both = [folder for folder in paths.folders() if is_version_one(folder) and _manifest(folder) is not None]
    old = [folder / name for folder in both for name in OLD_FILES]
    return [_remove(paths, path, "old form", dry_run) for path in old if path.exists()]


def _collect_blobs(paths: StorePaths, dry_run: bool, notes: list[str]) -> list[Removal]:
    if references(paths) is None:
        unreadable = next(folder for folder in paths.folders() if is_stored(folder) and _manifest(folder) is None)
        notes.append(
            f"{unreadable / MANIFEST} cannot be read, so no blob is certain to be unused; "
            f"remove it first: dovetail rm {unreadable.name}"
        )
        return []
    removed = [_remove(paths, path, "blob", dry_run) for path in unnamed_blobs(paths)]
    if not dry_run:
        for folder in paths.blobs.iterdir():
            with suppress(OSError):  # not empty
                folder.rmdir()
    return removed


def _victims(paths: StorePaths, max_bytes: int, keep: Collection[str]) -> list[Path]:
    folders = paths.folders()
    uses = {folder: use_of(paths, folder) for folder in folders}
    oldest_first = sorted(folders, key=lambda folder: (uses[folder].last_used, folder.name))
    victims: list[Path] = []
    for folder in oldest_first:
        if _sizes(paths, _without(folders, victims)) <= max_bytes:
            break
        if not (uses[folder].pinned or uses[folder].in_use or folder.name in keep):
            victims.append(folder)
    for folder in reversed(victims.copy()):
        kept = [victim for victim in victims if victim != folder]
        frees = _sizes(paths, _without(folders, kept)) - _sizes(paths, _without(folders, victims))
        if frees == 0 or _sizes(paths, _without(folders, kept)) <= max_bytes:
            victims = kept
    return victims


def _evict(paths: StorePaths, folder: Path, dry_run: bool) -> Removal:
    freed = _sizes(paths, [folder])
    if not dry_run:
        withdraw_locked(paths, folder)
    return Removal("model", folder.name, freed)


def _sizes(paths: StorePaths, folders: Iterable[Path]) -> int:
    """Blobs that these name, each once, and weights of the first form."""
    blobs: dict[str, int] = {}
    old = 0
    for folder in folders:
        manifest = _manifest(folder)
        if manifest is not None:
            blobs.update({partition.digest: partition.size for partition in manifest.partitions})
        with suppress(FileNotFoundError):
            old += (folder / WEIGHTS).stat().st_size
    return sum(blobs.values()) + old


def _without(folders: list[Path], victims: list[Path]) -> list[Path]:
    return [folder for folder in folders if folder not in victims]


def _manifest(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder) if is_stored(folder) else None
    except CheckpointError:
        return None


def _is_mapped(path: Path) -> bool:
    """Somebody holds the lock that goes with a mapping (see `format.StoredTensors`)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def _remove(paths: StorePaths, path: Path, kind: Kind, dry_run: bool) -> Removal:
    size = _tree_bytes(path)
    if not dry_run:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    return Removal(kind, str(path.relative_to(paths.root)), size)


def _tree_bytes(path: Path) -> int:
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    files = (Path(parent) / name for parent, _, names in os.walk(path) for name in names)
    return sum(file.lstat().st_size for file in files)
