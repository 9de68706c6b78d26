"""A small buffer per thread through which direct reads can reach the pool, instead of landing in its pages.

Where a device writes to memory by itself, landing there is better: no copy. A virtual machine's paravirtual disk is
read by the host, which copies, and pays for every page of the guest that it has not touched lately: on one such machine
the same reads ran at 2.2 or at 5.3 GB/s from one second to the next. Through a buffer that is used over and over, and
so stays touched, they always run at full speed; the copy from there to the pool costs a tenth of a second of a core per
GB and overlaps with the reads of other threads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from functools import cache
from pathlib import Path
from typing import Literal

Staging = Literal["auto", "on", "off"]
SLICE_BYTES = 2 << 20  # of one read into the buffer: a huge page


def is_worthwhile(file: int) -> bool:
    """Whether the open file lies on a disk whose reads the host makes."""
    return _is_paravirtual(os.fstat(file).st_dev)


@cache
def _is_paravirtual(device: int) -> bool:
    try:
        place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    except OSError:  # memory, a network's file system, another system than Linux
        return False
    return any(part.startswith(("virtio", "vbd-")) for part in place.parts)


class _Buffers(threading.local):
    """One per thread, made when it first reads and gone with it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 2 * SLICE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = memoryview(self._memory)
        skip = -ctypes.addressof(ctypes.c_char.from_buffer(whole)) % SLICE_BYTES
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.slice = whole[skip : skip + SLICE_BYTES]


_buffers = _Buffers()


def buffer() -> memoryview:
    """This thread's own, aligned to its size; what it holds is nobody's."""
    return _buffers.slice


def copy(source: memoryview, target: list[memoryview]) -> None:
    """Fill the pieces from the front of `source`, with other threads running meanwhile."""
    assert sum(piece.nbytes for piece in target) <= source.nbytes, "more room than bytes"
    address = ctypes.addressof(ctypes.c_char.from_buffer(source))
    for piece in target:
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(piece)), address, piece.nbytes)
        address += piece.nbytes
