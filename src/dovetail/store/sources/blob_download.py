r"""Blobs on their way from a bucket: into the host pool, where they can be used at once, and onto the disk.

    bucket --ranged GETs--> host pool --a thread of its own--> disk      with a pool: the network waits for no disk
    bucket --ranged GETs---------------------------------------> disk      without one

Chunks are asked for in the order of the file, so that the first layers come first; late chunks (`format.late_chunks`)
come after all others, those that a reader needs before the rest. Each is compared with its checksum before it counts,
one that an interrupted download has left on disk as well. A disk that cannot be written to stops
nothing while the pool holds the bytes: writing is tried again until it succeeds.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

from dovetail.errors import DamagedCheckpoint, DovetailError
from dovetail.store.files import sync_folder
from dovetail.store.format.manifest import Partition, blob_path
from dovetail.store.host_pool.lease import Lease
from dovetail.store.sources.object_store import Bucket

log = logging.getLogger("dovetail.store")

REQUESTS = 8  # at once
LATE_REQUESTS = 2  # at once, of late chunks: one that is needed now shares the line with one other
WAITING = "waiting for the disk"  # a stage that may last: everything is in memory
_STEP_BYTES = 16 << 20  # of one request
_REPORT_S = 0.2
_RETRY_S = 5.0  # until a disk that was full is tried again

Report = Callable[[str, int, int], None]  # stage, bytes done, bytes in all


class _Blob:
    """One partition. Any thread may call `move`; `write` and `sync` are one thread's."""

    def __init__(self, bucket: Bucket, partition: Partition, path: Path, lease: Lease | None) -> None:
        self.partition = partition
        self.path = path
        self.lease = lease
        self._bucket = bucket
        self._remote = blob_path(Path(), partition.digest).as_posix()
        self._kept_bytes = path.stat().st_size if path.exists() else 0  # by an earlier attempt; unchecked
        self._file: int | None = None
        self._lock = threading.Lock()
        self._landed: set[int] = set()
        self._frontier = 0  # every chunk before this one is in memory
        if lease is not None:
            size = partition.size if not lease.is_loader else lease.arrived_bytes
            self._frontier = len(partition.chunks) if size == partition.size else size // partition.chunk_bytes
            if self.has_marks:
                self._landed = {index for index in self.missing if lease.has_chunk(index)}

    @property
    def has_marks(self) -> bool:
        """The pool knows of each chunk whether it is in."""
        return self.lease is not None and self.lease.pool.chunk_bytes == self.partition.chunk_bytes

    @property
    def missing(self) -> list[int]:
        """Chunks that are still to come."""
        return [index for index in range(self._frontier, len(self.partition.chunks)) if index not in self._landed]

    @property
    def arrived(self) -> list[int]:
        """Chunks that another process had brought into the pool before it died."""
        return [*range(self._frontier), *sorted(self._landed)]

    def is_asked(self, index: int) -> bool:
        return self.lease is not None and self.lease.is_asked(index)

    def bounds(self, index: int) -> tuple[int, int]:
        begin = index * self.partition.chunk_bytes
        return begin, min(begin + self.partition.chunk_bytes, self.partition.size)

    def move(self, index: int, is_wanted: Callable[[], bool]) -> bool:
        """Bring one chunk in; True if the disk has it already."""
        begin, end = self.bounds(index)
        is_kept = self._has_kept(index)
        checksum = hashlib.sha256()
        if self.lease is not None:
            self.lease.populate(begin, end)
        for at in range(begin, end, _STEP_BYTES) if self.lease is not None or not is_kept else ():
            until = min(at + _STEP_BYTES, end)
            data = self._read_kept(at, until) if is_kept else self._get(at, until, is_wanted)
            checksum.update(data)
            self._put(at, data)
        if not is_kept and checksum.hexdigest() != self.partition.chunks[index]:
            raise DamagedCheckpoint(f"{self._origin}: bytes {begin:,} to {end:,} do not match their checksum")
        if self.lease is not None:
            self._land(index, self.lease)
        return is_kept or self.lease is None

    def write(self, index: int) -> None:
        """From the pool."""
        assert self.lease is not None
        at, end = self.bounds(index)
        for piece in self.lease.pieces(at, end):
            at = self._write(at, piece)

    def sync(self) -> None:
        if self.path.exists():  # else it is in its place already
            os.fsync(self._opened())
            sync_folder(self.path.parent)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)

    @property
    def _origin(self) -> str:
        return f"{self._bucket.url}/{self._remote}"

    def _opened(self) -> int:
        with self._lock:
            if self._file is None:
                file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
                try:
                    os.posix_fallocate(file, 0, self.partition.size)  # a full disk is noticed now, not at the end
                    os.ftruncate(file, self.partition.size)
                except OSError:
                    os.close(file)
                    raise
                self._file = file
            return self._file

    def _get(self, begin: int, end: int, is_wanted: Callable[[], bool]) -> memoryview:
        return self._bucket.read_while(is_wanted, self._remote, begin, end)

    def _put(self, at: int, data: memoryview) -> None:
        if self.lease is None:
            self._write(at, data)
            return
        done = 0
        for piece in self.lease.pieces(at, at + len(data)):
            piece[:] = data[done : done + len(piece)]
            done += len(piece)

    def _write(self, at: int, data: memoryview) -> int:
        """Returns where it ended."""
        file = self._opened()
        while data:
            written = os.pwrite(file, data, at)
            at, data = at + written, data[written:]
        return at

    def _has_kept(self, index: int) -> bool:
        begin, end = self.bounds(index)
        if end > self._kept_bytes:
            return False
        checksum = hashlib.sha256()
        with suppress(OSError):
            for at in range(begin, end, _STEP_BYTES):
                checksum.update(self._read_kept(at, min(at + _STEP_BYTES, end)))
        return checksum.hexdigest() == self.partition.chunks[index]

    def _read_kept(self, begin: int, end: int) -> memoryview:
        with self.path.open("rb") as file:
            file.seek(begin)
            return memoryview(file.read(end - begin))

    def settle(self) -> None:
        """Count what another process has marked as well; all of it may be in."""
        if self.lease is not None and self.lease.is_loader:
            with self._lock:
                self._advance(self.lease)

    def _land(self, index: int, lease: Lease) -> None:
        with self._lock:
            self._landed.add(index)
            if self.has_marks:
                lease.mark(index)
            self._advance(lease)

    def _advance(self, lease: Lease) -> None:
        """Under the lock."""
        while self._frontier in self._landed:
            self._landed.remove(self._frontier)
            self._frontier += 1
        lease.advance(min(self._frontier * self.partition.chunk_bytes, self.partition.size))
        if self._frontier == len(self.partition.chunks):
            lease.commit()


class BlobDownload:
    """`run` it once: it returns when every byte is on disk and `finish`, which gets the files, has used them.
    `leases`: of the pool, one for each partition. `late`: chunks of the only partition that come last."""

    def __init__(
        self,
        bucket: Bucket,
        folder: Path,
        partitions: Sequence[Partition],
        leases: Sequence[Lease] | None,
        report: Report,
        finish: Callable[[Sequence[tuple[Path, Partition]]], None],
        late: range = range(0),
    ) -> None:
        self._finish = finish
        self._late = late
        given = leases if leases is not None else [None] * len(partitions)
        self._blobs = [
            _Blob(bucket, partition, folder / partition.digest, lease)
            for partition, lease in zip(partitions, given, strict=True)
        ]
        self._has_pool = leases is not None
        self._report = report
        self._total = sum(partition.size for partition in partitions)
        self._lock = threading.Lock()
        self._in_bytes = 0  # here, checked
        self._disk_bytes = 0
        self._is_stopped = threading.Event()
        self._to_write: queue.SimpleQueue[tuple[_Blob, int] | None] = queue.SimpleQueue()
        self._trouble = ""  # why the disk cannot be written to
        self._error: DovetailError | None = None  # of the writing thread

    def run(self) -> None:
        threads = ThreadPoolExecutor(REQUESTS, thread_name_prefix="bucket")
        writer = threading.Thread(target=self._write_all, name="blob-writer", daemon=True)
        try:
            writer.start()
            self._download(threads)
            self._to_write.put(None)
            while writer.is_alive():
                writer.join(_REPORT_S)
                self._tell()
            if self._error is not None:
                raise self._error
            if not self._has_pool:
                self._complete()
        finally:
            self._is_stopped.set()
            self._to_write.put(None)
            threads.shutdown(cancel_futures=True)
            writer.join()
            for blob in self._blobs:
                blob.close()

    def _complete(self) -> None:
        for blob in self._blobs:
            blob.sync()
        self._finish([(blob.path, blob.partition) for blob in self._blobs if blob.path.exists()])

    def _until_written(self, write: Callable[[], None]) -> None:
        """While the pool holds the bytes, a disk that is full may take its time."""
        while True:
            try:
                write()
                self._trouble = ""
                return
            except OSError as error:
                if not self._has_pool:
                    raise
                self._be_troubled(error)
            if self._is_stopped.wait(_RETRY_S):
                return

    def _download(self, threads: ThreadPoolExecutor) -> None:
        for blob in self._blobs:
            for index in blob.arrived:
                self._count(blob, index, on_disk=False)
            blob.settle()
        late = self._late if len(self._blobs) == 1 and self._blobs[0].has_marks else range(0)
        missing = sorted((index, rank) for rank, blob in enumerate(self._blobs) for index in blob.missing)
        left = {threads.submit(self._move, self._blobs[rank], index) for index, rank in missing if index not in late}
        while left:
            left = self._wait(left, FIRST_EXCEPTION)
        if late:
            self._download_late(threads, self._blobs[0], [index for index, _ in missing if index in late])

    def _download_late(self, threads: ThreadPoolExecutor, blob: _Blob, missing: list[int]) -> None:
        """What a reader needs now goes first."""
        left: set[Future[None]] = set()
        while missing or left:
            while missing and len(left) < LATE_REQUESTS:
                index = next((one for one in missing if blob.is_asked(one)), missing[0])
                missing.remove(index)
                left.add(threads.submit(self._move, blob, index))
            left = self._wait(left, FIRST_COMPLETED)

    def _wait(self, futures: set[Future[None]], until: str) -> set[Future[None]]:
        """For a moment; returns those that go on."""
        done, left = wait(futures, _REPORT_S, until)
        for future in done:
            future.result()
        self._tell()
        return left

    def _move(self, blob: _Blob, index: int) -> None:
        self._count(blob, index, on_disk=blob.move(index, lambda: not self._is_stopped.is_set()))

    def _count(self, blob: _Blob, index: int, *, on_disk: bool) -> None:
        begin, end = blob.bounds(index)
        with self._lock:
            self._in_bytes += end - begin
            self._disk_bytes += end - begin if on_disk else 0
        if not on_disk:
            self._to_write.put((blob, index))

    def _write_all(self) -> None:
        """The pool's chunks, as they come."""
        while (taken := self._to_write.get()) is not None and not self._is_stopped.is_set():
            self._write(*taken)
        if self._has_pool and not self._is_stopped.is_set():
            try:
                self._until_written(self._complete)
            except DovetailError as error:
                self._error = error

    def _write(self, blob: _Blob, index: int) -> None:
        self._until_written(lambda: blob.write(index))
        begin, end = blob.bounds(index)
        with self._lock:
            self._disk_bytes += end - begin

    def _tell(self) -> None:
        with self._lock:
            done, on_disk = self._in_bytes, self._disk_bytes
        if self._trouble and done == self._total:
            self._report(WAITING, on_disk, self._total)
        else:
            self._report("download", done, self._total)

    def _be_troubled(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        if reason != self._trouble:
            folder = self._blobs[0].path.parent if self._blobs else ""
            log.warning("%s cannot be written to (%s): the model is kept in memory until it can", folder, reason)
        self._trouble = reason
