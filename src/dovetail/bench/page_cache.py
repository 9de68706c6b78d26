"""Puts files into the page cache and out of it, and says how much of one is there: cold and warm, made certain."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_READ_BYTES = 16 * 2**20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


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


def cached_fraction(path: Path) -> float:
    """How much of the file the page cache holds."""
    size = path.stat().st_size
    if size == 0:
        return 1.0
    pages = -(-size // mmap.PAGESIZE)
    present = ctypes.create_string_buffer(pages)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    finally:
        os.close(descriptor)
    try:
        if _libc.mincore(address, size, present) != 0:
            raise OSError(ctypes.get_errno(), f"{path}: mincore")
        return sum(byte & 1 for byte in present.raw) / pages
    finally:
        _libc.munmap(address, size)
