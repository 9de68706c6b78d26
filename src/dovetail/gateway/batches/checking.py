"""The check of a file, in whatever process it is made: see `check`."""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from dovetail.errors import Overloaded, RequestError
from dovetail.gateway.admin.settings import Settings
from dovetail.gateway.batches.check import MODULE, CheckOrder, CheckReport, check_file, lines_of_models
from dovetail.gateway.batches.records import Batch, LineProblem
from dovetail.gateway.batches.store import BatchStore
from dovetail.gateway.service import Service

_SMALL_BYTES = 256 * 1024  # of a file that is checked in some hundredths of a second
_MAX_PROCESSES = 4  # that check large files; one of each key


class FileChecker:
    def __init__(self, store: BatchStore, service: Service, settings: Settings) -> None:
        self._store = store
        self._service = service
        self._settings = settings
        self._processes = asyncio.Semaphore(_MAX_PROCESSES)
        self._of_owner: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def check_batch(self, batch: Batch) -> CheckReport:
        """Its lines, and that there are the models that they name. Raises Overloaded: it cannot be done now."""
        return await self._checked(batch, self._store.content(batch.input_file), is_wrapped=False)

    async def check_requests(self, batch: Batch, body: Path) -> CheckReport:
        """Of a body that holds a list of requests, which becomes a file of lines."""
        return await self._checked(batch, body, is_wrapped=True)

    async def _checked(self, batch: Batch, file: Path, *, is_wrapped: bool) -> CheckReport:
        report = await self._check_file(batch, file, is_wrapped=is_wrapped)
        if report.trouble is not None:
            raise Overloaded(report.trouble, code="storage_full", retry_after_s=60)
        if report.problems:
            return report
        problems = await self._unknown_models(batch, file, report)
        if problems:
            self._store.index(batch.id).unlink(missing_ok=True)  # none of its lines will run
        return msgspec.structs.replace(report, problems=problems)

    async def _check_file(self, batch: Batch, file: Path, *, is_wrapped: bool) -> CheckReport:
        """In a process of its own; a small file in a thread, which takes less time than that process to begin."""
        config = self._settings.config
        order = CheckOrder(
            str(file),
            str(self._store.index(batch.id)),
            batch.endpoint,
            config.server.max_body_bytes,
            config.batch.max_lines,
            is_wrapped,
        )
        if file.stat().st_size <= _SMALL_BYTES:
            with suppress(Overloaded):  # too much is being read already
                return await self._service.models.executors.parse.run(partial(check_file, order))
        async with self._of_owner[batch.owner], self._processes:
            return await self._in_process(order)

    async def _in_process(self, order: CheckOrder) -> CheckReport:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", MODULE, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        try:
            said, _ = await child.communicate(msgspec.json.encode(order))
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        if child.returncode:
            message = "the file could not be checked: it takes more memory or time than a file may"
            return CheckReport(0, (), (LineProblem(message, "file_too_complex"),))
        return msgspec.json.decode(said, type=CheckReport)

    async def _unknown_models(self, batch: Batch, file: Path, report: CheckReport) -> tuple[LineProblem, ...]:
        """With the first line that names each."""
        wrong: dict[int, RequestError] = {}
        for number, name in enumerate(report.models):
            try:
                await self._service.models.choose(name)
            except RequestError as error:
                wrong[number] = error
        if not wrong:
            return ()
        index = self._store.index(batch.id)
        lines = await asyncio.to_thread(lines_of_models, file, index, list(wrong))
        return tuple(
            LineProblem(wrong[model].message, wrong[model].code or "model_not_found", line, "body.model")
            for line, model in lines
        )
