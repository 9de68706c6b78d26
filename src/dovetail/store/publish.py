"""Makes a finished conversion part of the store, and takes models out of it: the moments in which the store changes.

Blobs come first and the manifest last, each by a rename of something that is already on disk. A crash before the last
rename leaves blobs that nobody names, which `gc` removes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from dovetail.errors import CheckpointError
from dovetail.store.files import sync_folder, write_file
from dovetail.store.format.manifest import (
    MANIFEST,
    PINNED,
    Manifest,
    Partition,
    blob_path,
    encode_manifest,
    is_stored,
    read_manifest,
)
from dovetail.store.paths import STORE_LOCK, StorePaths


def digests_of(files: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def publish(
    paths: StorePaths,
    name: str,
    manifest: Manifest,
    files: dict[str, bytes],
    partitions: Sequence[tuple[Path, Partition]],
    *,
    renew_blobs: bool = False,
    beside: bool = False,
    encoded: bytes | None = None,
) -> None:
    """`renew_blobs` puts the new file in the place of an equal one, which may have been damaged since. `beside` adds
    the manifest to a folder that has the other files already. `encoded`: the manifest as somebody else has written
    it, which is known by the checksum of exactly these bytes."""
    folder = paths.folder(name)
    with paths.lock(STORE_LOCK):
        recover(paths, folder)
        pinned = (folder / PINNED).exists()
        for path, partition in partitions:
            _place_blob(paths, path, partition, renew_blobs)
        if beside:
            write_file(folder / MANIFEST, encoded or encode_manifest(manifest))
            return
        building = paths.staging / f"model-{name}"
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        for file, content in files.items():
            write_file(building / file, content)
        if pinned:
            (building / PINNED).touch()
        write_file(building / MANIFEST, encoded or encode_manifest(manifest))
        _put_in_place(paths, building, folder)


def withdraw(paths: StorePaths, name: str) -> int:
    """Removes a model and the blobs that only it has; returns the bytes that became free. Whoever has it mapped keeps
    its pages until they let go."""
    folder = paths.folder(name)
    with paths.lock(STORE_LOCK):
        return withdraw_locked(paths, folder)


def withdraw_locked(paths: StorePaths, folder: Path) -> int:
    """The caller holds the store's lock."""
    try:
        blobs = {partition.digest for partition in read_manifest(folder).partitions} if is_stored(folder) else set()
    except CheckpointError:
        blobs = set()  # a manifest that cannot be read names nothing; gc finds what is left
    doomed = paths.staging / f"removed-{folder.name}"
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)  # gone at once, however long deleting takes
    freed = _bytes_in(doomed)
    shutil.rmtree(doomed)
    return freed + drop_blobs(paths, blobs)


def drop_blobs(paths: StorePaths, digests: Collection[str]) -> int:
    """Those that no manifest names. The caller holds the store's lock."""
    named = references(paths)
    freed = 0
    for digest in digests:
        if named is not None and named[digest] == 0:
            path = blob_path(paths.root, digest)
            with suppress(FileNotFoundError):
                freed += path.stat().st_size
                path.unlink()
            with suppress(OSError):  # others lie there too
                path.parent.rmdir()
    return freed


def references(paths: StorePaths) -> Counter[str] | None:
    """How many manifests name each blob; None where one cannot be read, and so might name any."""
    found: Counter[str] = Counter()
    for folder in paths.folders():
        if is_stored(folder):
            try:
                found.update({partition.digest for partition in read_manifest(folder).partitions})
            except CheckpointError:
                return None
    return found


def recover_all(paths: StorePaths) -> None:
    for replaced in paths.models.glob(".replaced-*"):
        recover(paths, paths.models / replaced.name.removeprefix(".replaced-"))


def is_interrupted(paths: StorePaths, folder: Path) -> bool:
    """A crash between two renames has left the old folder beside its place."""
    return _replaced(paths, folder).exists()


def recover(paths: StorePaths, folder: Path) -> None:
    """Finish what a crash between the two renames of `_put_in_place` left: bring the old folder back."""
    replaced = _replaced(paths, folder)
    if not replaced.exists():
        return
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        replaced.rename(folder)


def _replaced(paths: StorePaths, folder: Path) -> Path:
    return paths.models / f".replaced-{folder.name}"


def _put_in_place(paths: StorePaths, building: Path, folder: Path) -> None:
    replaced = _replaced(paths, folder)
    if folder.exists():
        folder.rename(replaced)
    building.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _place_blob(paths: StorePaths, path: Path, partition: Partition, renew: bool) -> None:
    target = blob_path(paths.root, partition.digest)
    present = target.is_file() and not target.is_symlink() and target.stat().st_size == partition.size
    if present and not renew:
        path.unlink()
        return
    os.chmod(path, 0o444)
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)
    sync_folder(target.parent)
    sync_folder(paths.blobs)


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
