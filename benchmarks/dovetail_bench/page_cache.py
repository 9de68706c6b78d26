"""Puts files into the page cache and out of it: cold and warm, made certain."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_READ_BYTES = 16 * 2**20


def drop(paths: Iterable[Path], *, everything: bool = False) -> None:
    """Out of the page cache. `everything` also empties the rest of it, where this process may: what the file system
    keeps to find the files' blocks goes too."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not on disk yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    if everything and os.access(_DROP_CACHES, os.W_OK):
        _DROP_CACHES.write_text("3")


def fill(paths: Iterable[Path]) -> None:
    """Into the page cache."""
    buffer = bytearray(_READ_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
