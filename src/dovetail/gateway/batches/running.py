"""One batch in progress: its lines on disk and in work, and the one task that appends what comes of them."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from dovetail.gateway.batches.check import InputLine
from dovetail.gateway.batches.lines import LINE, Array, BatchLines
from dovetail.gateway.batches.progress import Progress
from dovetail.gateway.batches.records import Batch, BatchUsage, Counts
from dovetail.gateway.batches.results import LineError, LineResult, ResultFiles, result_id
from dovetail.gateway.batches.store import BatchStore

logger = logging.getLogger("dovetail.gateway")

_RETRY_S = 2.0  # of a disk that cannot be written
_CLOSED_TOGETHER = 2000  # lines that are told they will not be answered
_LINE = msgspec.json.Decoder(InputLine)


@dataclass(frozen=True)
class EndedLine:
    """One line's result, on its way to the disk."""

    number: int
    result: LineResult
    usage: BatchUsage


@dataclass(frozen=True)
class OpenedBatch:
    """What a batch in progress has on disk."""

    index: Array
    files: ResultFiles
    input: int
    answered: Array
    counts: Counts
    usage: BatchUsage


def open_batch(store: BatchStore, batch: Batch) -> OpenedBatch:
    """Raises OSError."""
    path = store.index(batch.id)
    index = np.memmap(path, dtype=LINE, mode="r") if path.exists() else np.zeros(0, dtype=LINE)
    files = ResultFiles(store.content(batch.output_file), store.content(batch.error_file))
    found = files.recover()
    counts = msgspec.structs.replace(found.counts, total=len(index))
    input = os.open(store.content(batch.input_file), os.O_RDONLY | os.O_CLOEXEC)
    return OpenedBatch(index, files, input, found.numbers, counts, found.usage)


class RunningBatch:
    """Results count when they are on disk. While they cannot be written nothing new begins (`problem`)."""

    def __init__(
        self, store: BatchStore, batch: Batch, opened: OpenedBatch, on_done: Callable[[RunningBatch, EndedLine], None]
    ) -> None:
        self.batch = batch
        self.counts, self.usage = opened.counts, opened.usage
        self.lines = BatchLines(opened.index, max(len(batch.models), 1))
        self.lines.note_done(opened.answered)
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.attempts: Counter[int] = Counter()  # by line: how often a worker failed with it
        self.problem: str | None = None
        self.refusal: str | None = None  # what the server said to the last line that has to be asked again
        self.progress = Progress(time.monotonic())
        self.is_stopping = asyncio.Event()  # cancelled or expired
        self.all_done = asyncio.Event()
        self._store = store
        self._opened = opened
        self._on_done = on_done
        self._ended: list[EndedLine] = []
        self._has_ended = asyncio.Event()
        self._is_closed = False
        self._look_done()

    async def read_line(self, number: int) -> InputLine:
        place = self._opened.index[number]
        length, offset = int(place["length"]), int(place["offset"])
        text = await asyncio.to_thread(os.pread, self._opened.input, length, offset)
        return _LINE.decode(text)

    def add(self, ended: EndedLine) -> None:
        self._ended.append(ended)
        self._has_ended.set()

    async def write_results(self) -> None:
        """Until `finish_writing`, and all that had ended then."""
        while self._ended or not self._is_closed:
            await self._has_ended.wait()
            await self._write()

    def finish_writing(self) -> None:
        self._is_closed = True
        self._has_ended.set()

    async def _write(self) -> None:
        ended, self._ended = self._ended, []
        self._has_ended.clear()
        if not ended:
            return
        await self._append([one.result for one in ended])
        now = time.monotonic()
        for one in ended:
            kind = "completed" if one.result.is_answer else "failed"
            self.counts = msgspec.structs.replace(self.counts, **{kind: getattr(self.counts, kind) + 1})
            self.usage += one.usage
            self.progress.add(one.usage.total, now)
            self._on_done(self, one)
        self._look_done()

    async def _append(self, results: list[LineResult]) -> None:
        """Until it can be done."""
        while True:
            try:
                await self._store.run(lambda: self._opened.files.append(results))
            except OSError as error:
                if self.problem is None:
                    logger.error("%s: results cannot be written: %s", self.batch.id, error.strerror)
                self.problem = f"results cannot be written: {error.strerror}"
                await asyncio.sleep(_RETRY_S)
            else:
                self.problem = None
                return

    async def close_lines(self, code: str, message: str) -> None:
        """Those that were not answered get a line that says so."""
        left = self.lines.unanswered()
        for first in range(0, len(left), _CLOSED_TOGETHER):
            part = left[first : first + _CLOSED_TOGETHER]
            results = await self._store.run(lambda part=part: list(self._closed(part, code, message)))  # type: ignore[misc]
            await self._append(results)
            name = "expired" if self.batch.ends_as == "expired" else "cancelled"
            self.counts = msgspec.structs.replace(self.counts, **{name: getattr(self.counts, name) + len(part)})

    def _closed(self, numbers: Array, code: str, message: str) -> Iterator[LineResult]:
        for number in numbers:
            place = self._opened.index[number]
            line = _LINE.decode(os.pread(self._opened.input, int(place["length"]), int(place["offset"])))
            yield LineResult(result_id(self.batch.id, int(number)), line.custom_id, None, LineError(code, message))

    def _look_done(self) -> None:
        if self.num_ended == len(self.lines):
            self.all_done.set()

    @property
    def num_ended(self) -> int:
        return self.counts.ended

    @property
    def result_sizes(self) -> tuple[int, int]:
        return self._opened.files.sizes

    async def stop_lines(self) -> None:
        """None of them runs afterwards."""
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        self._opened.files.close()
        os.close(self._opened.input)
