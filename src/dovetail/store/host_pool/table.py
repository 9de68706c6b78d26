"""The host pool's bookkeeping as it lies in shared memory: which entry owns which chunks, who loads and who holds it.

    slot 0 | slot 1        each: sequence number, length, checksum, table

A change is written whole into the slot that is not current. Whoever dies while writing leaves a checksum that does not
fit, and the other slot, which is the table as it was before. Holds no lock and frees nothing by itself: `pool` does.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import msgspec

from dovetail.errors import OutOfMemory

_SLOT_HEAD = struct.Struct("<QQI4x")  # sequence, length, checksum


class Process(msgspec.Struct, frozen=True, array_like=True):
    """A process and when it started, so that a number used again is not taken for the old holder."""

    pid: int
    started_ticks: int

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, _started_ticks(pid) or 0)

    @property
    def is_alive(self) -> bool:
        return _started_ticks(self.pid) == self.started_ticks


class Pins(msgspec.Struct, array_like=True):
    holder: Process
    count: int


class PoolEntry(msgspec.Struct, array_like=True):
    size_bytes: int
    chunks: list[int]  # in the order of the partition's bytes; the first one's words tell the progress
    loader: Process | None  # who fills it; None when it is ready, or when nobody does any more
    is_ready: bool
    pins: list[Pins]
    last_use: float  # monotonic seconds, which all processes of a machine share

    def pin(self, holder: Process) -> None:
        for pins in self.pins:
            if pins.holder == holder:
                pins.count += 1
                return
        self.pins.append(Pins(holder, 1))

    def unpin(self, holder: Process) -> None:
        pins = next(pins for pins in self.pins if pins.holder == holder)
        pins.count -= 1
        if pins.count == 0:
            self.pins.remove(pins)


class Table(msgspec.Struct, array_like=True):
    num_chunks: int
    entries: dict[str, PoolEntry]
    touched: list[int]  # chunks that have been backed with memory; the others cost nothing yet
    last_use: float  # of the pool as a whole

    @property
    def num_used(self) -> int:
        return sum(len(entry.chunks) for entry in self.entries.values())

    def free_chunks(self) -> list[int]:
        """Touched ones first, because first touch costs more than the disk; then from the bottom, so that the chunks
        of a partition lie together."""
        used = {chunk for entry in self.entries.values() for chunk in entry.chunks}
        touched = set(self.touched)
        return sorted(set(range(self.num_chunks)) - used, key=lambda chunk: (chunk not in touched, chunk))

    def choose_chunks(self, count: int) -> list[int]:
        """Free ones for an entry: a run of touched ones, side by side, in the smallest gap that has room; where there
        is none, the first that are free."""
        free = self.free_chunks()
        touched = set(self.touched)
        gaps: list[list[int]] = []
        for chunk in (chunk for chunk in free if chunk in touched):
            if gaps and gaps[-1][-1] + 1 == chunk:
                gaps[-1].append(chunk)
            else:
                gaps.append([chunk])
        fitting = [gap for gap in gaps if len(gap) >= count]
        return min(fitting, key=len)[:count] if fitting else free[:count]

    def idle_keys(self) -> list[str]:
        """What may be evicted, least recently used first."""
        idle = [(entry.last_use, key) for key, entry in self.entries.items() if entry.is_ready and not entry.pins]
        return [key for _, key in sorted(idle)]

    def forget_dead(self) -> bool:
        """Take back what dead processes held or had half loaded; True if there was any."""
        processes = {pins.holder for entry in self.entries.values() for pins in entry.pins}
        processes |= {entry.loader for entry in self.entries.values() if entry.loader is not None}
        dead = {process for process in processes if not process.is_alive}
        if not dead:
            return False
        for key, entry in list(self.entries.items()):
            entry.pins = [pins for pins in entry.pins if pins.holder not in dead]
            if entry.loader in dead:
                entry.loader = None
            self.drop_if_useless(key)
        return True

    def drop_if_useless(self, key: str) -> None:
        """Half a partition that nobody waits for is no use to anyone."""
        entry = self.entries[key]
        if not entry.is_ready and not entry.pins:
            del self.entries[key]

    def check(self) -> None:
        """Every chunk belongs to one entry or to none, and there are no more of them than the budget allows."""
        used = [chunk for entry in self.entries.values() for chunk in entry.chunks]
        assert len(used) == len(set(used)) <= self.num_chunks, "a chunk belongs to two entries"
        assert all(0 <= chunk < self.num_chunks for chunk in used), "a chunk outside the budget"
        for key, entry in self.entries.items():
            assert entry.is_ready or entry.pins, f"{key}: half loaded, and nobody holds it"
            assert not (entry.is_ready and entry.loader), f"{key}: ready, and still being loaded"


class TableSlots:
    """Reads and writes the table in `memory`, which holds the two slots and nothing else."""

    def __init__(self, memory: memoryview) -> None:
        half = len(memory) // 2
        self._slots = (memory[:half], memory[half : 2 * half])

    def read(self) -> Table:
        _, payload = max(self._valid(), key=lambda found: found[0])
        table = msgspec.msgpack.decode(payload, type=Table)
        table.check()
        return table

    def write(self, table: Table) -> None:
        table.check()
        payload = msgspec.msgpack.encode(table)
        sequence = max((found[0] for found in self._valid()), default=0) + 1
        slot = self._slots[sequence % 2]
        if _SLOT_HEAD.size + len(payload) > len(slot):
            raise OutOfMemory(f"the host pool's table needs {len(payload):,} bytes of {len(slot):,}")
        slot[_SLOT_HEAD.size : _SLOT_HEAD.size + len(payload)] = payload
        slot[: _SLOT_HEAD.size] = _SLOT_HEAD.pack(sequence, len(payload), _checksum(sequence, payload))

    def release(self) -> None:
        for slot in self._slots:
            slot.release()

    def _valid(self) -> list[tuple[int, bytes]]:
        found = []
        for slot in self._slots:
            sequence, length, checksum = _SLOT_HEAD.unpack(slot[: _SLOT_HEAD.size])
            payload = bytes(slot[_SLOT_HEAD.size : _SLOT_HEAD.size + length])
            if sequence and len(payload) == length and _checksum(sequence, payload) == checksum:
                found.append((sequence, payload))
        return found


def _checksum(sequence: int, payload: bytes) -> int:
    return zlib.crc32(payload, sequence & 0xFFFFFFFF)


def _started_ticks(pid: int) -> int | None:
    """When the process started; None if there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
