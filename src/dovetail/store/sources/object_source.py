"""Downloads a model from an object store: an HF folder below a prefix, or one GGUF file. Converts nothing.

Several ranges are on their way at once and are written in order, so that a file's length is how far it has come: a
download that was interrupted goes on from there, unless the object has changed since.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit

from dovetail.errors import SourceError
from dovetail.store.files import check_room
from dovetail.store.sources.object_store import Bucket, ObjectInfo, RetryPolicy

FOLDER_FILES = (".json", ".safetensors", ".model", ".jinja")  # never pickles
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_RANGE_BYTES = 8 << 20
_IN_FLIGHT = 4

Report = Callable[[str, int, int], None]  # stage, bytes done, bytes in all


class _File(NamedTuple):
    name: str
    info: ObjectInfo


def fetch_objects(url: str, folder: Path, report: Report, retries: RetryPolicy | None = None) -> tuple[Path, str]:
    """(the folder or file, what it is called)."""
    _check_address(url)
    parent, _, last = url.rstrip("/").rpartition("/")
    is_file = last.endswith(".gguf")
    bucket = Bucket(parent if is_file else url.rstrip("/"), retries)
    files = [_File(name, bucket.info(name)) for name in ([last] if is_file else _names(bucket))]
    target = folder / "model"
    target.mkdir(exist_ok=True)
    total = sum(file.info.size_bytes for file in files)
    check_room(url, target, total - _present(target, files))
    done = 0
    for file in files:
        for count in _download(bucket, file, target):
            report("download", done + count, total)
        done += file.info.size_bytes
    lone = next((file.name for file in files if file.name.endswith(".gguf")), None)
    return (target / lone, PurePosixPath(lone).stem) if lone is not None else (target, last)


def _check_address(url: str) -> None:
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        # Not repeated here: it may be a secret.
        raise SourceError(f"{parts.scheme}://…: expected {parts.scheme}://bucket/path; credentials go in environment")
    if not parts.netloc or ".." in parts.path.split("/"):
        raise SourceError(f"{url}: expected {parts.scheme}://bucket/path")


def _names(bucket: Bucket) -> list[str]:
    """Of the files that make a model; whatever lies deeper is none of it."""
    here = [name for name in bucket.names() if "/" not in name]
    weights = [name for name in here if name.endswith(".safetensors")]
    ggufs = [name for name in here if name.endswith(".gguf")]
    if not weights and len(ggufs) == 1:
        return ggufs
    if not weights and ggufs:
        raise SourceError(f"{bucket.url}: several models ({', '.join(ggufs)}); name one")
    if not weights:
        pickles = [name for name in here if name.endswith(_PICKLES)]
        hint = f"; weights only as pickle ({pickles[0]}), which is never read" if pickles else ""
        raise SourceError(f"{bucket.url}: neither safetensors nor a GGUF file there{hint}")
    return sorted(name for name in here if name.endswith(FOLDER_FILES))


def _present(target: Path, files: list[_File]) -> int:
    """Bytes of an earlier attempt."""
    whole = sum((target / file.name).stat().st_size for file in files if (target / file.name).exists())
    return whole + sum(path.stat().st_size for path in target.glob(".*.part"))


def _download(bucket: Bucket, file: _File, target: Path) -> Iterator[int]:
    """Yields how many bytes are there."""
    path, size = target / file.name, file.info.size_bytes
    part = target / f".{file.name}.{hashlib.sha256(file.info.version.encode()).hexdigest()[:16]}.part"
    for other in target.glob(f".{file.name}.*.part"):
        if other != part:
            other.unlink()  # of an object that has changed
    if not path.exists():
        with part.open("ab") as output:
            for data in _ranges(bucket, file.name, output.tell(), size):
                output.write(data)
                yield output.tell()
        if bucket.info(file.name) != file.info:
            part.unlink()
            raise SourceError(f"{bucket.url}/{file.name}: changed while it was read; pull again")
        part.rename(path)
    yield size


def _ranges(bucket: Bucket, name: str, begin: int, size: int) -> Iterator[memoryview]:
    """In order, a few of them asked for ahead."""
    starts = iter(range(begin, size, _RANGE_BYTES))
    with ThreadPoolExecutor(_IN_FLIGHT) as pool:
        waiting: deque[Future[memoryview]] = deque()
        try:
            while True:
                while len(waiting) < _IN_FLIGHT and (start := next(starts, None)) is not None:
                    waiting.append(pool.submit(bucket.read, name, start, min(start + _RANGE_BYTES, size)))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
