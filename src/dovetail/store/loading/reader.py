"""Reads ranges of a partition file into memory that is already there: direct I/O past the page cache, or through it
where the bytes are in it anyway or the file system refuses. One range per call; threads are the caller's (L3).
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path
from typing import Literal, Protocol

from dovetail.errors import CheckpointError, DamagedCheckpoint
from dovetail.store.files import open_regular
from dovetail.store.loading import staging
from dovetail.store.loading.staging import Staging

DirectIo = Literal["auto", "on", "off"]
ALIGNMENT = 4096  # of offsets, lengths and addresses in direct I/O
_PAGE = os.sysconf("SC_PAGE_SIZE")
_CACHESTAT = 451  # the same number on every architecture; Linux 6.5

_libc = ctypes.CDLL(None, use_errno=True)


class _CacheRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


class ReadTarget(Protocol):
    """Memory for bytes of a file: a lease of the pool, a slot of layers."""

    def populate(self, begin: int, end: int) -> None:
        """Back it with memory, where it never was."""

    def pieces(self, begin: int, end: int) -> list[memoryview]: ...


class PartitionFile:
    """An open partition. `read_into` may be called from several threads."""

    def __init__(self, path: Path, size_bytes: int, direct_io: DirectIo = "auto", staged: Staging = "auto") -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._direct_io = direct_io
        self._buffered = self._open_buffered()
        self._direct: int | None = None
        self._is_staged = staging.is_worthwhile(self._buffered) if staged == "auto" else staged == "on"
        try:
            found = os.fstat(self._buffered).st_size
            if found != size_bytes:
                raise DamagedCheckpoint(f"{path}: {found:,} bytes, {size_bytes:,} expected")
            if direct_io != "off":
                self._direct = self._open_direct()
        except CheckpointError:
            self.close()
            raise

    @property
    def origin(self) -> str:
        return str(self.path)

    @property
    def descriptor(self) -> int:
        """Of reads through the page cache; open as long as the file is."""
        return self._buffered

    def read_into(self, target: ReadTarget, begin: int, end: int) -> None:
        """Bytes begin..end of the file, to where they belong in the target."""
        target.populate(begin, end)
        direct = self._direct
        if direct is not None and begin % ALIGNMENT == 0 and not self._is_cached(begin, end):
            # The last read asks for whole blocks: the chunk has room, and the file's end cuts it short.
            reached = self._read(direct, target, begin, -(-end // ALIGNMENT) * ALIGNMENT)
            if reached >= end:
                return
            begin = reached  # an interrupted read, or a refusal: the rest goes through the cache
        reached = self._read(self._buffered, target, begin, end)
        if reached < end:
            raise DamagedCheckpoint(f"{self.path}: ends at byte {reached:,} of {self.size_bytes:,}")

    def close(self) -> None:
        for file in (self._buffered, self._direct):
            if file is not None:
                os.close(file)
        self._direct = None

    def _read(self, file: int, target: ReadTarget, begin: int, end: int) -> int:
        """Returns how far it came: less than `end` at the end of the file, or where direct I/O cannot go on."""
        is_staged = file == self._direct and self._is_staged
        at = begin
        while at < end:
            pieces = [staging.buffer()[: end - at]] if is_staged else target.pieces(at, end)
            try:
                count = os.preadv(file, pieces, at)
            except OSError as error:
                if error.errno == errno.EINVAL and file == self._direct and self._direct_io == "auto":
                    return at
                raise CheckpointError(f"{self.path}: reading at byte {at:,}: {error.strerror}") from error
            if is_staged and count:
                staging.copy(pieces[0], target.pieces(at, at + count))
            at += count
            if count == 0 or (file == self._direct and at % ALIGNMENT):
                break
        return at

    def _is_cached(self, begin: int, end: int) -> bool:
        """Copying from the page cache beats the disk; reading cold bytes through it does not. Kernels that cannot tell
        count as cold."""
        return self._direct_io != "on" and cached_share(self._buffered, begin, end) == 1.0

    def _open_direct(self) -> int | None:
        if sys.platform != "linux":
            return None
        try:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if self._direct_io == "on":
                raise CheckpointError(f"{self.path}: direct I/O: {error.strerror} (store.direct_io)") from error
            return None

    def _open_buffered(self) -> int:
        try:
            return open_regular(self.path)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{self.path}: missing") from error
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from error


def cached_share(file: int, begin: int, end: int) -> float:
    """How much of the range the page cache holds; 0 where the kernel cannot tell."""
    wanted, found = _CacheRange(begin, end - begin), _CacheStat()
    call, handle = ctypes.c_long(_CACHESTAT), ctypes.c_uint(file)
    if _libc.syscall(call, handle, ctypes.byref(wanted), ctypes.byref(found), ctypes.c_uint(0)) != 0:
        return 0.0
    return min(float(found.cached) / (-(-end // _PAGE) - begin // _PAGE), 1.0)
