"""Models in the store's own format in an object store, under the same names as on disk.

    s3://bucket/prefix/models/<name>/manifest.json   and the files beside it: small, read first
    s3://bucket/prefix/blobs/<aa>/<digest>           by ranges, each chunk compared with its checksum

What moves the bytes is `blob_download`. Where there is a host pool they go there first, and the model can be served as
soon as it has its place: its folder then holds `arriving.json`, the manifest of a model that is still on its way, and
`manifest.json` once every byte is on disk. The caller holds the lock of the source meanwhile.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from dovetail.errors import DamagedCheckpoint, OutOfMemory
from dovetail.store.files import check_room, write_file
from dovetail.store.format.late_chunks import late_chunks
from dovetail.store.format.manifest import (
    ARRIVING,
    MANIFEST,
    Manifest,
    Partition,
    blob_path,
    encode_manifest,
    is_stored,
    parse_manifest,
    partition_files,
    read_manifest,
)
from dovetail.store.host_pool.lease import Arrival, Lease
from dovetail.store.host_pool.pool import HostPool
from dovetail.store.paths import StorePaths
from dovetail.store.publish import digests_of, publish
from dovetail.store.sources.blob_download import BlobDownload
from dovetail.store.sources.object_store import Bucket, RetryPolicy, is_object_address

log = logging.getLogger("dovetail.store")

_SMALL_BYTES = 256 << 20  # more than any manifest or tokenizer has
PATIENT = RetryPolicy(attempts=20)  # about two minutes without a single answer

Report = Callable[[str, int, int], None]  # stage, bytes done, bytes in all


class EarlyServing(NamedTuple):
    """How a model is served while it downloads."""

    pool: HostPool
    on_servable: Callable[[str], None]  # the model's name: its folder can be opened from now on


class BucketModel(NamedTuple):
    """A model found in a bucket: everything but its weights."""

    bucket: Bucket
    name: str
    manifest: Manifest
    files: dict[str, bytes]


def find_model(url: str, retries: RetryPolicy = PATIENT) -> BucketModel | None:
    """None where the address holds no model of this format (an HF folder or a GGUF file, perhaps)."""
    address = _split(url)
    if address is None:
        return None
    root, name = address
    bucket = Bucket(root, retries)
    if not bucket.has(f"models/{name}/{MANIFEST}"):
        return None
    origin = f"{bucket.url}/models/{name}"
    manifest = parse_manifest(bucket.read_all(f"models/{name}/{MANIFEST}", _SMALL_BYTES), f"{origin}/{MANIFEST}")
    files = {file: bucket.read_all(f"models/{name}/{file}", _SMALL_BYTES) for file in manifest.files}
    for file, digest in digests_of(files).items():
        if digest != manifest.files[file]:
            raise DamagedCheckpoint(f"{origin}/{file}: does not match its checksum")
    return BucketModel(bucket, name, manifest, files)


def is_model_address(url: str) -> bool:
    """Whether a model of this format lies there: one small request."""
    address = _split(url)
    return address is not None and Bucket(address[0]).has(f"models/{address[1]}/{MANIFEST}")


def upload_model(folder: Path, url: str, report: Report, retries: RetryPolicy = PATIENT) -> int:
    """Copy a model or adapter of the store to `url` (s3://bucket/prefix), the manifest last: whoever finds it there
    finds all of it. Blobs that are there already stay. Returns the bytes that were sent."""
    bucket, manifest = Bucket(url, retries), read_manifest(folder)
    sent = done = 0
    for path, partition in partition_files(folder, manifest):
        target = blob_path(Path(), partition.digest).as_posix()
        if not bucket.has(target):
            bucket.write(target, path)
            sent += partition.size
        done += partition.size
        report("upload", done, manifest.size_bytes)
    for file in (*manifest.files, MANIFEST):
        bucket.write(f"models/{folder.name}/{file}", (folder / file).read_bytes())
    return sent


def has_form_of_store(url: str) -> bool:
    """By its form alone; what lies there is another matter."""
    return _split(url) is not None


class ModelDownload:
    """`run` it once. An interrupted download leaves its files in `staging`; the next one goes on from there."""

    def __init__(
        self,
        paths: StorePaths,
        name: str,
        source: str,
        found: BucketModel,
        staging: Path,
        report: Report | None = None,
        *,
        force: bool = False,
    ) -> None:
        """`force`: blobs that are on disk already are replaced."""
        self._paths = paths
        self._force = force
        self._folder = paths.folder(name)
        self._found = found
        self._staging = staging
        self._report = report or (lambda stage, done, total: None)
        self._manifest = msgspec.structs.replace(found.manifest, source=source, created=int(time.time()))
        self._encoded = encode_manifest(self._manifest)

    def run(self, early: EarlyServing | None = None) -> None:
        missing = self._missing()
        self._staging.mkdir(parents=True, exist_ok=True)
        with ExitStack() as undo:
            leases = self._reserve(early.pool, missing, undo) if early is not None else None
            if leases is None:
                check_room(self._found.name, self._staging, sum(one.size for one in missing) - self._kept_bytes())
            elif early is not None:
                self._announce(undo)
                early.on_servable(self._folder.name)
            finish = partial(self._publish, beside=leases is not None)
            late = late_chunks(self._manifest)
            BlobDownload(self._found.bucket, self._staging, missing, leases, self._report, finish, late).run()
            shutil.rmtree(self._staging, ignore_errors=True)

    def _missing(self) -> list[Partition]:
        found = {partition.digest: partition for partition in self._manifest.partitions}
        return [one for one in found.values() if self._force or not _is_on_disk(self._paths, one)]

    def _kept_bytes(self) -> int:
        """Space that an earlier attempt has taken already."""
        return sum(path.stat().st_blocks * 512 for path in self._staging.iterdir())

    def _reserve(self, pool: HostPool, missing: list[Partition], undo: ExitStack) -> list[Lease] | None:
        """None where the model cannot be served before it is on disk."""
        if not missing or self._manifest.spec is None or (self._folder.exists() and not self._is_abandoned()):
            return None
        try:
            leases = pool.try_reserve([(one.digest, one.size) for one in missing])
        except OutOfMemory as error:
            log.info("%s is served when it is on disk: %s", self._folder.name, error)
            return None
        if leases is None:
            log.info("%s is served when it is on disk: the host pool is in use", self._folder.name)
            return None
        for lease in leases:
            undo.callback(lease.close)
            _become_loader(lease)
        return leases

    def _is_abandoned(self) -> bool:
        """What a download that was killed has left."""
        return (self._folder / ARRIVING).is_file() and not is_stored(self._folder)

    def _announce(self, undo: ExitStack) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        undo.callback(self._withdraw)
        for file, content in self._found.files.items():
            write_file(self._folder / file, content)
        write_file(self._folder / ARRIVING, self._encoded)

    def _withdraw(self) -> None:
        if not is_stored(self._folder):
            shutil.rmtree(self._folder, ignore_errors=True)

    def _publish(self, files: Sequence[tuple[Path, Partition]], *, beside: bool) -> None:
        name, encoded = self._folder.name, self._encoded
        publish(
            self._paths,
            name,
            self._manifest,
            self._found.files,
            files,
            renew_blobs=self._force,
            beside=beside,
            encoded=encoded,
        )
        (self._folder / ARRIVING).unlink(missing_ok=True)


def _become_loader(lease: Lease) -> None:
    """Another process may have begun with it, and died."""
    while not lease.is_loader:
        arrival = lease.wait(None, timeout_s=0.1)
        if arrival is Arrival.HERE or (arrival is Arrival.ABANDONED and lease.claim()):
            return


def _is_on_disk(paths: StorePaths, partition: Partition) -> bool:
    path = blob_path(paths.root, partition.digest)
    return path.is_file() and not path.is_symlink() and path.stat().st_size == partition.size


def _split(url: str) -> tuple[str, str] | None:
    scheme, colon, path = url.rstrip("/").partition("://")
    root, _, name = path.rpartition("/models/")
    is_model = is_object_address(url) and root and name and "/" not in name
    return (f"{scheme}{colon}{root}", name) if is_model else None
