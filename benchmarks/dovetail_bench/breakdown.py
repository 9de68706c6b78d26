"""What each part of the loading path brings, added one by one as in ServerlessLLM's Fig. 7.

Disk → staging memory → the model's memory (a second buffer on the host, or a GPU's), both touched before. Every step
but the last copies after it has read, and each is the one before with one thing changed:

    by tensor      one buffered read per tensor
    + bulk         the file in chunks, whatever tensors they hold
    + direct       past the page cache
    + threads      several chunks at a time
    + pinned       staging memory that the device reads by itself (GPU only)
    + pipeline     chunks are copied while others are read
    + small buffer staging memory of one slice per thread, used over and over (host only)

Written out here, apart from the store's own reader, so that each step can be had without the others.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import msgspec

from dovetail.store.format.manifest import read_manifest
from dovetail.store.loading import staging
from dovetail_bench.contenders import Load, SampleFiles, State

CHUNK_BYTES = 16 * 2**20


class Target(Protocol):
    """Where the bytes are wanted; taken once, before the clock starts."""

    def put(self, offset: int, data: memoryview) -> None:
        """Start to copy; `data` stays as it is until `finish`."""

    def finish(self) -> None: ...


class Step(msgspec.Struct, frozen=True):
    name: str
    bulk: bool = False
    direct: bool = False
    num_threads: int = 1
    pinned: bool = False
    pipeline: bool = False
    small: bool = False


def steps(num_threads: int, pins: bool) -> list[Step]:
    found = [Step("by tensor"), Step("+ bulk", bulk=True), Step("+ direct", bulk=True, direct=True)]
    found.append(msgspec.structs.replace(found[-1], name="+ threads", num_threads=num_threads))
    if pins:
        found.append(msgspec.structs.replace(found[-1], name="+ pinned", pinned=True))
    found.append(msgspec.structs.replace(found[-1], name="+ pipeline", pipeline=True))
    if not pins:
        found.append(msgspec.structs.replace(found[-1], name="+ small buffer", small=True))
    return found


class HostTarget:
    """Memory that was touched before, as a stand-in for a device."""

    def __init__(self, size_bytes: int) -> None:
        self._map = touched_memory(size_bytes)
        self._view = memoryview(self._map)

    def put(self, offset: int, data: memoryview) -> None:
        staging.copy(data, [self._view[offset : offset + data.nbytes]])

    def finish(self) -> None:
        pass


class StepContender:
    """One step of the breakdown."""

    states: tuple[State, ...] = ("cold",)
    reads_store = True

    def __init__(self, step: Step, target: Target, staging: memoryview) -> None:
        self.name = f"breakdown: {step.name}"
        self._step = step
        self._target = target
        self._staging = staging  # touched; pinned where the step says so

    def files(self, sample: SampleFiles) -> tuple[Path, ...]:
        return sample.blobs[:1]

    def prepare(self, sample: SampleFiles, state: State) -> None:
        pass

    def load(self, sample: SampleFiles) -> Load:
        step, blob = self._step, sample.blobs[0]
        size = blob.stat().st_size
        ranges = list(_chunks(size)) if step.bulk else _tensor_ranges(sample.stored)
        descriptor = os.open(blob, os.O_RDONLY | (os.O_DIRECT if step.direct else 0))
        started = time.perf_counter()
        try:
            self._run(descriptor, ranges)
        finally:
            os.close(descriptor)
        seconds = time.perf_counter() - started
        return Load(size if step.bulk else sum(end - begin for begin, end in ranges), seconds)

    def close(self) -> None:
        pass

    def _run(self, descriptor: int, ranges: Sequence[tuple[int, int]]) -> None:
        def read(begin: int, end: int) -> None:
            at = begin
            while at < end:
                at += os.preadv(descriptor, [self._staging[at:end]], at)

        def read_and_put(begin: int, end: int) -> None:
            read(begin, end)
            self._target.put(begin, self._staging[begin:end])

        def read_by_slices(begin: int, end: int) -> None:
            at = begin
            while at < end:
                count = os.preadv(descriptor, [staging.buffer()], at)
                self._target.put(at, staging.buffer()[: min(count, end - at)])
                at += count

        if self._step.small:
            _on_threads(read_by_slices, ranges, self._step.num_threads)
        elif self._step.pipeline:
            _on_threads(read_and_put, ranges, self._step.num_threads)
        else:
            _on_threads(read, ranges, self._step.num_threads)
            for begin, end in ranges:
                self._target.put(begin, self._staging[begin:end])
        self._target.finish()


def touched_memory(size_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    block = bytes(CHUNK_BYTES)
    for offset in range(0, size_bytes, CHUNK_BYTES):
        memory[offset : min(offset + CHUNK_BYTES, size_bytes)] = block[: min(CHUNK_BYTES, size_bytes - offset)]
    return memory


def _on_threads(work: Callable[[int, int], None], ranges: Iterable[tuple[int, int]], num_threads: int) -> None:
    if num_threads == 1:
        for begin, end in ranges:
            work(begin, end)
        return
    with ThreadPoolExecutor(num_threads) as threads:
        for done in [threads.submit(work, begin, end) for begin, end in ranges]:
            done.result()


def _chunks(size: int) -> Iterable[tuple[int, int]]:
    return ((begin, min(begin + CHUNK_BYTES, size)) for begin in range(0, size, CHUNK_BYTES))


def _tensor_ranges(folder: Path) -> list[tuple[int, int]]:
    entries = read_manifest(folder).tensors
    return [(entry.offset, entry.offset + entry.size) for entry in entries if entry.partition == 0]
