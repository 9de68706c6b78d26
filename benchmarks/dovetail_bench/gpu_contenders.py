"""Our store onto a GPU by a worker's own path, and the ceiling: what one copy out of pinned memory reaches.

cold   disk → host pool → GPU: tensors are copied while others are read
warm   host pool → GPU; chunks of the pool are registered with the device at their first use, before the rounds

A load is what a worker does for a model (`worker.weight_cache`, then the device's executor): it ends when the model can
run.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from dovetail.engine.devices import Device
from dovetail.engine.devices.opening import open_device
from dovetail.engine.executor import ExecutorConfig
from dovetail.engine.gpu_load import PinnedRange
from dovetail.store.host_pool.pool import HostPool
from dovetail.store.loading.loader import LoaderConfig
from dovetail.worker.weight_cache import WeightCache
from dovetail_bench.breakdown import StepContender, steps, touched_memory
from dovetail_bench.contenders import Contender, Load, SampleFiles, State
from dovetail_bench.store_bench import PINNED_COPY
from dovetail_bench.store_loaders import forget, pool_for

_KV_BYTES = 64 << 20  # an instance has some; the least that runs
_DEVICE = torch.device("cuda")


def gpu_contenders(sample: SampleFiles, stack: ExitStack) -> list[Contender]:
    device = open_device("cuda:0", 0)
    pool = pool_for(sample.blobs)
    stack.callback(pool.close)
    config = LoaderConfig()
    weight_cache = WeightCache.attach(pool.file, config.direct_io, config.readers, device)
    stack.callback(weight_cache.close)
    return [ToDevice(weight_cache, pool, device), PinnedCopy(sample)]


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

    def __init__(self, weight_cache: WeightCache, pool: HostPool, device: Device) -> None:
        self._weight_cache = weight_cache
        self._pool = pool
        self._device = device

    def files(self, sample: SampleFiles) -> tuple[Path, ...]:
        return sample.blobs

    def prepare(self, sample: SampleFiles, state: State) -> None:
        """The pool's memory was used before, as a server's is after its first models."""
        stats = self._pool.stats()
        if not stats.resident_bytes or (state == "warm" and not stats.ready_keys):
            self.load(sample)
        if state == "cold":
            forget(self._pool)

    def load(self, sample: SampleFiles) -> Load:
        torch.cuda.synchronize()
        started = time.perf_counter()
        checkpoint, _ = self._weight_cache.open(str(sample.stored))
        executor = self._device.executor(checkpoint, ExecutorConfig(kv_bytes=_KV_BYTES))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        executor.close()
        return Load(sum(path.stat().st_size for path in sample.blobs), seconds)

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


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
