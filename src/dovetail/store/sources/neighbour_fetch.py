"""Brings a model that a neighbour has into this machine's store: its manifest, the files beside it, and those of its
blobs that are not here yet.

    the manifest's checksum  ->  manifest  ->  digests of files and blobs  ->  chunks, each checked as it comes in

Only the first of these has to be known from somewhere else. Everything is written under `tmp/fetch-<key>` while the
lock `source-<key>` is held, as a pull does: one fetch of a model at a time, whoever waits finds it there, `gc` removes
what nobody goes on with. What an interrupted fetch leaves is compared with the chunks' digests and kept as far as it is
right; the store sees the model when all of it is on disk.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from dovetail.errors import DamagedCheckpoint, DovetailError, SourceError
from dovetail.store.collect import collect
from dovetail.store.files import check_room
from dovetail.store.format.manifest import Manifest, Partition, blob_path, is_stored, parse_manifest, partition_files
from dovetail.store.paths import StorePaths, source_key
from dovetail.store.publish import publish, withdraw
from dovetail.store.sources.neighbour import Neighbour, NeighbourFailed

log = logging.getLogger("dovetail.store")

ROUNDS = 3  # in which every neighbour is asked before it is given up, unless one of them brought something
PAUSE_S = 0.5  # before the second round, doubled before each further one
POLL_S = 0.1
TELL_S = 5.0  # how often the log says how far it is
_SMALL_BYTES = 256 << 20  # more than any manifest or tokenizer has
_BUFFER_BYTES = 1 << 20


class FetchCancelled(DovetailError):
    """Nobody wants it any more."""


class DiskFailed(SourceError):
    """It is full, or broken."""


class Wanted(msgspec.Struct, frozen=True):
    """A model, and how its fetch is bounded."""

    name: str  # of the folder that it gets in the store
    digest: str  # its manifest's checksum
    limit_bytes: int | None = None  # of the store: models that were used longest ago make room; None = the disk's


class ModelFetch:
    """`run` it once. `done_bytes` of `total_bytes` may be looked at meanwhile, and `cancel` called, by others."""

    def __init__(self, paths: StorePaths, wanted: Wanted, neighbours: Callable[[], Sequence[Neighbour]]) -> None:
        """`neighbours`: who is there now, the one to be asked first in front."""
        self.done_bytes = 0
        self.total_bytes = 0  # 0 until the manifest is here
        self._paths = paths
        self._wanted = wanted
        self._neighbours = neighbours
        self._is_cancelled = False
        self._told_s = time.monotonic()
        self._distrusted: set[str] = set()  # sent what its digest denies
        self._key = source_key(f"neighbour:{wanted.digest}")

    def cancel(self) -> None:
        self._is_cancelled = True

    def run(self) -> Path:
        """The model's folder. Raises what a user can act on, or FetchCancelled."""
        folder = self._paths.folder(self._wanted.name)
        try:
            with self._lock():
                if not is_stored(folder):
                    self._fetch(folder)
                return folder
        except DiskFailed:
            shutil.rmtree(self._staging, ignore_errors=True)  # what is there must not fill it for others
            raise
        except OSError as error:
            why = error.strerror or error
            raise DiskFailed(f"{self._wanted.name}: cannot be written to {self._paths.root}: {why}") from error

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """As soon as nobody else of this machine fetches the same."""
        while True:
            with self._paths.try_lock(f"source-{self._key}") as is_ours:
                if is_ours:
                    yield
                    return
            self._check_wanted()
            time.sleep(POLL_S)

    @property
    def _staging(self) -> Path:
        return self._paths.staging / f"fetch-{self._key}"

    def _fetch(self, folder: Path) -> None:
        text = self._try_all(self._read_manifest)
        manifest = parse_manifest(text, f"{self._wanted.name}: manifest of a neighbour")
        files = {name: self._small(digest) for name, digest in manifest.files.items()}
        missing = self._make_room(manifest)
        self.total_bytes = manifest.size_bytes
        self.done_bytes = manifest.size_bytes - sum(partition.size for partition in missing)
        self._staging.mkdir(exist_ok=True)
        for partition in missing:
            self._blob(partition)
        written = [(self._staging / partition.digest, partition) for partition in missing]
        publish(self._paths, folder.name, manifest, files, written, encoded=text)
        shutil.rmtree(self._staging, ignore_errors=True)
        self._check_published(folder, manifest)

    def _missing(self, manifest: Manifest) -> list[Partition]:
        found = {partition.digest: partition for partition in manifest.partitions}
        return [one for one in found.values() if not _has_blob(self._paths, one)]

    def _check_published(self, folder: Path, manifest: Manifest) -> None:
        """A blob that was here when the fetch began may have been collected since."""
        try:
            partition_files(folder, manifest)
        except DamagedCheckpoint:
            withdraw(self._paths, folder.name)
            raise

    def _make_room(self, manifest: Manifest) -> list[Partition]:
        """Returns what has to be fetched: a model that makes room may take a blob along that was to be shared."""
        while True:
            missing = self._missing(manifest)
            self._make_room_for(missing)
            if self._missing(manifest) == missing:
                return missing

    def _make_room_for(self, missing: Sequence[Partition]) -> None:
        needed = sum(partition.size - _size_of(self._staging / partition.digest) for partition in missing)
        limit = self._wanted.limit_bytes
        if limit is not None:
            whole = sum(partition.size for partition in missing)
            over = whole - limit if whole > limit else collect(self._paths, limit - whole).over_limit_bytes
            if over > 0:
                used = f"its limit of {limit / 1e6:,.1f} MB leaves {over / 1e6:,.1f} MB too little"
                raise SourceError(f"{self._wanted.name}: no room in {self._paths.root}: {used}")
        check_room(self._wanted.name, self._paths.staging, needed)

    # What comes from neighbours

    def _try_all(self, ask: Callable[[Neighbour], bytes]) -> bytes:
        return next(iter(answer for answer in self._answers(ask) if answer is not None))

    def _answers(self, ask: Callable[[Neighbour], bytes]) -> Iterator[bytes | None]:
        """Of one neighbour after another, None of one that failed; raises when none is left to be asked."""
        whys: dict[str, str] = {}
        done_with: set[str] = set()
        for number in range(ROUNDS):
            left = [one for one in self._neighbours() if one.address not in self._distrusted | done_with]
            if number and left:
                self._pause(PAUSE_S * 2 ** (number - 1))
            for neighbour in left:
                self._check_wanted()
                try:
                    yield ask(neighbour)
                except NeighbourFailed as error:
                    whys[neighbour.address] = str(error)
                    done_with |= {neighbour.address} if error.is_final else set()
                    log.info("%s: %s", self._wanted.name, error)
                    yield None
        told = "; ".join(whys.values()) or "there is none that could be asked"
        raise SourceError(f"{self._wanted.name}: not to be had from any neighbour: {told}")

    def _distrust(self, neighbour: Neighbour, what: str) -> NeighbourFailed:
        self._distrusted.add(neighbour.address)
        return NeighbourFailed(f"{neighbour.address}: {what} does not match its digest", is_final=True)

    def _read_manifest(self, neighbour: Neighbour) -> bytes:
        text = neighbour.read(self._wanted.digest, _SMALL_BYTES)
        try:
            manifest = parse_manifest(text, neighbour.address)
        except DamagedCheckpoint:
            raise self._distrust(neighbour, "the manifest") from None
        if manifest.checksum != self._wanted.digest:
            raise self._distrust(neighbour, "the manifest")
        return text

    def _small(self, digest: str) -> bytes:
        def read(neighbour: Neighbour) -> bytes:
            content = neighbour.read(digest, _SMALL_BYTES)
            if hashlib.sha256(content).hexdigest() != digest:
                raise self._distrust(neighbour, digest)
            return content

        return self._try_all(read)

    def _blob(self, partition: Partition) -> None:
        path = self._staging / partition.digest
        with path.open("r+b" if path.exists() else "w+b", buffering=0) as file:
            at = self._verified_bytes(partition, file)
            self.done_bytes += at
            while at < partition.size:
                before = at
                for _ in self._answers(lambda neighbour: self._stream(neighbour, partition, file)):
                    at = os.fstat(file.fileno()).st_size
                    if at > before:  # it goes on where this neighbour stopped, with all of them again
                        break
            os.fsync(file.fileno())

    def _verified_bytes(self, partition: Partition, file: IO[bytes]) -> int:
        """What an earlier fetch left and is right, from the front; the rest is cut off."""
        at = 0
        while at < partition.size:
            self._check_wanted()
            chunk = os.pread(file.fileno(), min(partition.chunk_bytes, partition.size - at), at)
            if hashlib.sha256(chunk).hexdigest() != _chunk_digest(partition, at):
                break
            at += len(chunk)
        file.truncate(at)
        return at

    def _stream(self, neighbour: Neighbour, partition: Partition, file: IO[bytes]) -> bytes:
        """Chunks behind those that the file has, until the last one or until something goes wrong."""
        at = os.fstat(file.fileno()).st_size
        log.info("%s: bytes %d to %d come from %s", self._wanted.name, at, partition.size, neighbour.address)
        with neighbour.open(partition.digest, at) as answer:
            while at < partition.size:
                at = self._take_chunk(neighbour, partition, file, answer, at)
        return b""

    def _take_chunk(
        self, neighbour: Neighbour, partition: Partition, file: IO[bytes], answer: IO[bytes], begin: int
    ) -> int:
        end = min(begin + partition.chunk_bytes, partition.size)
        checksum, at, is_right = hashlib.sha256(), begin, False
        try:
            while at < end:
                self._check_wanted()
                piece = answer.read(min(_BUFFER_BYTES, end - at))
                if not piece:
                    raise NeighbourFailed(f"{neighbour.address}: ended at byte {at:,} of {partition.size:,}")
                self._write(file, piece, at)
                checksum.update(piece)
                at += len(piece)
                self.done_bytes += len(piece)
                self._tell()
            is_right = checksum.hexdigest() == _chunk_digest(partition, begin)
            if not is_right:
                raise self._distrust(neighbour, f"bytes {begin:,} to {end:,} of {partition.digest}")
        finally:
            if not is_right:
                file.truncate(begin)
                self.done_bytes -= at - begin
        return end

    def _write(self, file: IO[bytes], piece: bytes, at: int) -> None:
        """The disk's errors are not the neighbour's."""
        try:
            while piece:
                count = os.pwrite(file.fileno(), piece, at)
                piece, at = piece[count:], at + count
        except OSError as error:
            raise DiskFailed(f"{self._wanted.name}: {self._paths.root}: {error.strerror or error}") from error

    def _tell(self) -> None:
        now = time.monotonic()
        if now >= self._told_s + TELL_S:
            self._told_s = now
            log.info("%s: %d of %d MB are here", self._wanted.name, self.done_bytes >> 20, self.total_bytes >> 20)

    def _check_wanted(self) -> None:
        if self._is_cancelled:
            raise FetchCancelled(f"{self._wanted.name}: nobody waits for it any more")

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._check_wanted()
            time.sleep(POLL_S)


def _chunk_digest(partition: Partition, begin: int) -> str:
    return partition.chunks[begin // partition.chunk_bytes]


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _has_blob(paths: StorePaths, partition: Partition) -> bool:
    path = blob_path(paths.root, partition.digest)
    return path.is_file() and not path.is_symlink() and path.stat().st_size == partition.size
