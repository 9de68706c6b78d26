"""Small files: reading other people's with errors that name the file, writing ours so that a crash leaves no half."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from dovetail.errors import DamagedCheckpoint, SourceError


def open_regular(path: Path, flags: int = 0) -> int:
    """A descriptor to read from. Opening a FIFO would wait for a writer, and reading a device never ends: what is no
    regular file is damage. Raises OSError where it cannot be opened."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedCheckpoint(f"{path}: not a regular file")
    return descriptor


def read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise DamagedCheckpoint(f"{path}: text that is not UTF-8") from error


def read_bytes(path: Path) -> bytes:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: missing") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path}: {error.strerror}") from error


def read_json(path: Path, *, required: bool = True) -> dict[str, Any]:
    """A JSON object from a file; empty where the file is optional and absent."""
    if not required and not path.exists():
        return {}
    value = _decoded(path)
    if not isinstance(value, dict):
        raise DamagedCheckpoint(f"{path}: expected a JSON object")
    return value


def read_json_list(path: Path) -> list[Any]:
    value = _decoded(path)
    if not isinstance(value, list):
        raise DamagedCheckpoint(f"{path}: expected a JSON list")
    return value


def _decoded(path: Path) -> Any:
    text = read_bytes(path)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: not valid JSON: {error}") from error


def write_file(path: Path, content: bytes) -> None:
    """The old content or the new, whatever happens."""
    building = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with building.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        building.rename(path)
    finally:
        building.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_empty(folder: Path) -> None:
    """The folder, unless there is a file in it or in a folder of it."""
    for path, _, names in os.walk(folder, topdown=False):
        if not names:
            with suppress(OSError):  # one of its folders has files
                os.rmdir(path)


def check_room(what: str, folder: Path, needed: int) -> None:
    """Better said before an hour of work than after it; the disk may still fill up meanwhile."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise SourceError(f"{what}: needs {needed / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free in {folder}")
