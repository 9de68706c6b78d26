"""Reading partition files into the pool: past the page cache, through it, and what goes wrong."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from pool_builders import CHUNK, content, make_pool, write_partition

from dovetail.errors import CheckpointError, DamagedCheckpoint
from dovetail.store.loading.reader import ALIGNMENT, DirectIo, PartitionFile
from dovetail.store.loading.staging import SLICE_BYTES, Staging

REFUSES_DIRECT_IO = Path("/sys/kernel/btf/vmlinux")  # a real file of a file system without direct I/O


def read_whole(path: Path, size_bytes: int, direct_io: DirectIo, step: int = CHUNK, staged: Staging = "auto") -> bytes:
    with make_pool(-(-size_bytes // CHUNK)) as pool:
        lease = pool.reserve("a", size_bytes)
        file = PartitionFile(path, size_bytes, direct_io, staged)
        for begin in range(0, size_bytes, step):
            file.read_into(lease, begin, min(begin + step, size_bytes))
        file.close()
        data = bytes(lease.view())
        lease.close()
        return data


@pytest.mark.parametrize("direct_io", ["auto", "on", "off"])
@pytest.mark.parametrize("folder", [None, "/dev/shm"])
@pytest.mark.parametrize("size_bytes", [1, ALIGNMENT, 3 * CHUNK, 3 * CHUNK + 1, 2 * CHUNK + ALIGNMENT + 77])
def test_every_byte_arrives(folder: str | None, direct_io: DirectIo, size_bytes: int) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        source = write_partition(Path(name), "a", size_bytes)
        assert read_whole(source.path, size_bytes, direct_io) == content("a", size_bytes)


@pytest.mark.parametrize("staged", ["on", "off"])
@pytest.mark.parametrize("size_bytes", [1, ALIGNMENT + 77, SLICE_BYTES, 2 * SLICE_BYTES + ALIGNMENT + 1])
def test_every_byte_arrives_with_and_without_a_buffer_between(tmp_path: Path, staged: Staging, size_bytes: int) -> None:
    source = write_partition(tmp_path, "a", size_bytes)
    for step in (CHUNK, 3 * SLICE_BYTES // 2, 4 * SLICE_BYTES):
        assert read_whole(source.path, size_bytes, "on", step, staged) == content("a", size_bytes)


def test_ranges_need_not_be_chunks(tmp_path: Path) -> None:
    source = write_partition(tmp_path, "a", 5 * CHUNK + 5)
    for step in (3 * CHUNK, CHUNK // 4, 5000):
        assert read_whole(source.path, source.size_bytes, "auto", step) == content("a", source.size_bytes)


@pytest.mark.skipif(not REFUSES_DIRECT_IO.exists(), reason=f"no {REFUSES_DIRECT_IO} to read")
def test_a_file_system_that_refuses_direct_io_is_read_through_the_cache() -> None:
    size = REFUSES_DIRECT_IO.stat().st_size
    assert read_whole(REFUSES_DIRECT_IO, size, "auto") == REFUSES_DIRECT_IO.read_bytes()
    with pytest.raises(CheckpointError, match=r"vmlinux: direct I/O: Invalid argument \(store.direct_io\)"):
        PartitionFile(REFUSES_DIRECT_IO, size, "on")


def test_a_file_of_another_length_is_named(tmp_path: Path) -> None:
    source = write_partition(tmp_path, "a", 1000)
    with pytest.raises(DamagedCheckpoint, match=r"/a: 1,000 bytes, 2,000 expected"):
        PartitionFile(source.path, 2000)


@pytest.mark.parametrize("direct_io", ["auto", "on", "off"])
def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path, direct_io: DirectIo) -> None:
    source = write_partition(tmp_path, "a", 4 * CHUNK)
    with make_pool(4) as pool:
        lease = pool.reserve("a", source.size_bytes)
        file = PartitionFile(source.path, source.size_bytes, direct_io)
        os.truncate(source.path, CHUNK + 100)
        with pytest.raises(DamagedCheckpoint, match=rf"/a: ends at byte {CHUNK + 100:,} of {4 * CHUNK:,}"):
            file.read_into(lease, CHUNK, 2 * CHUNK)
        file.close()
        lease.close()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match="nowhere: missing"):
        PartitionFile(tmp_path / "nowhere", 1)


def test_what_the_system_refuses_to_read_is_named_with_the_offset(tmp_path: Path) -> None:
    path = tmp_path / "sound"
    path.write_bytes(bytes(4096))
    with make_pool(8) as pool:
        lease = pool.reserve("a", 4096)
        file = PartitionFile(path, 4096, "off")
        folder = os.open(tmp_path, os.O_RDONLY)
        os.dup2(folder, file._buffered)  # as a disk that fails: the file could be opened and cannot be read
        os.close(folder)
        with pytest.raises(CheckpointError, match="reading at byte 0: Is a directory"):
            file.read_into(lease, 0, 4096)
        file.close()
        lease.close()
