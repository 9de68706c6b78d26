"""Host memory that is registered with a GPU."""

from __future__ import annotations

import ctypes
import mmap
import random

import pytest
import torch

from dovetail.engine.gpu_load import PinnedRange
from dovetail.errors import OutOfMemory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SIZE = 10 * (1 << 20) + 4096
DEVICE = torch.device("cuda")


@pytest.fixture(scope="module")
def host() -> mmap.mmap:
    memory = mmap.mmap(-1, SIZE)
    memory.write(random.Random(0).randbytes(SIZE))
    return memory


def address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_registered_memory_counts_as_pinned_until_it_is_let_go(host: mmap.mmap) -> None:
    tensor = torch.frombuffer(memoryview(host), dtype=torch.uint8)
    pinned = PinnedRange(address(host), SIZE)
    assert tensor.is_pinned()
    with pytest.raises(OutOfMemory, match="cannot pin"):
        PinnedRange(address(host), SIZE)  # twice is a mistake, and is said
    torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)  # to whoever made it, and to nobody else
    pinned.close()
    assert not tensor.is_pinned()
