"""Partitions on their way to a GPU: any order of chunks, layers ready before the end, nothing copied wrong."""

from __future__ import annotations

import ctypes
import mmap
import random
import threading

import pytest
import torch

from dovetail.engine.gpu_load import DevicePartition, LoadAborted, PinnedRange
from dovetail.errors import OutOfMemory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

CHUNK = 1 << 20
SIZE = 10 * CHUNK + 4096
DEVICE = torch.device("cuda")


@pytest.fixture(scope="module")
def host() -> mmap.mmap:
    memory = mmap.mmap(-1, SIZE)
    memory.write(random.Random(0).randbytes(SIZE))
    return memory


def chunks(memory: mmap.mmap) -> list[tuple[int, memoryview]]:
    return [(at, memoryview(memory)[at : min(at + CHUNK, SIZE)]) for at in range(0, SIZE, CHUNK)]


def address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_chunks_in_any_order_give_the_partition(host: mmap.mmap) -> None:
    pinned = PinnedRange(address(host), SIZE)
    try:
        partition = DevicePartition([SIZE], DEVICE)
        shuffled = chunks(host)
        random.Random(1).shuffle(shuffled)
        for offset, data in shuffled:
            partition.put(offset, data)
        partition.finish()
        assert bytes(partition.memory.cpu().tolist()) == host[:SIZE]
    finally:
        pinned.close()


def test_registered_memory_counts_as_pinned_until_it_is_let_go(host: mmap.mmap) -> None:
    tensor = torch.frombuffer(memoryview(host), dtype=torch.uint8)
    pinned = PinnedRange(address(host), SIZE)
    assert tensor.is_pinned()
    with pytest.raises(OutOfMemory, match="cannot pin"):
        PinnedRange(address(host), SIZE)  # twice is a mistake, and is said
    torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)  # to whoever made it, and to nobody else
    pinned.close()
    assert not tensor.is_pinned()


def test_a_layer_is_ready_when_all_before_its_end_has_come(host: mmap.mmap) -> None:
    partition = DevicePartition([2 * CHUNK, 4 * CHUNK, SIZE], DEVICE)
    pieces = chunks(host)
    for index in (1, 2, 3):
        partition.put(*pieces[index])
    assert partition.num_layers_ready() == 0  # the first chunk is missing
    partition.put(*pieces[0])
    partition.wait_for_layer(1)
    torch.cuda.current_stream().synchronize()
    assert partition.num_layers_ready() == 2
    assert torch.equal(partition.memory[: 4 * CHUNK].cpu(), torch.frombuffer(host, dtype=torch.uint8)[: 4 * CHUNK])
    for piece in pieces[4:]:
        partition.put(*piece)
    partition.finish()
    assert partition.num_layers_ready() == 3


def test_work_that_waits_for_a_layer_computes_with_its_bytes(host: mmap.mmap) -> None:
    """The consumer queues its work before the bytes are there; the stream holds it back."""
    partition = DevicePartition([CHUNK, SIZE], DEVICE)
    weights = partition.tensor("bf16", (CHUNK // 2,), 0)
    expected = torch.frombuffer(host, dtype=torch.bfloat16)[: CHUNK // 2].clone()
    sums: list[torch.Tensor] = []

    def compute() -> None:
        partition.wait_for_layer(0)
        sums.append(weights.clone())

    consumer = threading.Thread(target=compute)
    consumer.start()
    for piece in chunks(host):
        partition.put(*piece)
    consumer.join(timeout=60)
    partition.finish()
    assert torch.equal(sums[0].cpu().view(torch.int16), expected.view(torch.int16))


def test_a_load_that_breaks_off_tells_who_waits(host: mmap.mmap) -> None:
    partition = DevicePartition([CHUNK, SIZE], DEVICE)
    partition.put(*chunks(host)[0])
    partition.abort(OSError("the disk is gone"))
    partition.wait_for_layer(0)  # this one had arrived
    with pytest.raises(LoadAborted, match=r"layer 1 .*the disk is gone"):
        partition.wait_for_layer(1)
    with pytest.raises(LoadAborted, match="did not arrive: the disk is gone"):
        partition.finish()
