"""What has been done of a target, in all runs: counts, inputs still to run, and finds.

A run cuts the pending inputs into shares. Whoever works on a share counts in a file that is mapped, so that nothing is
lost where a process is killed; the next run adds up what it finds there (`run-<number>/<share>`).
"""

from __future__ import annotations

import json
import mmap
import shutil
import struct
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

Range = tuple[int, int]  # begin, end
_FIELDS = "<QQQd"  # position in the share, accepted, refused, processor seconds
_KEPT = 50  # inputs of finds; all of them are in the log


class Share:
    """Inputs of one target that one process at a time works on."""

    def __init__(self, path: Path) -> None:
        self.ranges: list[Range] = [(begin, end) for begin, end in json.loads(path.with_suffix(".ranges").read_text())]
        self.path = path
        with path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), struct.calcsize(_FIELDS))

    @classmethod
    def create(cls, path: Path, ranges: list[Range]) -> Share:
        path.with_suffix(".ranges").write_text(json.dumps(ranges))
        path.write_bytes(bytes(struct.calcsize(_FIELDS)))
        return cls(path)

    def __len__(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    @property
    def counts(self) -> tuple[int, int, int, float]:
        """Position, accepted, refused, processor seconds."""
        position, accepted, refused, spent = struct.unpack_from(_FIELDS, self._mapped)
        return position, accepted, refused, spent

    @counts.setter
    def counts(self, values: tuple[int, int, int, float]) -> None:
        struct.pack_into(_FIELDS, self._mapped, 0, *values)

    @property
    def target_folder(self) -> Path:
        return self.path.parents[1]

    @property
    def position(self) -> int:
        return self.counts[0]

    def rest(self) -> Iterator[int]:
        return islice(chain.from_iterable(range(*bounds) for bounds in self.ranges), self.position, None)

    def pending(self) -> list[Range]:
        return _without_first(self.ranges, self.position)


class Journal:
    """Of one target, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "journal.json"
        stored = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._run: int = stored.get("run", 0)  # those up to this one are added up
        self._planned: int = stored.get("planned", 0)  # inputs below this are done or pending
        self._pending: list[Range] = [(begin, end) for begin, end in stored.get("pending", [])]
        self.accepted: int = stored.get("accepted", 0)
        self.refused: int = stored.get("refused", 0)
        self.processor_s: float = stored.get("processor_s", 0.0)
        for path in sorted(folder.glob("run-*")):
            if int(path.name[4:]) > self._run:
                self._add_up(path)
            shutil.rmtree(path)

    @property
    def inputs(self) -> int:
        return self._planned - _size(self._pending)

    @property
    def finds(self) -> list[str]:
        log = self.folder / "finds.log"
        return log.read_text().splitlines() if log.exists() else []

    def begin_run(self, count: int, share_size: int) -> list[Share]:
        """Shares of the inputs below `count` that are pending."""
        if count > self._planned:
            self._pending.append((self._planned, count))
            self._planned = count
            self._save()
        wanted = [(begin, min(end, count)) for begin, end in self._pending if begin < count]
        folder = self.folder / f"run-{self._run + 1}"
        folder.mkdir()
        return [Share.create(folder / str(number), part) for number, part in enumerate(_cut(wanted, share_size))]

    def end_run(self) -> None:
        folder = self.folder / f"run-{self._run + 1}"
        self._add_up(folder)
        shutil.rmtree(folder)

    def _add_up(self, folder: Path) -> None:
        shares = [Share(path.with_suffix("")) for path in folder.glob("*.ranges")]
        covered = [bounds for share in shares for bounds in share.ranges]
        untouched = [bounds for pending in self._pending for bounds in _subtract(pending, covered)]
        self._pending = sorted([*untouched, *(bounds for share in shares for bounds in share.pending())])
        for share in shares:
            _, accepted, refused, spent = share.counts
            self.accepted += accepted
            self.refused += refused
            self.processor_s += spent
        self._run = int(folder.name[4:])
        self._save()

    def _save(self) -> None:
        content: dict[str, Any] = {
            "run": self._run,
            "planned": self._planned,
            "pending": self._pending,
            "accepted": self.accepted,
            "refused": self.refused,
            "processor_s": self.processor_s,
        }
        writing = self._file.with_suffix(".new")
        writing.write_text(json.dumps(content))
        writing.replace(self._file)


def note_find(folder: Path, index: int, data: bytes, what: str) -> None:
    """In the folder of the target's journal."""
    finds = folder / "finds"
    finds.mkdir(exist_ok=True)
    if len(list(finds.iterdir())) < 2 * _KEPT:
        (finds / f"{index}.input").write_bytes(data)
        (finds / f"{index}.txt").write_text(what[:4000])
    with (folder / "finds.log").open("a") as log:
        log.write(f"{index} {' '.join(what.split())[:300]}\n")


def _size(ranges: list[Range]) -> int:
    return sum(end - begin for begin, end in ranges)


def _without_first(ranges: list[Range], count: int) -> list[Range]:
    rest = []
    for begin, end in ranges:
        skipped = min(count, end - begin)
        count -= skipped
        if begin + skipped < end:
            rest.append((begin + skipped, end))
    return rest


def _cut(ranges: list[Range], size: int) -> Iterator[list[Range]]:
    while ranges:
        rest = _without_first(ranges, size)
        yield [part for bounds in ranges for part in _subtract(bounds, rest)]
        ranges = rest


def _subtract(bounds: Range, others: list[Range]) -> list[Range]:
    """What of it none of the others covers."""
    parts, begin = [], bounds[0]
    for other_begin, other_end in sorted(others):
        if other_end <= begin or other_begin >= bounds[1]:
            continue
        if other_begin > begin:
            parts.append((begin, other_begin))
        begin = max(begin, other_end)
    return [*parts, (begin, bounds[1])] if begin < bounds[1] else parts
