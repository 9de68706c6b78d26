"""Writes a partition to disk while it arrives from elsewhere: from the pool's memory, range by range, by a thread of
its own, so that the network does not wait for the disk. The file appears under its name when it is whole and synced.
"""

from __future__ import annotations

import os
import queue
import threading
from contextlib import suppress
from pathlib import Path

from dovetail.errors import CheckpointError, DovetailError
from dovetail.store.files import sync_folder
from dovetail.store.lease import Lease


class BlobWriter:
    """Holds a lease of its own until the file is there. `put` ranges, then `end`."""

    def __init__(self, path: Path, lease: Lease) -> None:
        self.path = path
        self.error: DovetailError | None = None
        self._lease = lease
        self._building = path.with_name(f".{path.name}.partial-{os.getpid()}")
        self._ranges: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="blob-writer", daemon=True)
        if lease.arrived_bytes:  # what another process had loaded before it died
            self._ranges.put((0, lease.arrived_bytes))
        self._thread.start()

    def put(self, begin: int, end: int) -> None:
        self._ranges.put((begin, end))

    def end(self, error: DovetailError | None) -> None:
        """No more ranges will come: all are in, or something went wrong."""
        self.error = self.error or error
        self._ranges.put(None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until the file is there; raises why it is not."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self.error is not None:
            raise self.error
        return True

    def _run(self) -> None:
        try:
            self._write()
        except OSError as error:
            self.error = CheckpointError(f"{self.path}: writing: {error.strerror}")
        finally:
            with suppress(FileNotFoundError):
                self._building.unlink()
            self._lease.close()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._building.open("wb", buffering=0) as file:
            while (taken := self._ranges.get()) is not None:
                _write_range(file.fileno(), self._lease, *taken)
            if self.error is None:
                os.fsync(file.fileno())
                self._building.chmod(0o444)
                self._building.rename(self.path)
                sync_folder(self.path.parent)


def _write_range(file: int, lease: Lease, begin: int, end: int) -> None:
    while begin < end:
        begin += os.pwritev(file, lease.pieces(begin, end), begin)
