"""A server whose model lies in a bucket: asked while it downloads, through cut connections and on a disk that is full.
The bucket is a real S3 server on loopback; the proxy before it holds answers back until the test lets them go."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from s3_server import SECRET, FaultyProxy, proxied, s3_server, use
from server_fixture import Server, eventually, run_command, running_server
from store_builders import stored

from dovetail.cli.ps import key_header
from dovetail.store import Catalogue
from dovetail.store.format.late_chunks import late_chunks
from dovetail.store.format.manifest import CHUNK_BYTES, StoredModel, is_arriving
from dovetail.store.sources.bucket_model import upload_model

URL = "s3://serving/v1/models/big"
CONFIG = """
store: {{path: {root}, host_pool: 256MiB}}
nodes: [{{threads: 1, kv_cache: 16MiB}}]
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    pytest.importorskip("moto.server")
    with s3_server() as (endpoint, client):
        client.create_bucket(Bucket="serving")
        yield endpoint


@pytest.fixture(scope="module")
def original(endpoint: str, tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """Three chunks, uploaded by the command line."""
    from tiny import save_tiny

    source, root = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("store")
    save_tiny("llama", source, vocab_size=120_000)
    model = stored(source, root, name="big")
    with pytest.MonkeyPatch.context() as patch:
        use(endpoint, patch)
        uploaded = run_command("store", "upload", "big", "s3://serving/v1", "--store", root, "--json")
    assert uploaded.returncode == 0, uploaded.stderr
    assert URL in uploaded.stdout
    return model


@pytest.fixture(scope="module")
def text(original: StoredModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the model on disk answers."""
    config = write_config(tmp_path_factory.mktemp("config"), original.path.parent.parent)
    with running_server("big", "--config", config) as server:
        return ask(server)


@pytest.fixture
def proxy(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with proxied(endpoint, monkeypatch) as proxy:
        yield proxy


def write_config(folder: Path, root: Path) -> Path:
    file = folder / "dovetail.yaml"
    file.write_text(CONFIG.format(root=root))
    return file


def ask(server: Server) -> str:
    body = {"model": "big", "prompt": "a b c", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["text"])


def state(server: Server, name: str = "big") -> dict[str, Any]:
    (found,) = [one for one in server.get("/api/models").json()["data"] if one["name"] == name]
    return dict(found)


def is_chunk(method: str, path: str) -> bool:
    return method == "GET" and "/blobs/" in path


def hold_chunks(proxy: FaultyProxy, fault: Callable[[], str | None] = lambda: None) -> threading.Event:
    """Answers with weights wait for the event."""
    gate = threading.Event()

    def rule(method: str, path: str, number: int) -> str | None:
        if not is_chunk(method, path):
            return None
        assert gate.wait(120)
        return fault()

    proxy.rule = rule
    return gate


def test_a_model_in_a_bucket_is_asked_while_it_downloads(
    proxy: FaultyProxy, original: StoredModel, text: str, tmp_path: Path
) -> None:
    """Six of the answers that carry its weights are cut."""
    cuts = iter(["cut"] * 6)
    gate = hold_chunks(proxy, lambda: next(cuts, None))
    root, log = tmp_path / "store", tmp_path / "log"
    with (
        running_server(URL, "--config", write_config(tmp_path, root), log=log) as server,
        ThreadPoolExecutor(1) as thread,
    ):
        assert server.models == ["big"]
        answer = thread.submit(ask, server)
        eventually(lambda: state(server)["state"] == "loading")
        assert state(server)["tier"] == "remote"
        assert state(server)["pull"]["stage"] == "download"
        shown = run_command("ps", "--url", server.url).stdout
        assert "big (loading 0 %)" in shown
        assert not answer.done()
        assert Catalogue(root).cards() == []
        gate.set()
        assert answer.result(120) == text
        eventually(lambda: state(server)["pull"] is None)
        assert next(cuts, None) is None
        told = log.read_text()
        assert "big can be asked for while it downloads" in told
        assert "big: download" in told
        assert SECRET not in told
    assert Catalogue(root).get("big").source == URL
    proxy.rule = lambda method, path, number: "500"
    with running_server(URL, "--config", write_config(tmp_path, root)) as server:
        assert ask(server) == text, "from the disk: the bucket is not asked again"


def test_a_full_disk_stops_no_answer_and_the_model_is_kept_when_there_is_room(
    proxy: FaultyProxy, original: StoredModel, text: str, tmp_path: Path
) -> None:
    """A real disk of 16 MB, for a model of twice the size."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    log = tmp_path / "log"
    try:
        with running_server(URL, "--config", write_config(tmp_path, disk), log=log) as server:
            assert ask(server) == text
            eventually(lambda: state(server)["pull"]["stage"] == "waiting for the disk")
            assert "No space left on device" in log.read_text()
            assert Catalogue(disk).cards() == []
            unloaded = httpx.post(f"{server.url}/api/models/big/unload?force=true", headers=key_header(server.url))
            assert unloaded.status_code == 200, unloaded.text
            assert ask(server) == text, "it stays in memory"
            subprocess.run(["mount", "-o", "remount,size=256m", disk], check=True)
            eventually(lambda: state(server)["pull"] is None)
            assert ask(server) == text
        assert Catalogue(disk).get("big").size_bytes == original.manifest.size_bytes
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_bucket_that_fails_for_good_is_said_to_all_who_wait(
    proxy: FaultyProxy, original: StoredModel, tmp_path: Path
) -> None:
    gate = hold_chunks(proxy, lambda: "403")
    root = tmp_path / "store"
    with (
        running_server("--config", write_config(tmp_path, root)) as server,
        ThreadPoolExecutor(1) as thread,
    ):
        added = thread.submit(run_command, "add", "big", URL, "--url", server.url)
        eventually(lambda: is_arriving(root / "models" / "big"))
        eventually(lambda: server.get("/v1/models").json()["data"])
        body = {"model": "big", "prompt": "a", "max_tokens": 1}
        with ThreadPoolExecutor(1) as other:
            answer = other.submit(server.post, "/v1/completions", body)
            eventually(lambda: state(server)["state"] == "loading")
            gate.set()
            assert "check the credentials" in answer.result(120).text
        assert answer.result().status_code == 500
        failed = added.result(60)
        assert failed.returncode == 1
        assert "check the credentials" in failed.stderr
        assert server.post("/v1/completions", body).status_code == 404, "add takes back what could not be had"
        assert not (root / "models" / "big").exists()


def test_the_first_token_comes_before_the_last_bytes(
    proxy: FaultyProxy, endpoint: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The second 16 MiB hold rows of the embedding alone, and none of the first prompt's: they stay in the bucket until
    its answer is here. A prompt of such rows waits for them, and has the answer that it has from the disk."""
    from tiny import save_tiny

    source, root = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("store")
    save_tiny("llama", source, vocab_size=200_000)
    model = stored(source, root, name="wide")
    assert late_chunks(model.manifest) == range(2)
    held_rows = [100_000, 120_000]
    with pytest.MonkeyPatch.context() as patch:
        use(endpoint, patch)
        upload_model(model.path, "s3://serving/v1", lambda *_: None)
    with running_server("wide", "--config", write_config(tmp_path, root)) as server:
        expected = [*logprobs_of(server, "wide")]
        expected_of_held = [*logprobs_of(server, "wide", held_rows)]
    gate = threading.Event()
    held = f"bytes={CHUNK_BYTES}-"
    proxy.before_range = lambda asked: asked.startswith(held) and gate.wait(300)
    config, folder = write_config(tmp_path, tmp_path / "empty"), tmp_path / "empty" / "models" / "wide"
    with (
        ThreadPoolExecutor(2) as threads,
        running_server("s3://serving/v1/models/wide", "--config", config) as server,
    ):
        try:
            answer = threads.submit(lambda: [*logprobs_of(server, "wide")])
            assert answer.result(100) == expected
            assert is_arriving(folder), "bytes are still to come"
            other = threads.submit(lambda: [*logprobs_of(server, "wide", held_rows)])
            eventually(lambda: state(server, "wide")["state"] == "serving")
            assert not other.done()
        finally:
            gate.set()
        assert other.result(120) == expected_of_held
        eventually(lambda: not is_arriving(folder))
        assert [*logprobs_of(server, "wide")] == expected


def logprobs_of(server: Server, model: str, prompt: str | list[int] = "a b c") -> Iterator[float]:
    """Of each token, as it comes: always the same one, whose text is a letter."""
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "logprobs": 0, "logit_bias": {"97": 100}}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield from (choice["logprobs"] or {}).get("token_logprobs", [])
