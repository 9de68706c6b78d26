"""Models of the store's own form in a bucket: from a real S3 server that misbehaves on demand, onto the disk and into
the host pool."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from s3_server import SECRET, FaultyProxy, proxied, s3_server, use
from server_fixture import eventually
from store_builders import flat, stored

from dovetail.errors import CheckpointError, DamagedCheckpoint, SourceError
from dovetail.store import Catalogue
from dovetail.store.checking import check_pieces
from dovetail.store.collect import collect
from dovetail.store.format import partition_writer
from dovetail.store.format.late_chunks import late_chunks
from dovetail.store.format.manifest import (
    ARRIVING,
    StoredModel,
    TensorEntry,
    is_arriving,
    is_stored,
    partition_files,
)
from dovetail.store.host_pool.pool import HostPool
from dovetail.store.loading import late_rows
from dovetail.store.loading.loader import Loader, LoaderConfig
from dovetail.store.loading.pooled import PooledModel
from dovetail.store.sources import blob_download, bucket_model
from dovetail.store.sources.bucket_model import EarlyServing, upload_model
from dovetail.store.sources.object_store import RetryPolicy
from dovetail.types import ModelCard
from dovetail.worker.weight_cache import WeightCache

CHUNK = 1 << 20
URL = "s3://warehouse/v1/models/big"
QUICK = RetryPolicy(attempts=6, first_pause_s=0.01, longest_pause_s=0.05, answer_s=60.0)
IMPATIENT = RetryPolicy(attempts=20, first_pause_s=0.01, longest_pause_s=0.05, answer_s=1.0, min_bytes_per_s=5e7)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_model.find_model, "__defaults__", (QUICK,))
    monkeypatch.setattr(blob_download, "_RETRY_S", 0.1)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Any]]:
    pytest.importorskip("moto.server")
    with s3_server() as running:
        yield running


@pytest.fixture
def proxy(server: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with proxied(server[0], monkeypatch) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def original(server: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """A model of three chunks, uploaded to s3://warehouse/v1."""
    from tiny import save_tiny

    source, root = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("store")
    save_tiny("llama", source, vocab_size=120_000)
    model = stored(source, root, name="big")
    assert len(model.manifest.partitions[0].chunks) > 2
    server[1].create_bucket(Bucket="warehouse")
    with pytest.MonkeyPatch.context() as patch:
        use(server[0], patch)
        assert upload_model(model.path, "s3://warehouse/v1", lambda *_: None) == model.manifest.size_bytes
        assert upload_model(model.path, "s3://warehouse/v1", lambda *_: None) == 0  # blobs that are there stay
    return model


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool.create(128 * CHUNK, CHUNK)
    yield pool
    assert pool.stats().pinned_bytes == 0, "somebody still holds a model"
    pool.close()


def check(model: StoredModel, original: StoredModel) -> None:
    for name, _ in original.spec.tensors():
        assert np.array_equal(flat(model, name), flat(original, name))


def check_on_disk(root: Path, original: StoredModel) -> None:
    card = Catalogue(root).get("big")
    assert card.source == URL
    model = StoredModel(Path(card.path))
    check(model, original)
    assert model.tokenizer() == original.tokenizer()
    model.close()
    assert list((root / "tmp").iterdir()) == []
    assert not (root / "models" / "big" / ARRIVING).exists()


def chunk_requests(proxy: FaultyProxy) -> int:
    return sum(method == "GET" and "/blobs/" in path for method, path in proxy.requests)


def blobs_fail(fault: str) -> Any:
    return lambda method, path, number: fault if method == "GET" and "/blobs/" in path else None


def test_a_model_is_pulled_as_it_is_and_once(proxy: FaultyProxy, original: StoredModel, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    Catalogue(tmp_path).pull(URL, progress=lambda *step: seen.append(step))
    check_on_disk(tmp_path, original)
    assert seen[-1] == ("download", original.manifest.size_bytes, original.manifest.size_bytes)
    assert chunk_requests(proxy) == len(original.manifest.partitions[0].chunks)
    count = len(proxy.requests)
    assert Catalogue(tmp_path).pull(URL).name == "big"
    assert len(proxy.requests) == count, "it is here already"
    other = Catalogue(tmp_path).pull(URL, name="other")
    assert other.path != str(tmp_path / "models" / "big")
    assert chunk_requests(proxy) == len(original.manifest.partitions[0].chunks), "the blobs are here"


def test_a_model_is_in_the_pool_and_usable_before_it_is_on_disk(
    proxy: FaultyProxy, original: StoredModel, pool: HostPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue, loader = Catalogue(tmp_path), Loader(pool, LoaderConfig(readers=2))
    weight_cache, disk = WeightCache(pool, loader, for_copies=False), HeldDisk(monkeypatch)
    folder = tmp_path / "models" / "big"
    cards: list[ModelCard] = []

    def on_servable(name: str) -> None:
        cards.append(catalogue.arriving(name))
        assert (is_arriving(folder), is_stored(folder), catalogue.cards()) == (True, False, [])

    with ThreadPoolExecutor(1) as thread:
        pulled = thread.submit(lambda: catalogue.pull(URL, early=EarlyServing(pool, on_servable)))
        eventually(lambda: bool(cards) and original.manifest.partitions[0].digest in pool.stats().ready_keys)
        checkpoint, tier = weight_cache.open(cards[0].path)
        assert tier == "host"
        assert isinstance(checkpoint, StoredModel)
        check(checkpoint, original)
        assert is_arriving(folder), "the disk takes nothing meanwhile"
        assert not [*check_pieces(folder)], "what is not on disk yet is not damaged"
        checkpoint.close()
        disk.release()
        assert pulled.result(60) == cards[0], "its card is the one that it is served with"
    check_on_disk(tmp_path, original)
    loader.close()
    pool.trim(idle_s=0)


def test_rows_that_a_reader_needs_come_before_the_rest_of_the_embedding(
    server: tuple[str, Any], proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five chunks with nothing but rows two are on their way; the reader asks for one of the last."""
    from tiny import save_tiny

    monkeypatch.setattr(partition_writer, "CHUNK_BYTES", CHUNK)
    save_tiny("llama", tmp_path / "source", vocab_size=30_000)
    original = stored(tmp_path / "source", tmp_path / "first", name="rows")
    with pytest.MonkeyPatch.context() as patch:
        use(server[0], patch)
        upload_model(original.path, "s3://warehouse/v1", lambda *_: None)
    assert late_chunks(original.manifest) == range(5)
    gates = {f"bytes={index * CHUNK}-{(index + 1) * CHUNK - 1}": threading.Event() for index in range(5)}
    proxy.before_range = lambda asked: asked in gates and gates[asked].wait(60)
    late_ranges = list(gates)
    pool, catalogue, cards = HostPool.create(64 * CHUNK, CHUNK), Catalogue(tmp_path / "second"), list[ModelCard]()
    loader, early = Loader(pool), EarlyServing(pool, lambda name: cards.append(catalogue.arriving(name)))
    with ThreadPoolExecutor(1) as thread:
        pulled = thread.submit(lambda: catalogue.pull("s3://warehouse/v1/models/rows", early=early))
        eventually(lambda: bool(cards))
        model, _ = WeightCache(pool, loader, for_copies=False).open(cards[0].path)
        assert isinstance(model, PooledModel)
        late = model.late_rows()
        assert late is not None
        eventually(lambda: set(late_ranges[:2]) <= set(proxy.ranges))
        needed = int(3.5 * CHUNK) // (48 * 4)
        assert late.lacks([needed])
        gates[late_ranges[0]].set()
        eventually(lambda: late_ranges[3] in proxy.ranges)
        assert late_ranges[2] not in proxy.ranges
        assert not late.lacks([0, 1])
        gates[late_ranges[3]].set()
        eventually(lambda: not late.lacks([needed]))
        assert not late.is_complete
        for gate in gates.values():
            gate.set()
        pulled.result(60)
    assert late.is_complete
    assert model.late_rows() is None
    check(model, original)
    model.close()
    loader.close()
    pool.close()


def test_late_rows_whose_download_has_ended_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_rows, "_GRACE_S", 0.1)
    pool = HostPool.create(8 * CHUNK, CHUNK)
    lease = pool.reserve("half", 4 * CHUNK)
    rows = late_rows.LateRows(lease, TensorEntry("embed.weight", 0, 0, 4 * CHUNK, "f32", (1024, 1024)), range(4))
    lease.mark(1)
    assert not rows.lacks([256])
    assert rows.lacks([0])
    rows.wait()
    lease.abandon()
    with pytest.raises(CheckpointError, match="half: its download ended before all of it was here"):
        eventually(rows.wait)
    lease.close()
    pool.close()


class HeldDisk:
    """No file finds space, as on a disk that is full, until `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_full, fallocate = True, os.posix_fallocate

        def allocate(*arguments: int) -> None:
            if self._is_full:
                raise OSError(28, "No space left on device")
            fallocate(*arguments)

        monkeypatch.setattr("os.posix_fallocate", allocate)

    def release(self) -> None:
        self._is_full = False


@pytest.mark.parametrize("fault", ["500", "cut", "stall"])
@pytest.mark.parametrize("with_pool", [True, False])
def test_errors_cut_answers_and_stalls_are_overcome(
    fault: str,
    with_pool: bool,
    proxy: FaultyProxy,
    original: StoredModel,
    pool: HostPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every chunk's first requests fail before one succeeds."""
    if fault == "stall":
        monkeypatch.setattr(bucket_model.find_model, "__defaults__", (IMPATIENT,))
    failed: list[str] = []
    lock = threading.Lock()

    def rule(method: str, path: str, number: int) -> str | None:
        with lock:
            if method == "GET" and "/blobs/" in path and len(failed) < 6:
                failed.append(path)
                return fault
            return None

    proxy.rule = rule
    early = EarlyServing(pool, lambda name: None) if with_pool else None
    Catalogue(tmp_path).pull(URL, early=early)
    assert len(failed) == 6
    check_on_disk(tmp_path, original)


@pytest.mark.parametrize("with_pool", [True, False])
def test_an_interrupted_download_goes_on_where_it_stopped(
    with_pool: bool, proxy: FaultyProxy, original: StoredModel, pool: HostPool, tmp_path: Path
) -> None:
    """The bucket serves one chunk and then nothing; the next pull fetches only the others."""
    served: list[str] = []
    lock = threading.Lock()

    def rule(method: str, path: str, number: int) -> str | None:
        if method != "GET" or "/blobs/" not in path:
            return None
        with lock:
            served.append(path)
            return None if len(served) == 1 else "500"

    proxy.rule = rule
    early = EarlyServing(pool, lambda name: None) if with_pool else None
    with pytest.raises(SourceError, match=r"s3://warehouse/v1/blobs/.*failed 6 times: .*500") as caught:
        Catalogue(tmp_path).pull(URL, early=early)
    assert SECRET not in str(caught.value)
    assert Catalogue(tmp_path).cards() == []
    assert list((tmp_path / "models").iterdir()) == [], "nobody is offered what did not come"
    proxy.rule = lambda method, path, number: None
    before = chunk_requests(proxy)
    Catalogue(tmp_path).pull(URL)
    chunks = len(original.manifest.partitions[0].chunks)
    assert chunk_requests(proxy) - before in ((chunks - 1,) if not with_pool else (chunks - 1, chunks))
    check_on_disk(tmp_path, original)


def test_what_a_download_left_is_compared_before_it_is_used(
    proxy: FaultyProxy, original: StoredModel, tmp_path: Path
) -> None:
    proxy.rule = blobs_fail("500")
    with pytest.raises(SourceError):
        Catalogue(tmp_path).pull(URL)
    (path, partition) = partition_files(original.path)[0]
    damaged = bytearray(path.read_bytes())
    damaged[5] ^= 1
    (staging,) = (tmp_path / "tmp").iterdir()
    (staging / partition.digest).write_bytes(damaged)
    proxy.rule = lambda method, path, number: None
    before = chunk_requests(proxy)
    Catalogue(tmp_path).pull(URL)
    assert chunk_requests(proxy) - before == 1, "the first chunk alone"
    check_on_disk(tmp_path, original)


def test_what_a_killed_download_left_is_collected_unless_it_goes_on(
    proxy: FaultyProxy, original: StoredModel, pool: HostPool, tmp_path: Path
) -> None:
    catalogue, seen = Catalogue(tmp_path), []

    def on_servable(name: str) -> None:
        collect(catalogue.paths)
        seen.append(catalogue.arriving(name).name)
        shutil.copytree(tmp_path / "models" / name, tmp_path / "left")

    catalogue.pull(URL, early=EarlyServing(pool, on_servable))
    assert seen == ["big"]
    catalogue.remove("big")
    shutil.copytree(tmp_path / "left", tmp_path / "models" / "big")
    assert [removal.name for removal in collect(catalogue.paths).removed] == ["models/big"]
    assert not (tmp_path / "models" / "big").exists()


def test_what_may_not_be_read_says_so(proxy: FaultyProxy, original: StoredModel, tmp_path: Path) -> None:
    proxy.rule = lambda method, path, number: "403"
    with pytest.raises(SourceError, match="check the credentials in the environment") as caught:
        Catalogue(tmp_path).pull(URL)
    assert SECRET not in str(caught.value)
    assert len(proxy.requests) == 1


def test_what_is_not_there_says_so(proxy: FaultyProxy, original: StoredModel, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"s3://warehouse/v1/models/none: neither safetensors nor a GGUF file"):
        Catalogue(tmp_path).pull("s3://warehouse/v1/models/none")


def test_another_form_than_the_one_in_the_bucket_is_refused(
    proxy: FaultyProxy, original: StoredModel, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match="kept as f32, plain, in 1 parts, and not converted; leave out"):
        Catalogue(tmp_path).pull(URL, layout="int8")


@pytest.mark.parametrize("with_pool", [True, False])
def test_damage_in_the_bucket_is_named(
    with_pool: bool, server: tuple[str, Any], proxy: FaultyProxy, original: StoredModel, pool: HostPool, tmp_path: Path
) -> None:
    digest = original.manifest.partitions[0].digest
    key = f"v1/blobs/{digest[:2]}/{digest}"
    client = server[1]
    early = EarlyServing(pool, lambda name: None) if with_pool else None
    good = client.get_object(Bucket="warehouse", Key=key)["Body"].read()
    damaged = bytearray(good)
    damaged[20 << 20] ^= 1
    client.put_object(Bucket="warehouse", Key=key, Body=bytes(damaged))
    try:
        with pytest.raises(DamagedCheckpoint, match=rf"{digest}: bytes {16 << 20:,} to {32 << 20:,} do not match"):
            Catalogue(tmp_path).pull(URL, early=early)
        client.put_object(Bucket="warehouse", Key=key, Body=good[:-4096])
        with pytest.raises(DamagedCheckpoint, match=rf"{digest}: ends at byte"):
            Catalogue(tmp_path / "other").pull(URL, early=early)
    finally:
        client.put_object(Bucket="warehouse", Key=key, Body=good)
    assert Catalogue(tmp_path).cards() == []
    assert pool.stats().used_bytes == 0


def test_two_who_ask_at_once_cause_one_download(proxy: FaultyProxy, original: StoredModel, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        cards = list(threads.map(lambda _: Catalogue(tmp_path).pull(URL), range(3)))
    assert len(set(map(str, cards))) == 1
    assert chunk_requests(proxy) == len(original.manifest.partitions[0].chunks)


def test_a_pool_without_room_still_gets_the_model_onto_the_disk(
    proxy: FaultyProxy, original: StoredModel, tmp_path: Path
) -> None:
    pool = HostPool.create(4 * CHUNK, CHUNK)
    Catalogue(tmp_path).pull(URL, early=EarlyServing(pool, lambda name: pytest.fail("nobody can load it yet")))
    check_on_disk(tmp_path, original)
    pool.close()


def test_a_disk_that_is_full_is_named_and_what_is_there_is_kept(
    proxy: FaultyProxy, original: StoredModel, tmp_path: Path
) -> None:
    """A real one, of 8 MB."""
    (tmp_path / "disk").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tmp_path / "disk"], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        with pytest.raises(SourceError, match=r"big: needs \d+\.\d MB, \d\.\d MB are free in"):
            Catalogue(tmp_path / "disk").pull(URL)
    finally:
        subprocess.run(["umount", tmp_path / "disk"], check=True)
