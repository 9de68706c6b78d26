"""Batches from their creation to their end: their files are checked, their lines run, their results are offered. Owns
the clock; which state follows which is decided in `job`, which line runs in `dispatch`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import get_args

from starlette.types import ASGIApp

from dovetail.errors import Overloaded, RequestError
from dovetail.gateway.admin.settings import Settings
from dovetail.gateway.batches import job
from dovetail.gateway.batches.check import CheckReport
from dovetail.gateway.batches.checking import FileChecker
from dovetail.gateway.batches.dispatch import LineDispatcher
from dovetail.gateway.batches.records import (
    CANCELLED,
    EXPIRED,
    Batch,
    BatchUsage,
    Counts,
    Status,
    StoredFile,
)
from dovetail.gateway.batches.running import RunningBatch, open_batch
from dovetail.gateway.batches.store import BatchStore
from dovetail.gateway.service import Service

logger = logging.getLogger("dovetail.gateway")

_SWEEP_S = 30.0
_STATE_RETRY_S = 5.0
_CLOSE_S = 5.0
_REASONS = {
    EXPIRED: "This request could not be executed before the completion window expired.",
    CANCELLED: "This request was not executed because the batch was cancelled.",
}


class BatchRunner:
    """One for a server."""

    def __init__(self, store: BatchStore, service: Service, settings: Settings) -> None:
        self.store = store
        self._service = service
        self._settings = settings
        self._lines = LineDispatcher(service, settings)
        self.checker = FileChecker(store, service, settings)
        self._checks: dict[str, asyncio.Task[CheckReport]] = {}
        self._troubles: dict[str, str] = {}  # by batch: what of it cannot be written
        self._lives: dict[str, asyncio.Task[None]] = {}  # by batch
        self._loops: list[asyncio.Task[None]] = []
        self._swept_s = float("-inf")
        self._changing = asyncio.Lock()

    def start(self, app: ASGIApp) -> None:
        """Goes on with what the last server left."""
        self._loops = [asyncio.create_task(self._lines.give_lines(app)), asyncio.create_task(self._look_at_clock())]
        for batch in self.store.batches.values():
            if not batch.is_over:
                self._begin(batch)

    async def close(self) -> None:
        """What runs is asked again by the next server."""
        tasks = [*self._loops, *self._lives.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_S)  # a disk that cannot be written is not waited for
        self.store.close()

    # What clients ask for

    async def add(self, batch: Batch) -> None:
        await self.store.put(batch)
        self._begin(batch)

    async def cancel(self, batch: Batch) -> Batch:
        cancelled = await self._change(batch.id, lambda batch: job.cancel(batch, int(time.time())))
        self._stop(batch.id)
        return cancelled

    def counts_of(self, batch: Batch) -> Counts:
        running = self._lines.running.get(batch.id)
        return batch.counts if running is None else running.counts

    def usage_of(self, batch: Batch) -> BatchUsage:
        running = self._lines.running.get(batch.id)
        return batch.usage if running is None else running.usage

    def progress_of(self, batch: Batch) -> dict[str, float | int | str | None] | None:
        """How it gets on; None: it is over."""
        if batch.is_over:
            return None
        running, trouble = self._lines.running.get(batch.id), self._troubles.get(batch.id)
        if running is None:
            return {"held_by": trouble or "its lines are being checked"}
        progress = self._lines.progress_of(running)
        return progress if trouble is None else progress | {"held_by": trouble}

    # The life of a batch

    def _begin(self, batch: Batch) -> None:
        life = self._lives[batch.id] = asyncio.create_task(self._live(batch.id))
        life.add_done_callback(lambda done: self._ended(batch.id, done))

    def _ended(self, batch_id: str, life: asyncio.Task[None]) -> None:
        self._lives.pop(batch_id, None)
        self._troubles.pop(batch_id, None)
        if not life.cancelled() and (error := life.exception()) is not None:
            logger.error("%s stopped: it goes on when the server is started again", batch_id, exc_info=error)

    async def _live(self, batch_id: str) -> None:
        if self.store.batches[batch_id].status == "validating":
            await self._check(batch_id)
        batch = self.store.batches[batch_id]
        if batch.is_over:
            return
        running = await self._open(batch)
        try:
            await self._run(running)
            await self._close(running)
        finally:
            self._lines.running.pop(batch_id, None)
            running.close()

    async def _check(self, batch_id: str) -> None:
        batch = self.store.batches[batch_id]
        check = asyncio.create_task(self._report_of(batch))
        self._checks[batch_id] = check
        try:
            await asyncio.wait([check])
        finally:
            check.cancel()
            del self._checks[batch_id]
        if check.cancelled():  # as the batch was
            return
        report, now = check.result(), int(time.time())

        def checked(batch: Batch) -> Batch:
            if batch.status != "validating":  # it was cancelled meanwhile
                return batch
            if report.problems:
                return job.fail(batch, report.problems, now)
            return job.begin(batch, report.total, report.models, now)

        batch = await self._change_when_possible(batch_id, checked)
        if batch.status == "failed":
            logger.info("%s failed: %s", batch_id, report.problems[0].message)

    async def _report_of(self, batch: Batch) -> CheckReport:
        while True:
            try:
                report = await self.checker.check_batch(batch)
                self._troubles.pop(batch.id, None)
                return report
            except Overloaded as error:
                await self._wait(batch.id, error.message)

    async def _wait(self, id: str, why: str) -> None:
        """For the disk."""
        if self._troubles.get(id) != why:
            logger.error("%s waits: %s", id, why)
        self._troubles[id] = why
        await asyncio.sleep(_STATE_RETRY_S)

    async def _open(self, batch: Batch) -> RunningBatch:
        while True:
            try:
                opened = await self.store.run(lambda: open_batch(self.store, batch))
                break
            except OSError as error:
                await self._wait(batch.id, f"its files cannot be opened: {error.strerror}")
        self._troubles.pop(batch.id, None)
        running = RunningBatch(self.store, batch, opened, self._lines.line_done)
        self._lines.running[batch.id] = running
        return running

    async def _run(self, running: RunningBatch) -> None:
        """Until all lines are answered, or it is to stop."""
        batch = running.batch
        if self.store.batches[batch.id].status != "in_progress":
            return
        self._lines.add(running, await self._names_of(batch))
        writer = asyncio.create_task(running.write_results())
        waits = [asyncio.create_task(event.wait()) for event in (running.all_done, running.is_stopping)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            running.is_stopping.set()
            for task in waits:
                task.cancel()
            await running.stop_lines()
            running.finish_writing()
            await writer
            self._lines.remove(running)

    async def _names_of(self, batch: Batch) -> tuple[str, ...]:
        """Of its models, as the server calls them."""
        names = []
        for name in batch.models:
            try:
                names.append((await self._service.models.choose(name)).name)
            except RequestError:  # gone since: its lines are answered with the error
                names.append(name or "")
        return tuple(names)

    async def _close(self, running: RunningBatch) -> None:
        """Every line is in one of its files, and the files are offered."""
        now, batch_id = int(time.time()), running.batch.id
        batch = await self._change_when_possible(
            batch_id, lambda batch: job.finalize(batch, now) if batch.status == "in_progress" else batch
        )
        running.batch = batch
        code = EXPIRED if batch.ends_as == "expired" else CANCELLED
        await running.close_lines(code, _REASONS[code])
        batch = job.finish(batch, running.counts, running.usage, int(time.time()))
        await self._until_written(batch_id, lambda: self.store.offer(*_result_files(batch, running)))
        await self._change_when_possible(batch_id, lambda _: batch)
        await self._until_written(batch_id, lambda: self.store.drop_work(batch))
        logger.info("%s %s: %s", batch.id, batch.status, batch.counts)

    async def _change(self, batch_id: str, change: Callable[[Batch], Batch]) -> Batch:
        """No other change comes between reading the record and writing it. Raises Overloaded: it is as it was."""
        async with self._changing:
            before = self.store.batches[batch_id]
            after = change(before)
            if after is not before:
                await self.store.put(after)
            return after

    async def _change_when_possible(self, batch_id: str, change: Callable[[Batch], Batch]) -> Batch:
        changed: list[Batch] = []

        async def write() -> None:
            changed.append(await self._change(batch_id, change))

        await self._until_written(batch_id, write)
        return changed[0]

    async def _until_written(self, id: str, write: Callable[[], Awaitable[None]]) -> None:
        """What concerns this batch or file."""
        while True:
            try:
                await write()
                self._troubles.pop(id, None)
                return
            except Overloaded as error:
                await self._wait(id, error.message)

    def _stop(self, batch_id: str) -> None:
        """The batch is cancelled, or its time is over."""
        if (check := self._checks.get(batch_id)) is not None:
            check.cancel()
        if (running := self._lines.running.get(batch_id)) is not None:
            running.is_stopping.set()

    # Time

    async def _look_at_clock(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for batch in list(self.store.batches.values()):
                if job.is_late(batch, time.time()):
                    await self._change_when_possible(batch.id, _expired)
                    self._stop(batch.id)
            if time.monotonic() > self._swept_s + _SWEEP_S:
                self._swept_s = time.monotonic()
                await self._drop_old(int(time.time()))

    async def _drop_old(self, now: int) -> None:
        """Files whose time is over, and batches that ended long ago."""
        keep_s = self._settings.config.batch.keep
        used = {batch.input_file for batch in self.store.batches.values() if not batch.is_over}
        for file in list(self.store.files.values()):
            if file.id not in used and now >= (file.expires_s or file.created_s + keep_s):
                await self._until_written(file.id, partial(self.store.drop_file, file.id))
        for batch in job.out_of_date(self.store.batches.values(), now, keep_s):
            await self._until_written(batch.id, partial(self.store.drop_batch, batch))

    def observe(self) -> None:
        """For the metrics, when they are read."""
        self._lines.observe()
        metrics = self._service.metrics
        statuses = Counter(batch.status for batch in self.store.batches.values())
        for status in get_args(Status):
            metrics.batches.labels(status).set(statuses[status])
        metrics.batch_storage.set(self.store.used_bytes())


def _expired(batch: Batch) -> Batch:
    """Unless it has ended since."""
    now = int(time.time())
    return job.expire(batch, now) if job.is_late(batch, now) else batch


def _result_files(batch: Batch, running: RunningBatch) -> list[StoredFile]:
    """Those that hold something."""
    assert batch.ended_s is not None
    expires_s = None if batch.output_expires_s is None else batch.ended_s + batch.output_expires_s
    named = zip((batch.output_file, batch.error_file), ("output", "error"), running.result_sizes, strict=True)
    return [
        StoredFile(
            id=id,
            owner=batch.owner,
            filename=f"{batch.id}_{what}.jsonl",
            purpose="batch_output",
            size_bytes=size,
            created_s=batch.ended_s,
            expires_s=expires_s,
            is_hidden=batch.api == "anthropic",
        )
        for id, what, size in named
        if size
    ]
