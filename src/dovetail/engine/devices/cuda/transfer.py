"""Small copies between pinned host memory and the device, by a kernel: one that goes through a copy engine waits for
all that other streams have queued there, which may be the weights of another model.
"""

# mypy: ignore-errors

from __future__ import annotations

import threading
from collections import deque

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 1024  # of a program


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["source", "target"])
def _copy_words_kernel(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def copy_words(source: Tensor, target: Tensor) -> Tensor:
    """target = source, both contiguous, of words of 4 or 8 bytes, and pinned where they are the host's: on the current
    stream. Returns the target."""
    if source.numel() == 0:
        return target
    assert source.is_contiguous()
    assert target.is_contiguous()
    assert source.nbytes == target.nbytes
    assert source.nbytes % 4 == 0
    if not (source.is_cuda or target.is_cuda):
        return target.copy_(source)
    words = source.nbytes // 4
    given, kept = source.view(-1).view(torch.int32), target.view(-1).view(torch.int32)
    _copy_words_kernel[(triton.cdiv(words, _WORDS),)](given, kept, words, BLOCK=_WORDS, num_warps=4)
    return target


def send(source: Tensor, target: Tensor) -> Tensor:
    """The same from pinned memory that nobody else keeps: it stays until it was read."""
    copy_words(source, target)
    if target.is_cuda:
        _IN_FLIGHT.keep(source)
    return target


def to_device(source: Tensor, device: torch.device) -> Tensor:
    """A copy of pinned memory, made on the current stream."""
    return send(source, torch.empty_like(source, device=device))


def to_host(source: Tensor) -> Tensor:
    """A copy in pinned memory, there once the current stream is."""
    target = copy_words(source, torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda))
    if source.is_cuda:
        _IN_FLIGHT.keep(target)
    return target


class _InFlight:
    """Pinned memory that kernels read or write: the allocator of pinned memory knows only of copies."""

    def __init__(self) -> None:
        self._kept: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        self._lock = threading.Lock()

    def keep(self, memory: Tensor) -> None:
        """Until the current stream is past what it was asked for."""
        event = torch.cuda.Event()
        event.record()
        with self._lock:
            self._kept.append((event, memory))
            while self._kept[0][0].query():
                self._kept.popleft()
                if not self._kept:
                    break


_IN_FLIGHT = _InFlight()  # of the process, as that allocator is
