"""The object-store tier: from a real S3 server that misbehaves on demand, into the pool and onto the disk at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from s3_server import SECRET, FaultyProxy, proxied, s3_server
from store_builders import flat, stored

from dovetail.errors import DamagedCheckpoint, DovetailError, SourceError
from dovetail.store import Catalogue
from dovetail.store.collect import use_of
from dovetail.store.format import MANIFEST, StoredModel
from dovetail.store.loader import Loader, LoaderConfig
from dovetail.store.loader import Place as Tier
from dovetail.store.object_store import Patience
from dovetail.store.place import Place
from dovetail.store.pool import HostPool
from dovetail.store.remote import RemoteModel, open_remote

CHUNK = 1 << 20
URL = "s3://warehouse/v1/models/big"
QUICK = Patience(attempts=6, first_pause_s=0.01, longest_pause_s=0.05, answer_s=1.0, min_bytes_per_s=5e7)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Any]]:
    pytest.importorskip("moto.server")
    with s3_server() as running:
        yield running


@pytest.fixture(scope="module")
def original(server: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """A model of three chunks, in a store that was copied to s3://warehouse/v1 as it is."""
    from tiny import save_tiny

    source, root = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("store")
    save_tiny("llama", source, vocab_size=120_000)
    model = stored(source, root, name="big")
    assert len(model.manifest.partitions[0].chunks) > 2
    server[1].create_bucket(Bucket="warehouse")
    for path in [*(root / "models").rglob("*"), *(root / "blobs").rglob("*")]:
        if path.is_file():
            server[1].put_object(Bucket="warehouse", Key=f"v1/{path.relative_to(root)}", Body=path.read_bytes())
    return model


@pytest.fixture
def proxy(server: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with proxied(server[0], monkeypatch) as proxy:
        yield proxy


@pytest.fixture
def loader() -> Iterator[Loader]:
    pool = HostPool.create(128 * CHUNK, CHUNK)
    loader = Loader(pool, LoaderConfig(readers=2, requests=3))
    yield loader
    loader.close()
    assert pool.stats().pinned_bytes == 0, "somebody still holds a model"
    pool.close()


def check(model: StoredModel, original: StoredModel) -> None:
    for name, _ in original.spec.tensors():
        assert np.array_equal(flat(model, name), flat(original, name))


def blob_requests(proxy: FaultyProxy) -> int:
    return sum("/blobs/" in path for _, path in proxy.requests)


def test_a_model_comes_to_pool_and_disk_at_once(
    proxy: FaultyProxy, original: StoredModel, loader: Loader, tmp_path: Path
) -> None:
    with open_remote(URL, Place(tmp_path), loader, patience=QUICK) as model:
        assert isinstance(model, RemoteModel)
        model.wait("embed.weight")
        assert Catalogue(tmp_path).cards() == []  # not before it is whole
        model.publish()
        check(model, original)
        assert model.tokenizer() == original.tokenizer()
        assert use_of(Place(tmp_path), tmp_path / "models" / "big").in_use
    card = Catalogue(tmp_path).get("big")
    on_disk = StoredModel(Path(card.path))
    check(on_disk, original)
    on_disk.close()
    assert blob_requests(proxy) == len(original.manifest.partitions[0].chunks)
    assert list((tmp_path / "tmp").iterdir()) == []
    loader.pool.trim(idle_s=0)
    again = open_remote(URL, Place(tmp_path), loader, patience=QUICK)
    assert [ticket.place for ticket in again.tickets] == [Tier.DISK]
    again.close()


@pytest.mark.parametrize("fault", ["500", "cut", "stall"])
def test_errors_cut_answers_and_stalls_are_overcome(
    fault: str, proxy: FaultyProxy, original: StoredModel, loader: Loader, tmp_path: Path
) -> None:
    """Every range fails twice before it comes."""
    seen: dict[str, int] = {}
    lock = threading.Lock()

    def rule(method: str, path: str, number: int) -> str | None:
        with lock:
            if "/blobs/" not in path:
                return None
            seen[path] = seen.get(path, 0) + 1
            return fault if seen[path] <= 2 else None

    proxy.rule = rule
    with open_remote(URL, Place(tmp_path), loader, patience=QUICK) as model:
        model.wait()
        check(model, original)
    assert max(seen.values()) > 2


def test_a_store_that_stays_broken_is_named_and_leaves_nothing(
    proxy: FaultyProxy, original: StoredModel, loader: Loader, tmp_path: Path
) -> None:
    proxy.rule = lambda method, path, number: "500" if "/blobs/" in path else None
    impatient = Patience(attempts=2, first_pause_s=0.01)
    with open_remote(URL, Place(tmp_path), loader, patience=impatient) as model:
        with pytest.raises(SourceError, match=r"s3://warehouse/v1/blobs/.*failed 2 times: .*500") as caught:
            model.wait()
        with pytest.raises(SourceError):
            model.publish()
    assert SECRET not in str(caught.value)
    assert Catalogue(tmp_path).cards() == []
    assert list((tmp_path / "tmp").iterdir()) == []
    assert not list((tmp_path / "blobs").iterdir())


def test_what_may_not_be_read_says_so(
    proxy: FaultyProxy, original: StoredModel, loader: Loader, tmp_path: Path
) -> None:
    proxy.rule = lambda method, path, number: "403"
    with pytest.raises(SourceError, match="check the credentials in the environment") as caught:
        open_remote(URL, Place(tmp_path), loader, patience=QUICK)
    assert SECRET not in str(caught.value)
    assert len(proxy.requests) == 1


def test_what_is_not_there_says_so(proxy: FaultyProxy, original: StoredModel, loader: Loader, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"s3://warehouse/v1/models/none/manifest.json: no such object"):
        open_remote("s3://warehouse/v1/models/none", Place(tmp_path), loader, patience=QUICK)
    with pytest.raises(SourceError, match="expected s3://bucket/prefix/models/name"):
        open_remote("s3://warehouse/v1", Place(tmp_path), loader)


def test_damage_in_the_bucket_is_named(
    server: tuple[str, Any], proxy: FaultyProxy, original: StoredModel, loader: Loader, tmp_path: Path
) -> None:
    digest = original.manifest.partitions[0].digest
    key = f"v1/blobs/{digest[:2]}/{digest}"
    client = server[1]
    good = client.get_object(Bucket="warehouse", Key=key)["Body"].read()
    damaged = bytearray(good)
    damaged[20 << 20] ^= 1
    client.put_object(Bucket="warehouse", Key=key, Body=bytes(damaged))
    try:
        with (
            open_remote(URL, Place(tmp_path), loader, patience=QUICK) as model,
            pytest.raises(DamagedCheckpoint, match=rf"{digest}: bytes {16 << 20:,} to {32 << 20:,} do not match"),
        ):
            model.publish()
        client.put_object(Bucket="warehouse", Key=key, Body=good[:-4096])
        with (
            open_remote(URL, Place(tmp_path), loader, patience=QUICK) as model,
            pytest.raises(DamagedCheckpoint, match=rf"{digest}: ends at byte"),
        ):
            model.publish()
    finally:
        client.put_object(Bucket="warehouse", Key=key, Body=good)
    assert Catalogue(tmp_path).cards() == []


def test_two_who_ask_at_once_cause_one_download(
    proxy: FaultyProxy, original: StoredModel, loader: Loader, tmp_path: Path
) -> None:
    def pull(_: int) -> None:
        model = open_remote(URL, Place(tmp_path), loader, patience=QUICK)
        if isinstance(model, RemoteModel):
            model.publish()
        model.wait()
        check(model, original)
        model.close()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(pull, range(3)))
    assert blob_requests(proxy) == len(original.manifest.partitions[0].chunks)


def test_a_download_that_is_given_up_leaves_nothing(
    proxy: FaultyProxy, original: StoredModel, loader: Loader, tmp_path: Path
) -> None:
    proxy.rule = lambda method, path, number: "stall" if "/blobs/" in path else None
    patience = Patience(attempts=1000, first_pause_s=0.01, answer_s=1.0, min_bytes_per_s=5e7)
    model = open_remote(URL, Place(tmp_path), loader, patience=patience)
    model.close()
    with pytest.raises(DovetailError, match="cancelled"):
        model.wait()
    assert list((tmp_path / "tmp").iterdir()) == []
    assert loader.pool.stats().used_bytes == 0


def test_a_full_disk_does_not_stop_serving(
    proxy: FaultyProxy, original: StoredModel, loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are in memory; only registering them fails, with the file's name."""
    place = Place(tmp_path)
    with open_remote(URL, place, loader, patience=QUICK) as model:
        assert isinstance(model, RemoteModel)
        (writer,) = [ticket.writer for ticket in model.tickets]
        assert writer is not None
        monkeypatch.setattr("os.fsync", _no_space)
        model.wait()
        check(model, original)
        with pytest.raises(DovetailError, match="No space left on device"):
            model.publish()
    assert Catalogue(tmp_path).cards() == []
    assert not (tmp_path / "models" / "big" / MANIFEST).exists()


def _no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")
