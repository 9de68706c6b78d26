"""Files and batches on disk, beside what else a server keeps: records in SQLite, contents as files of their own.

    batches.db     records; each change is synced before it counts
    files/ID       contents of files, and answers of running batches under the ids that they will have
    work/ID.…      uploads that have not ended, and indexes of lines
    lock           held by the one server that has the folder

Records are in memory, too: reading them waits for no disk. One thread writes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from dovetail.cluster.durable import lock_folder
from dovetail.errors import ConfigError, Overloaded, RecordNotFound
from dovetail.gateway.batches.lines import PART
from dovetail.gateway.batches.records import Batch, StoredFile

logger = logging.getLogger("dovetail.gateway")

Result = TypeVar("Result")
_TABLES = ("files", "batches")
_MIN_FREE_BYTES = 64 << 20  # that uploads leave on the disk, for answers


class BatchStore:
    """Whoever has one is the only server that works on its batches."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError: the folder cannot be used, or another server has it."""
        self.folder = folder = folder.expanduser().absolute()
        try:
            for part in (folder, folder / "files", folder / "work"):
                part.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"batch.folder: {folder}: {error.strerror}") from error
        self._lock = lock_folder(folder, "batch.folder")
        try:
            self._database = self._open(folder / "batches.db")
            self.files = {one.id: one for one in self._read("files", StoredFile)}
            self.batches = {one.id: one for one in self._read("batches", Batch)}
        except (sqlite3.Error, msgspec.DecodeError) as error:
            os.close(self._lock)
            raise ConfigError(f"batch.folder: {folder / 'batches.db'}: {error}") from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._sweep()

    def _open(self, file: Path) -> sqlite3.Connection:
        database = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        for table in _TABLES:
            database.execute(
                f"CREATE TABLE IF NOT EXISTS {table} (serial INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, "
                "record BLOB)"
            )
        return database

    def _read(self, table: str, kind: type[Result]) -> Iterable[Result]:
        rows = self._database.execute(f"SELECT record FROM {table} ORDER BY serial")
        return [msgspec.json.decode(record, type=kind) for (record,) in rows]

    def _sweep(self) -> None:
        """What a server that was killed left of uploads and of what it was deleting."""
        kept = {name for batch in self.batches.values() for name in (batch.output_file, batch.error_file)}
        for path in (self.folder / "files").iterdir():
            if path.name not in self.files and path.name not in kept:
                path.unlink(missing_ok=True)
        for path in (self.folder / "work").iterdir():
            if path.stem not in self.batches:
                path.unlink(missing_ok=True)

    # Contents

    def content(self, file_id: str) -> Path:
        return self.folder / "files" / file_id

    def index(self, batch_id: str) -> Path:
        return self.folder / "work" / f"{batch_id}.index"

    def new_upload(self) -> Path:
        return self.folder / "work" / f"{secrets.token_hex(12)}.upload"

    def check_room(self, size_bytes: int) -> None:
        """Raises Overloaded."""
        free = shutil.disk_usage(self.folder).free
        if free - size_bytes < _MIN_FREE_BYTES:
            raise Overloaded(
                f"the disk of {self.folder} has {free >> 20} MiB left", code="storage_full", retry_after_s=60
            )

    def used_bytes(self, owner: str | None = None) -> int:
        """None: everyone's."""
        found = (one.size_bytes for one in self.files.values() if owner is None or one.owner == owner)
        return sum(found)

    # Records

    def file(self, file_id: str, owner: str) -> StoredFile:
        found = self.files.get(file_id)
        if found is None or found.owner != owner or found.is_hidden:
            raise RecordNotFound(f"no such file: '{file_id[:100]}'", param="file_id", code="file_not_found")
        return found

    def batch(self, batch_id: str, owner: str) -> Batch:
        found = self.batches.get(batch_id)
        if found is None or found.owner != owner:
            raise RecordNotFound(f"no such batch: '{batch_id[:100]}'", param="batch_id", code="batch_not_found")
        return found

    async def add_file(self, file: StoredFile, content: Path) -> None:
        """The content, which is synced, becomes the file's. Raises Overloaded."""

        def work() -> None:
            content.replace(self.content(file.id))
            _sync_folder(self.folder / "files")
            self._put("files", file.id, file)

        await self._write(work)
        self.files[file.id] = file

    async def offer(self, *files: StoredFile) -> None:
        """Files whose contents are in their places."""
        for file in files:
            await self._write(lambda file=file: self._put("files", file.id, file))  # type: ignore[misc]
            self.files[file.id] = file

    async def put(self, batch: Batch) -> None:
        """Raises Overloaded: it is as it was."""
        await self._write(lambda: self._put("batches", batch.id, batch))
        self.batches[batch.id] = batch

    async def drop_file(self, file_id: str) -> None:
        def work() -> None:
            self._database.execute("DELETE FROM files WHERE id = ?", (file_id,))
            self.content(file_id).unlink(missing_ok=True)

        await self._write(work)
        self.files.pop(file_id, None)

    async def drop_work(self, batch: Batch) -> None:
        """What a batch that has ended needs no longer: the index, files without a line, a body that was no file."""

        def work() -> None:
            for path in (self.index(batch.id), self.index(batch.id).with_suffix(PART)):
                path.unlink(missing_ok=True)
            for file_id in (batch.output_file, batch.error_file):
                if file_id not in self.files:
                    self.content(file_id).unlink(missing_ok=True)

        await self._write(work)
        if batch.api == "anthropic":
            await self.drop_file(batch.input_file)

    async def drop_batch(self, batch: Batch) -> None:
        """With the index of its lines. Its files are files like others."""

        def work() -> None:
            self._database.execute("DELETE FROM batches WHERE id = ?", (batch.id,))
            self.index(batch.id).unlink(missing_ok=True)

        await self._write(work)
        self.batches.pop(batch.id, None)

    def _put(self, table: str, id: str, record: msgspec.Struct) -> None:
        text = msgspec.json.encode(record)
        changed = self._database.execute(f"UPDATE {table} SET record = ? WHERE id = ?", (text, id)).rowcount
        if not changed:
            self._database.execute(f"INSERT INTO {table} (id, record) VALUES (?, ?)", (id, text))

    async def run(self, work: Callable[[], Result]) -> Result:
        """In the thread that writes."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _write(self, work: Callable[[], None]) -> None:
        try:
            await self.run(work)
        except (sqlite3.Error, OSError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise Overloaded(
                f"{self.folder} cannot be written: {why}", code="storage_full", retry_after_s=10
            ) from error

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._database.close()
        os.close(self._lock)


def _sync_folder(folder: Path) -> None:
    """A name in it outlives the machine's end, too."""
    number = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system that cannot
            os.fsync(number)
    finally:
        os.close(number)
