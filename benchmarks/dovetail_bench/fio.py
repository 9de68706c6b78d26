"""What the disk gives, as fio measures it: direct reads of the very file that is loaded, the best of several settings.

Without fio there is a reference of our own, under another name: several threads of direct reads into one small buffer
each, so that nothing but the disk takes time.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from dovetail.errors import DovetailError

HOW_TO_GET_FIO = "fio is not installed (Debian, Ubuntu: apt-get install fio)"
_MIB = 2**20
_SMALL_BYTES = 64 * _MIB
_RAW_THREADS = 8
_RAW_BLOCK_BYTES = 4 * _MIB


class FioFailed(DovetailError):
    pass


class Setting(msgspec.Struct, frozen=True):
    engine: str
    block_bytes: int
    depth: int
    jobs: int
    direct: bool = True

    def __str__(self) -> str:
        return f"{self.engine} {self.block_bytes // _MIB}M ×{self.depth} jobs {self.jobs}"


class Read(msgspec.Struct, frozen=True):
    bytes: int
    seconds: float


# (block in MiB, depth, jobs): one deep queue, several shallow ones, and blocks as large as a chunk of ours.
_SHAPES = ((1, 32, 1), (1, 16, 2), (1, 8, 4), (4, 8, 1), (4, 4, 4), (16, 4, 1), (16, 2, 4), (16, 1, 8))
DIRECT_SETTINGS = tuple(
    Setting(engine, block * _MIB, depth, jobs) for engine in ("io_uring", "libaio") for block, depth, jobs in _SHAPES
)
# From the page cache there is nothing to wait for: the jobs are the processor's cores.
CACHED_SETTINGS = tuple(Setting("psync", block * _MIB, 1, jobs, direct=False) for block in (1, 4) for jobs in (1, 2, 4))


def is_installed() -> bool:
    return shutil.which("fio") is not None


def run(path: Path, setting: Setting) -> Read:
    """Read the file once, each job its own part of it."""
    size = path.stat().st_size
    block_bytes = min(setting.block_bytes, max(size // setting.jobs // 4096 * 4096, 4096))
    each = max(size // setting.jobs // block_bytes, 1) * block_bytes
    command = ["fio", "--name=read", f"--filename={path}", "--readonly", "--rw=read", "--output-format=json"]
    command += [f"--ioengine={setting.engine}", f"--direct={int(setting.direct)}", f"--bs={block_bytes}"]
    command += [f"--iodepth={setting.depth}", f"--numjobs={setting.jobs}", "--thread", "--group_reporting"]
    command += [f"--size={each}", f"--offset_increment={each}", "--invalidate=0"]
    done = subprocess.run(command, capture_output=True, text=True)
    report = done.stdout[max(done.stdout.find("{"), 0) :]  # it may say things before
    try:
        read = msgspec.json.decode(report.encode(), type=_Report).jobs[0].read
    except (msgspec.DecodeError, IndexError) as error:
        reason = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise FioFailed(f"fio {setting}: {reason[0]}") from error
    if done.returncode != 0 or read.io_bytes == 0:
        raise FioFailed(f"fio {setting}: exit code {done.returncode}")
    return Read(read.io_bytes, max(read.runtime, 1) / 1000)


def best_settings(
    path: Path, settings: tuple[Setting, ...], keep: int, before_each: Callable[[], None]
) -> tuple[Setting, ...]:
    """The fastest few of one pass over all; what this machine does not offer is left out."""
    rates: list[tuple[float, Setting]] = []
    failure: FioFailed | None = None
    if path.stat().st_size < _SMALL_BYTES:
        settings = settings[-2:]  # too short a read to tell one from another
        keep = 1
    for setting in settings:
        before_each()
        try:
            read = run(path, setting)
        except FioFailed as error:
            failure = error
            continue
        rates.append((read.bytes / read.seconds, setting))
    if not rates:
        raise failure or FioFailed("no settings to try")
    return tuple(setting for _, setting in sorted(rates, key=lambda rate: rate[0], reverse=True)[:keep])


def raw_read(path: Path, direct: bool) -> Read:
    """The reference where fio is missing."""
    size = path.stat().st_size
    offsets = _Offsets(size)
    descriptor = _open(path, direct)
    buffers = [mmap.mmap(-1, _RAW_BLOCK_BYTES) for _ in range(_RAW_THREADS)]
    for buffer in buffers:
        buffer.write(bytes(_RAW_BLOCK_BYTES))  # touched, so that no page is faulted in while the clock runs

    def work(buffer: mmap.mmap) -> None:
        for offset in offsets:
            os.preadv(descriptor, [buffer], offset)

    threads = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    os.close(descriptor)
    return Read(size, seconds)


def _open(path: Path, direct: bool) -> int:
    try:
        return os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    except OSError as error:
        if not direct or error.errno != errno.EINVAL:
            raise FioFailed(f"{path}: {error.strerror}") from error
        return os.open(path, os.O_RDONLY)  # a file system without direct I/O


class _Offsets:
    """Hands every block to one thread."""

    def __init__(self, size: int) -> None:
        self._left = iter(range(0, size, _RAW_BLOCK_BYTES))
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        while True:
            with self._lock:
                offset = next(self._left, None)
            if offset is None:
                return
            yield offset


class _ReadReport(msgspec.Struct):
    io_bytes: int
    runtime: int  # milliseconds, of the slowest job


class _Job(msgspec.Struct):
    read: _ReadReport


class _Report(msgspec.Struct):
    jobs: list[_Job]
