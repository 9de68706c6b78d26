"""Layers of a partition that are read from the disk with every iteration, into slots that they take in turns (C1):

    slot 0   | read 0 | use 0 |  read 4  | use 4 | read 0 ...      layers 0, 2, 4, 6 of each iteration
    slot 1     | read 2 |    use 2    | read 6 | use 6 | read 2 ...

A slot is read into as soon as the layer in it has been used, so that the first layers of the next iteration are there
before it begins. Direct reads into memory of our own: nothing goes through the page cache, where a model larger than
memory would push out everybody else's pages. Knows ranges of bytes, no tensors.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dovetail.errors import CheckpointError, DovetailError, OutOfMemory
from dovetail.store.loading.reader import DirectIo, PartitionFile

READ_BYTES = 4 << 20  # of one read: several threads share a layer
NICENESS = 10  # of the threads that read
MEASURED_BYTES, MEASURED_S = 64 << 20, 0.15  # at a time, and for so long, when a disk is measured


class Range(NamedTuple):
    """Of a file."""

    begin: int
    end: int


def anonymous(size_bytes: int) -> memoryview:
    """Memory of our own, whole pages."""
    try:
        memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OutOfMemory(f"cannot map {size_bytes:,} bytes: {error.strerror}") from error
    with suppress(OSError, AttributeError):  # advice only
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


@dataclass(eq=False, slots=True)
class Fill:
    """A range of the file on its way into memory."""

    range: Range
    memory: memoryview
    left: int = 0  # reads that are not done
    queued: deque[Range] = field(default_factory=deque)  # of them those that nobody has begun
    error: DovetailError | None = None

    # As a reader's target

    def populate(self, begin: int, end: int) -> None:
        """Reading will."""

    def pieces(self, begin: int, end: int) -> list[memoryview]:
        return [self.memory[begin - self.range.begin : end - self.range.begin]]

    @property
    def is_here(self) -> bool:
        return self.left == 0


class DiskThreads:
    """Threads that read ranges of one file, those that were asked for first."""

    def __init__(self, file: PartitionFile, readers: int) -> None:
        self.changed = threading.Condition()
        self.read_bytes, self.busy_s = 0, 0.0  # while at least one read was under way
        self._file = file
        self._fills: deque[Fill] = deque()
        self._reading = 0
        self._since_s = 0.0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"layer-reader-{number}", daemon=True) for number in range(readers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def speed(self) -> float | None:
        """Bytes per second of what was read so far."""
        with self.changed:
            return self.read_bytes / self.busy_s if self.busy_s > 0.0 else None

    def submit(self, fill: Fill) -> None:
        with self.changed:
            begin, end = fill.range
            fill.queued = deque(Range(at, min(at + READ_BYTES, end)) for at in range(begin, end, READ_BYTES))
            fill.left, fill.error = len(fill.queued), None
            self._fills.append(fill)
            self.changed.notify_all()

    def give_up(self, fill: Fill) -> None:
        """Nobody wants it any more; returns when no thread writes into its memory."""
        with self.changed:
            fill.left -= len(fill.queued)
            fill.queued.clear()
            self.changed.wait_for(lambda: fill.left == 0)

    def wait(self, fill: Fill, timeout_s: float) -> bool:
        """Until it is here; False if the time was up. Raises what went wrong."""
        with self.changed:
            if fill.left and timeout_s > 0.0:
                self.changed.wait_for(lambda: fill.left == 0, None if timeout_s == float("inf") else timeout_s)
            if fill.left == 0 and fill.error is not None:
                raise fill.error
            return fill.left == 0

    def close(self) -> None:
        """Reads that are under way end first."""
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._file.close()

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # what is computed meanwhile comes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (taken := self._take()) is not None:
            fill, part = taken
            error: DovetailError | None = CheckpointError(f"{self._file.origin}: a reading thread failed")
            try:
                self._file.read_into(fill, *part)
                error = None
            except DovetailError as caught:
                error = caught
            except (OSError, ValueError) as caught:  # the thread lives on: others' layers are its too
                error = CheckpointError(f"{self._file.origin}: {caught}")
            finally:
                self._put(fill, part, error)

    def _take(self) -> tuple[Fill, Range] | None:
        with self.changed:
            while not self._is_closed:
                while self._fills and not self._fills[0].queued:
                    self._fills.popleft()
                if self._fills:
                    if not self._reading:
                        self._since_s = time.monotonic()
                    self._reading += 1
                    return self._fills[0], self._fills[0].queued.popleft()
                self.changed.wait()
        return None

    def _put(self, fill: Fill, part: Range, error: DovetailError | None) -> None:
        with self.changed:
            now = time.monotonic()
            self.busy_s += now - self._since_s
            self._since_s = now
            self._reading -= 1
            self.read_bytes += part.end - part.begin
            fill.error = fill.error or error
            fill.left -= 1
            if fill.left == 0:
                self.changed.notify_all()


class LayerReader:
    """The layers of one model. One iteration at a time: `wait` for each layer in their order, `release` it when it has
    been used."""

    def __init__(self, threads: DiskThreads, ranges: Mapping[int, Range], num_slots: int) -> None:
        self.layers = tuple(ranges)
        self._ranges = ranges
        self._threads = threads
        places = {layer: at % num_slots for at, layer in enumerate(self.layers)}
        self._followers = {
            layer: self.layers[at + num_slots if at + num_slots < len(self.layers) else at % num_slots]
            for at, layer in enumerate(self.layers)
        }
        largest = max(end - begin for begin, end in ranges.values())
        memory = [anonymous(largest) for _ in range(num_slots)]
        self._memory = {layer: memory[place] for layer, place in places.items()}
        self._slots = places
        self._fills: list[Fill] = []
        self._held: list[int] = []  # by slot: the layer that is in it, or will be

    @property
    def speed(self) -> float | None:
        """Bytes per second that the disk gave while it was asked."""
        return self._threads.speed

    @property
    def num_bytes(self) -> int:
        """Of an iteration."""
        return sum(end - begin for begin, end in self._ranges.values())

    def memory_of(self, layer: int) -> tuple[Range, memoryview]:
        """Where it is while it is used, always the same place."""
        span = self._ranges[layer]
        return span, self._memory[layer][: span.end - span.begin]

    def start(self) -> None:
        """Read the first ones, before anybody asks."""
        for layer in self.layers:
            if self._slots[layer] == len(self._fills):
                self._fills.append(self._fill(layer))
                self._held.append(layer)

    def wait(self, layer: int, timeout_s: float = float("inf")) -> bool:
        """Until the layer is here; False if the time was up. Of an iteration that broke off another one may be in its
        slot."""
        slot = self._slots[layer]
        if self._held[slot] != layer or self._fills[slot].error is not None:
            self._threads.give_up(self._fills[slot])
            self._refill(slot, layer)
        return self._threads.wait(self._fills[slot], timeout_s)

    def release(self, layer: int) -> None:
        """It has been used: its slot is another's."""
        slot = self._slots[layer]
        assert self._held[slot] == layer, f"layer {layer} is in no slot"
        assert self._fills[slot].is_here, f"layer {layer} was used before it was there"
        if self._followers[layer] != layer:
            self._refill(slot, self._followers[layer])

    def close(self) -> None:
        self._threads.close()

    def _refill(self, slot: int, layer: int) -> None:
        self._held[slot], self._fills[slot] = layer, self._fill(layer)

    def _fill(self, layer: int) -> Fill:
        fill = Fill(self._ranges[layer], self._memory[layer])
        self._threads.submit(fill)
        return fill


def lock_shared(file: PartitionFile) -> None:
    """For as long as it is open, so that `store.collect` can tell that it is in use."""
    with suppress(OSError):  # a file system without locks
        fcntl.flock(file.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def read_all(threads: DiskThreads, fills: Sequence[Fill]) -> None:
    for fill in fills:
        threads.submit(fill)
    for fill in fills:
        threads.wait(fill, float("inf"))


def measure_speed(path: Path, size_bytes: int, direct_io: DirectIo, readers: int) -> float | None:
    """Bytes per second at which the file is read past the page cache, by as many threads as will read it. Takes
    `MEASURED_S`; None where it cannot be read."""
    try:
        file = _past_the_cache(path, size_bytes, direct_io)
    except DovetailError:
        return None
    threads, memory, at = DiskThreads(file, readers), anonymous(MEASURED_BYTES), 0
    until = time.monotonic() + MEASURED_S
    try:
        while at < size_bytes and time.monotonic() < until:
            end = min(at + MEASURED_BYTES, size_bytes)
            read_all(threads, [Fill(Range(at, end), memory)])
            at = end
        return threads.speed
    except DovetailError:
        return None
    finally:
        threads.close()


def _past_the_cache(path: Path, size_bytes: int, direct_io: DirectIo) -> PartitionFile:
    if direct_io != "off":
        with suppress(DovetailError):
            return PartitionFile(path, size_bytes, "on")
    file = PartitionFile(path, size_bytes, "off")
    with suppress(OSError, AttributeError):
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return file
