"""Pulling from an object store: a real S3 server on loopback, with errors, cut answers and stalls before it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from s3_server import SECRET, FaultyProxy, proxied, s3_server, upload
from store_builders import flat
from tiny import save_tiny
from tiny_gguf import save_tiny_gguf

from dovetail.errors import SourceError
from dovetail.store import Catalogue, open_checkpoint
from dovetail.store.sources import object_source
from dovetail.store.sources.object_source import fetch_objects
from dovetail.store.sources.object_store import RetryPolicy

TinyFolder = Callable[[str], Path]
QUICK = RetryPolicy(attempts=4, first_pause_s=0.01, longest_pause_s=0.02, answer_s=0.5, min_bytes_per_s=5e7)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Any]]:
    pytest.importorskip("moto.server")
    with s3_server() as running:
        yield running


@pytest.fixture
def proxy(server: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """All requests of the store go through it."""
    with proxied(server[0], monkeypatch) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def bucket(server: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that s3://models/org/Tiny holds; its weights are several ranges long."""
    folder = tmp_path_factory.mktemp("upload") / "tiny"
    save_tiny("llama", folder, vocab_size=60_000)
    upload(server[1], "models", "org/Tiny", folder)
    save_tiny_gguf("llama", folder / "Tiny.Q8_0.gguf")
    server[1].put_object(Bucket="models", Key="gguf/Tiny.Q8_0.gguf", Body=(folder / "Tiny.Q8_0.gguf").read_bytes())
    (folder / "Tiny.Q8_0.gguf").unlink()
    for key in ("org/Tiny/training/optimizer.safetensors", "org/Tiny/pytorch_model.bin", "pickled/pytorch_model.bin"):
        server[1].put_object(Bucket="models", Key=key, Body=b"x")
    return folder


def test_a_folder_is_pulled_and_no_secret_is_kept(proxy: FaultyProxy, bucket: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    card = Catalogue(tmp_path).pull("s3://models/org/Tiny", dtype="f32", progress=lambda *step: seen.append(step))
    assert (card.name, card.source) == ("tiny", "s3://models/org/Tiny")
    ours, theirs = open_checkpoint(card.path), open_checkpoint(bucket)
    for name, _ in ours.spec.tensors():
        np.testing.assert_array_equal(flat(ours, name), flat(theirs, name))
    downloads = [step for step in seen if step[0] == "download"]
    assert downloads[-1][1] == downloads[-1][2] == sum(path.stat().st_size for path in bucket.iterdir())
    assert not any("optimizer" in path or ".bin" in path for method, path in proxy.requests if method == "GET")
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()
    assert list((tmp_path / "tmp").iterdir()) == []
    count = len(proxy.requests)
    assert Catalogue(tmp_path).pull("s3://models/org/Tiny", dtype="f32") == card
    assert len(proxy.requests) == count


@pytest.mark.parametrize("url", ["s3://models/gguf/Tiny.Q8_0.gguf", "s3://models/gguf"])
def test_a_gguf_is_pulled(url: str, proxy: FaultyProxy, bucket: Path, tmp_path: Path) -> None:
    assert Catalogue(tmp_path).pull(url).name == "tiny"


def test_errors_and_cut_answers_are_asked_for_again(proxy: FaultyProxy, bucket: Path, tmp_path: Path) -> None:
    faults = {"500": 3, "cut": 3}

    def rule(method: str, path: str, number: int) -> str | None:
        for fault, left in faults.items():
            if left and (fault == "500" or (method == "GET" and path.endswith(".safetensors"))):
                faults[fault] -= 1
                return fault
        return None

    proxy.rule = rule
    path, _ = fetch_objects("s3://models/org/Tiny", tmp_path, lambda *_: None, QUICK)
    assert faults == {"500": 0, "cut": 0}
    for file in bucket.iterdir():
        assert (path / file.name).read_bytes() == file.read_bytes()


def test_a_stalled_answer_is_given_up_and_made_again(proxy: FaultyProxy, bucket: Path, tmp_path: Path) -> None:
    stalled: list[str] = []

    def rule(method: str, path: str, number: int) -> str | None:
        if method == "GET" and path.endswith(".safetensors") and not stalled:
            stalled.append(path)
            return "stall"
        return None

    proxy.rule = rule
    path, _ = fetch_objects("s3://models/org/Tiny", tmp_path, lambda *_: None, QUICK)
    assert stalled
    assert (path / "model.safetensors").read_bytes() == (bucket / "model.safetensors").read_bytes()


def test_a_store_that_stays_broken_is_named_and_the_next_pull_goes_on(
    proxy: FaultyProxy, bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_source, "_RANGE_BYTES", 1 << 20)
    size = (bucket / "model.safetensors").stat().st_size
    proxy.rule = lambda method, path, number: "500" if len(proxy.ranges) > 6 else None
    with pytest.raises(SourceError, match=r"s3://models/org/Tiny/model\.safetensors: .*failed 4 times") as caught:
        fetch_objects("s3://models/org/Tiny", tmp_path, lambda *_: None, QUICK)
    assert SECRET not in str(caught.value)
    (part,) = (tmp_path / "model").glob(".model.safetensors.*.part")
    had = part.stat().st_size
    assert 0 < had < size
    proxy.rule, proxy.ranges = lambda *_: None, []
    path, _ = fetch_objects("s3://models/org/Tiny", tmp_path, lambda *_: None, QUICK)
    assert (path / "model.safetensors").read_bytes() == (bucket / "model.safetensors").read_bytes()
    after = sum(file.stat().st_size for file in bucket.iterdir() if file.name > "model.safetensors")
    asked = sum(length(text) for text in proxy.ranges)
    assert asked == size - had + after  # what was there was not asked for again


def length(range_header: str) -> int:
    begin, _, end = range_header.removeprefix("bytes=").partition("-")
    return int(end) - int(begin) + 1


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("s3://models/nowhere", "s3://models/nowhere: neither safetensors nor a GGUF file there"),
        ("s3://models/pickled", r"weights only as pickle \(pytorch_model\.bin\), which is never read"),
        ("s3://models/gguf/Other.gguf", r"s3://models/gguf/Other\.gguf: no such object"),
        ("s3://no-such-bucket/x", "s3://no-such-bucket/x"),
        ("s3://key:hidden@models/x", "credentials go in environment"),
        ("s3://models/x?X-Amz-Signature=hidden", "credentials go in environment"),
    ],
)
def test_an_address_without_a_model_is_explained(
    url: str, text: str, proxy: FaultyProxy, bucket: Path, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=text) as caught:
        fetch_objects(url, tmp_path, lambda *_: None, QUICK)
    assert "hidden" not in str(caught.value)


def test_a_refusal_is_not_tried_again(proxy: FaultyProxy, bucket: Path, tmp_path: Path) -> None:
    proxy.rule = lambda *_: "403"
    with pytest.raises(SourceError, match="check the credentials in the environment"):
        fetch_objects("s3://models/gguf/Tiny.Q8_0.gguf", tmp_path, lambda *_: None, QUICK)
    assert len(proxy.requests) == 1


def test_an_object_that_changes_meanwhile_is_noticed(
    proxy: FaultyProxy, bucket: Path, server: tuple[str, Any], tmp_path: Path
) -> None:
    server[1].put_object(Bucket="models", Key="moving/m.gguf", Body=b"1" * 100)

    def rule(method: str, path: str, number: int) -> str | None:
        if method == "GET":
            server[1].put_object(Bucket="models", Key="moving/m.gguf", Body=b"2" * 100)
        return None

    proxy.rule = rule
    with pytest.raises(SourceError, match="changed while it was read"):
        fetch_objects("s3://models/moving/m.gguf", tmp_path, lambda *_: None, QUICK)
    assert list((tmp_path / "model").iterdir()) == []


PULL = "import sys; from dovetail.store import Catalogue; Catalogue(sys.argv[1]).pull('s3://models/org/Tiny')"


def test_two_pulls_at_once_download_once(proxy: FaultyProxy, bucket: Path, tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def rule(method: str, path: str, number: int) -> str | None:
        begun.set()
        go_on.wait(30)  # until both are there
        return None

    proxy.rule = rule
    pulls = [subprocess.Popen([sys.executable, "-c", PULL, str(tmp_path)]) for _ in range(2)]
    assert begun.wait(60)
    go_on.set()
    assert [pull.wait(timeout=120) for pull in pulls] == [0, 0]
    fetched = [path for method, path in proxy.requests if method == "GET" and path.endswith("tokenizer.json")]
    assert len(fetched) == 1
    assert [card.name for card in Catalogue(tmp_path).cards()] == ["tiny"]
