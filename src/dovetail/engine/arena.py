"""Memory that grows and shrinks in place: a reserved range of addresses whose head is backed by pages.

    0 .................. committed ............................ reserved
    |  readable, writable  |  addresses only, any access faults  |

Committing and releasing move the border; nothing is copied and no address changes. Pages cost nothing until they are
first written. A GPU's arena keeps the same interface over CUDA's virtual memory calls.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import torch

from dovetail.errors import OutOfMemory

_PROT_NONE = 0
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _round_up(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class HostArena:
    """Owns a range of host addresses until close()."""

    def __init__(self, reserve_bytes: int) -> None:
        self.reserved_bytes = _round_up(max(reserve_bytes, 1))
        self.committed_bytes = 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._address: int | None = _libc.mmap(None, self.reserved_bytes, _PROT_NONE, flags, -1, 0)
        if self._address == _MAP_FAILED:
            self._address = None
            raise OutOfMemory(f"cannot reserve {self.reserved_bytes:,} bytes of addresses: {_last_error()}")
        _libc.madvise(self._address, self.reserved_bytes, _MADV_HUGEPAGE)  # advice only: may be refused

    def resize(self, num_bytes: int) -> None:
        """Back the first `num_bytes` with pages; give the pages behind them back to the system."""
        assert self._address is not None, "the arena is closed"
        wanted = _round_up(num_bytes)
        assert wanted <= self.reserved_bytes, f"{wanted:,} bytes wanted of {self.reserved_bytes:,} reserved"
        if wanted > self.committed_bytes:
            self._protect(self.committed_bytes, wanted, mmap.PROT_READ | mmap.PROT_WRITE)
        elif wanted < self.committed_bytes:
            _libc.madvise(self._address + wanted, self.committed_bytes - wanted, _MADV_DONTNEED)
            self._protect(wanted, self.committed_bytes, _PROT_NONE)
        self.committed_bytes = wanted

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A view of the whole range; only what is committed may be touched. Must not outlive the arena."""
        assert self._address is not None
        buffer = (ctypes.c_char * self.reserved_bytes).from_address(self._address)
        count = 1
        for size in shape:
            count *= size
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)

    def close(self) -> None:
        if self._address is not None:
            _libc.munmap(self._address, self.reserved_bytes)
            self._address = None
            self.committed_bytes = 0

    def _protect(self, start: int, end: int, protection: int) -> None:
        assert self._address is not None
        if _libc.mprotect(self._address + start, end - start, protection) != 0:
            raise OutOfMemory(f"cannot commit {end - start:,} bytes: {_last_error()}")


def _last_error() -> str:
    return os.strerror(ctypes.get_errno())
