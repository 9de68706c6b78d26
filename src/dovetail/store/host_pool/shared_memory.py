"""The system calls that the host pool needs and Python does not offer: mappings at a chosen address, advice, holes,
waiting on a shared word, and a lock that goes with its holder. Linux only; knows nothing of checkpoints.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dovetail.errors import OutOfMemory

PAGE = mmap.PAGESIZE
IS_SUPPORTED = sys.platform == "linux"  # memfd, record locks of open files

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # not private: the word lies in memory that processes share
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_EVERYBODY = 2**31 - 1
_MAP_FAILED = ctypes.c_void_p(-1).value
_LOCK_RECORD = "hhqqi4x"  # struct flock on 64-bit Linux


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def reserve_addresses(size_bytes: int) -> int:
    """A range of addresses without memory; any access faults."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return _map(None, size_bytes, 0, flags, -1, 0)


def map_read_only(address: int, file: int, offset: int, size_bytes: int) -> None:
    """Put a part of the file at `address`, over what was mapped there. A write through it faults."""
    _map(address, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, file, offset)


def unmap(address: int, size_bytes: int) -> None:
    _libc.munmap(address, size_bytes)


def populate(address: int, size_bytes: int) -> None:
    """Fault the pages in for writing, many at a time; what they hold stays."""
    if _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:  # kernels before 5.14 do not know the advice: first touch will do it, page by page
        raise OutOfMemory(f"cannot back {size_bytes:,} bytes of the host pool with memory: {os.strerror(code)}")


def advise_huge_pages(address: int, size_bytes: int) -> None:
    _libc.madvise(address, size_bytes, _MADV_HUGEPAGE)  # advice only: may be refused


def punch_hole(file: int, offset: int, size_bytes: int) -> None:
    """Give the pages of a part of the file back to the system; it reads as zeros afterwards."""
    mode = _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE
    if _libc.fallocate(file, mode, ctypes.c_int64(offset), ctypes.c_int64(size_bytes)) != 0:
        raise OSError(ctypes.get_errno(), "cannot give memory of the host pool back")


def wait_on_word(address: int, seen: int, timeout_s: float) -> None:
    """Return when the 32-bit word is no longer `seen`, when somebody wakes its waiters, or after the timeout; also,
    now and then, for no reason."""
    if _FUTEX_CALL is None:
        time.sleep(min(timeout_s, 0.002))
        return
    limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    word, no_word = ctypes.c_void_p(address), ctypes.c_void_p()
    _libc.syscall(
        ctypes.c_long(_FUTEX_CALL), word, ctypes.c_int(_FUTEX_WAIT), ctypes.c_uint32(seen), ctypes.byref(limit),
        no_word, ctypes.c_int(0),
    )  # fmt: skip


def wake_word(address: int) -> None:
    if _FUTEX_CALL is not None:
        word, no_word = ctypes.c_void_p(address), ctypes.c_void_p()
        _libc.syscall(
            ctypes.c_long(_FUTEX_CALL), word, ctypes.c_int(_FUTEX_WAKE), ctypes.c_int(_EVERYBODY), no_word, no_word,
            ctypes.c_int(0),
        )  # fmt: skip


def open_again(file: int) -> int:
    """The same memory through an open file of this process alone, so that its lock is nobody else's: an inherited
    descriptor shares its lock with whoever passed it on."""
    return os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)


@contextmanager
def file_lock(file: int) -> Iterator[None]:
    """Keep other open files of the same inode out. The lock belongs to the open file, so closing some other descriptor
    does not drop it (as it would drop a POSIX lock), and the kernel drops it when the process dies."""
    fcntl.fcntl(file, fcntl.F_OFD_SETLKW, struct.pack(_LOCK_RECORD, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
    try:
        yield
    finally:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(_LOCK_RECORD, fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0))


def _map(address: int | None, size_bytes: int, protection: int, flags: int, file: int, offset: int) -> int:
    mapped: int | None = _libc.mmap(address, size_bytes, protection, flags, file, offset)
    if mapped is None or mapped == _MAP_FAILED:
        raise OutOfMemory(f"cannot map {size_bytes:,} bytes: {os.strerror(ctypes.get_errno())}")
    return mapped
