"""Our store onto a GPU, and the ceiling: what one copy out of pinned memory reaches.

cold   disk → host pool → GPU, all of it at once: chunks are copied while others are read
warm   host pool → GPU; the pool's memory was registered with the device once, before any load
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
import zlib
from contextlib import ExitStack
from pathlib import Path

import torch

from dovetail.engine.gpu_load import DevicePartition, PinnedRange, layer_ends
from dovetail.store.format import partition_files, read_manifest
from dovetail.store.loader import Loader, LoaderConfig
from dovetail.store.pooled import source_of
from dovetail_bench.breakdown import StepContender, steps, touched_memory
from dovetail_bench.contenders import Contender, Load, SampleFiles, State
from dovetail_bench.peer_child import SAMPLE_BYTES, sample_starts
from dovetail_bench.store_bench import PINNED_COPY
from dovetail_bench.store_loaders import forget, pool_for, timed_load

_DEVICE = torch.device("cuda")


def gpu_contenders(sample: SampleFiles, stack: ExitStack) -> list[Contender]:
    pool = pool_for(sample.blobs)
    stack.callback(pool.close)
    loader = Loader(pool, LoaderConfig())
    stack.callback(loader.close)
    end = pool.chunk_offset(pool.num_chunks - 1) + pool.chunk_bytes
    pinned = PinnedRange(pool.address, end)
    stack.callback(pinned.close)
    return [ToDevice(loader), PinnedCopy(sample)]


def gpu_breakdown(sample: SampleFiles, stack: ExitStack) -> list[Contender]:
    size = sample.blobs[0].stat().st_size
    plain, registered = touched_memory(size), touched_memory(size)
    pinned = PinnedRange(_address(registered), size)
    stack.callback(pinned.close)
    target = DeviceTarget(size)
    return [
        StepContender(step, target, memoryview(registered if step.pinned else plain))
        for step in steps(LoaderConfig().readers, pins=True)
    ]


class ToDevice:
    name = "dovetail"
    states: tuple[State, ...] = ("cold", "warm")
    reads_store = True

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def files(self, sample: SampleFiles) -> tuple[Path, ...]:
        return sample.blobs

    def prepare(self, sample: SampleFiles, state: State) -> None:
        if state == "cold":
            forget(self._loader.pool)
            return
        timed_load(self._loader, sample)

    def load(self, sample: SampleFiles) -> Load:
        torch.cuda.synchronize()
        started = time.perf_counter()
        manifest = read_manifest(sample.stored)
        source = source_of(*partition_files(sample.stored, manifest)[0])
        places = [(entry.name, entry.offset, entry.size) for entry in manifest.tensors]
        with self._loader.load(source) as ticket:
            partition = DevicePartition(layer_ends(places, source.size_bytes), _DEVICE)
            first_layer = _FirstLayer(partition, started)
            for begin, end in ticket.arrivals(self._loader.pool.chunk_bytes):
                offset = begin
                for piece in ticket.lease.pieces(begin, end):
                    partition.put(offset, piece)
                    offset += piece.nbytes
            partition.finish()
            seconds = time.perf_counter() - started
        total = 0
        for _, offset, size in sorted(places):
            total = _sampled(partition.memory[offset : offset + size], total)
        return Load(source.size_bytes, seconds, total, first_layer.seconds())

    def close(self) -> None:
        pass


class PinnedCopy:
    """One copy of as many bytes from memory that torch pinned."""

    name = PINNED_COPY
    states: tuple[State, ...] = ("warm",)
    reads_store = True

    def __init__(self, sample: SampleFiles) -> None:
        size = sample.blobs[0].stat().st_size
        self._source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._source.view(torch.int64).copy_(torch.arange(size // 8))  # not zeros, which some links compress
        self._target = torch.empty(size, dtype=torch.uint8, device=_DEVICE)

    def files(self, sample: SampleFiles) -> tuple[Path, ...]:
        return ()

    def prepare(self, sample: SampleFiles, state: State) -> None:
        pass

    def load(self, sample: SampleFiles) -> Load:
        torch.cuda.synchronize()
        started = time.perf_counter()
        self._target.copy_(self._source, non_blocking=True)
        torch.cuda.synchronize()
        return Load(len(self._source), time.perf_counter() - started)

    def close(self) -> None:
        pass


class DeviceTarget:
    """For the breakdown: device memory, and a stream of its own for the copies."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = torch.empty(size_bytes, dtype=torch.uint8, device=_DEVICE)
        self._stream = torch.cuda.Stream()

    def put(self, offset: int, data: memoryview) -> None:
        with torch.cuda.stream(self._stream):
            source = torch.frombuffer(data, dtype=torch.uint8)
            self._memory[offset : offset + len(source)].copy_(source, non_blocking=True)

    def finish(self) -> None:
        self._stream.synchronize()


class _FirstLayer:
    """When the first layer could have been computed."""

    def __init__(self, partition: DevicePartition, started: float) -> None:
        self._partition = partition
        self._started = started
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def seconds(self) -> float:
        self._thread.join()
        return self._seconds

    def _wait(self) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            self._partition.wait_for_layer(0)
            torch.cuda.current_stream().synchronize()
        self._seconds = time.perf_counter() - self._started


def _sampled(data: torch.Tensor, total: int) -> int:
    for start in sample_starts(len(data)):
        total = zlib.crc32(bytes(data[start : start + SAMPLE_BYTES].tolist()), total)
    return total


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
