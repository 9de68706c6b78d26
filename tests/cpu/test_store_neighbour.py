"""Weights from a neighbour's store: another process on loopback with a store of its own, which is cut off, killed,
damaged, or not allowed to be asked."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from store_builders import alter_manifest, flip_bit, stored

from dovetail.errors import DovetailError, SourceError
from dovetail.messages import Loading
from dovetail.node.events import StartLoad
from dovetail.store.collect import collect
from dovetail.store.format.manifest import (
    StoredModel,
    blob_path,
    partition_digest,
    partition_files,
    read_card,
    read_manifest,
    store_root,
)
from dovetail.store.host_pool.pool import HostPool
from dovetail.store.paths import StorePaths
from dovetail.store.sources.neighbour import Neighbour, signature, target_of
from dovetail.store.sources.neighbour_fetch import FetchCancelled, ModelFetch, Wanted
from dovetail.store.sources.weight_server import WeightServer
from dovetail.store.verify import verify
from dovetail.types import ModelCard
from dovetail.worker.fetching import Fetched, Fetcher

TOKEN = b"of the cluster"
CHUNK = 16384


@pytest.fixture(scope="module")
def head(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of many chunks in a neighbour's store; tests that damage it copy the store."""
    folder = stored(tiny_folder("llama"), tmp_path_factory.mktemp("head")).path
    ((blob, partition),) = partition_files(folder)
    content = blob.read_bytes()
    chunks = [hashlib.sha256(content[at : at + CHUNK]).hexdigest() for at in range(0, len(content), CHUNK)]
    digest = partition_digest(partition.size, CHUNK, chunks)
    target = blob_path(store_root(folder), digest)
    target.parent.mkdir(exist_ok=True)
    blob.rename(target)
    cut = [{"digest": digest, "size": partition.size, "chunk_bytes": CHUNK, "chunks": chunks}]
    alter_manifest(folder, lambda manifest: manifest.update(partitions=cut))
    assert len(chunks) > 8
    return folder


@contextmanager
def serving(root: Path, pool: HostPool | None = None) -> Iterator[str]:
    server = WeightServer(StorePaths(root), TOKEN, "127.0.0.1", pool=pool)
    try:
        yield server.address
    finally:
        server.close()


@contextmanager
def serving_process(root: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process, which may be killed."""
    code = (
        "import sys, time; from pathlib import Path; from dovetail.store.paths import StorePaths;"
        "from dovetail.store.sources.weight_server import WeightServer;"
        f"print(WeightServer(StorePaths(Path(sys.argv[1])), {TOKEN!r}, '127.0.0.1').address, flush=True);"
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Cut:
    """A way to a neighbour that breaks after so many bytes, once per number."""

    def __init__(self, address: str, *breaks: int, then: Callable[[], None] = lambda: None) -> None:
        self.passed: list[int] = []  # bytes, by connection
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._breaks = list(breaks)
        self._then = then
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            self.passed.append(0)
            with near, suppress(OSError), socket.create_connection((self._host, self._port)) as far:
                far.sendall(near.recv(65536))
                self._pass_back(far, near)

    def _pass_back(self, far: socket.socket, near: socket.socket) -> None:
        while data := far.recv(4096):
            if self._breaks and self.passed[-1] + len(data) > self._breaks[0]:
                del self._breaks[0]
                self._then()
                return
            near.sendall(data)
            self.passed[-1] += len(data)

    @property
    def connections(self) -> int:
        return len(self.passed)

    def close(self) -> None:
        self._listener.close()


def fetch(root: Path, model: Path, addresses: Sequence[str], token: bytes = TOKEN, limit: int | None = None) -> Path:
    return make_fetch(root, model, addresses, token, limit).run()


def make_fetch(
    root: Path, model: Path, addresses: Sequence[str], token: bytes = TOKEN, limit: int | None = None
) -> ModelFetch:
    wanted = Wanted("copy", read_manifest(model).checksum, limit)
    return ModelFetch(StorePaths(root), wanted, lambda: [Neighbour(address, token) for address in addresses])


def staged_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "tmp").glob("fetch-*/*"))


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def give_up_half_way(root: Path, model: Path, address: str) -> ModelFetch:
    jobs: list[ModelFetch] = []

    def leave() -> None:
        eventually(lambda: staged_bytes(root) >= CHUNK)
        jobs[0].cancel()

    way = Cut(address, read_manifest(model).size_bytes // 2, then=leave)
    jobs.append(make_fetch(root, model, [way.address]))
    with pytest.raises(FetchCancelled):
        jobs[0].run()
    way.close()
    return jobs[0]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.store.sources.neighbour_fetch.PAUSE_S", 0.01)
    monkeypatch.setattr("dovetail.store.sources.neighbour_fetch.POLL_S", 0.01)


def check_same(copy: Path, model: Path) -> None:
    """To the byte, and nothing is left of how it came."""
    assert (copy / "manifest.json").read_bytes() == (model / "manifest.json").read_bytes()
    assert (copy / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    ((ours, _),), ((theirs, _),) = partition_files(copy), partition_files(model)
    assert ours.read_bytes() == theirs.read_bytes()
    assert ours.stat().st_mode & 0o777 == 0o444
    assert not verify([copy]).damage
    StoredModel(copy).close()
    assert not list(StorePaths(store_root(copy)).staging.iterdir())


def test_a_model_comes_from_another_process_to_the_byte(head: Path, tmp_path: Path) -> None:
    with serving_process(store_root(head)) as (_, address):
        job = make_fetch(tmp_path, head, [address])
        check_same(job.run(), head)
    assert job.done_bytes == job.total_bytes == read_manifest(head).size_bytes
    with serving(tmp_path) as address:  # whoever has fetched it gives it on
        check_same(fetch(tmp_path / "next", head, [address]), head)


def test_bytes_that_are_in_the_host_pool_come_from_there(head: Path, tmp_path: Path) -> None:
    ((blob, partition),) = partition_files(head)
    root = tmp_path / "neighbour"
    shutil.copytree(store_root(head), root)
    content = blob.read_bytes()
    flip_bit(blob_path(root, partition.digest), 5000)  # the disk would give something else
    pool = HostPool.create(4 * partition.size + (64 << 20))
    lease = pool.reserve(partition.digest, partition.size)
    lease.populate(0, partition.size)
    at = 0
    for piece in lease.pieces(0, partition.size):
        piece[:] = content[at : at + len(piece)]
        at += len(piece)
    lease.advance(partition.size)
    lease.commit()
    lease.close()
    try:
        with serving(root, pool) as address:
            check_same(fetch(tmp_path / "copy", head, [address]), head)
    finally:
        pool.close()


def test_what_is_here_already_is_not_fetched_again(head: Path, tmp_path: Path) -> None:
    shutil.copytree(store_root(head) / "blobs", tmp_path / "blobs")
    with serving(store_root(head)) as address:
        way = Cut(address)
        check_same(fetch(tmp_path, head, [way.address]), head)
        assert way.connections == 1 + len(read_manifest(head).files), "the manifest and its files"
        assert fetch(tmp_path, head, []).is_dir(), "nobody is asked for what is there"
        way.close()


def test_a_connection_that_breaks_is_made_anew_and_goes_on_where_it_was(head: Path, tmp_path: Path) -> None:
    size = read_manifest(head).size_bytes
    with serving(store_root(head)) as address:
        way = Cut(address, 3 * size // 4)
        check_same(fetch(tmp_path, head, [way.address]), head)
        *small, first, second = way.passed
        assert len(small) == 1 + len(read_manifest(head).files)
        assert size // 2 < first < size, "it broke in the middle"
        assert second < size - first + 2 * CHUNK, "and what had come was kept"
        way.close()


def test_a_fetch_that_is_killed_leaves_nothing_half_and_the_next_goes_on(head: Path, tmp_path: Path) -> None:
    size = read_manifest(head).size_bytes
    children: list[int] = []
    seen: list[int] = []

    def kill() -> None:
        eventually(lambda: staged_bytes(tmp_path) >= sum(seen) + 2 * CHUNK)
        seen.append(staged_bytes(tmp_path) - sum(seen))
        os.kill(children[-1], signal.SIGKILL)

    with serving(store_root(head)) as address:
        way = Cut(address, size // 3, size // 3, then=kill)
        for _ in range(2):
            children.append(os.fork())
            if not children[-1]:
                time.sleep(0.02)
                fetch(tmp_path, head, [way.address])
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(children[-1], 0)[1]) == -signal.SIGKILL
            assert not (tmp_path / "models" / "copy").exists()
            assert not list((tmp_path / "blobs").rglob("*"))
        assert min(seen) > 0, "the second went on where the first was"
        (partial,) = (tmp_path / "tmp").glob("fetch-*/*")
        with partial.open("ab") as file:
            file.write(b"half a chunk of nonsense")
        check_same(fetch(tmp_path, head, [way.address]), head)
        way.close()
    shutil.rmtree(tmp_path / "models")
    assert any(removal.kind == "blob" for removal in collect(StorePaths(tmp_path)).removed)


def test_what_a_fetch_left_that_nobody_goes_on_with_is_collected(head: Path, tmp_path: Path) -> None:
    with serving(store_root(head)) as address:
        give_up_half_way(tmp_path, head, address)
    assert [removal.kind for removal in collect(StorePaths(tmp_path)).removed] == ["staging"]
    assert not list((tmp_path / "tmp").iterdir())


def test_a_neighbour_that_dies_in_the_middle_is_followed_by_the_next(head: Path, tmp_path: Path) -> None:
    half = read_manifest(head).size_bytes // 2
    with serving_process(store_root(head)) as (process, dying), serving(store_root(head)) as living:
        way = Cut(dying, half, then=process.kill)
        check_same(fetch(tmp_path / "a", head, [way.address, living]), head)
        with pytest.raises(SourceError, match="not to be had from any neighbour") as failure:
            fetch(tmp_path / "b", head, [way.address, dying])
        assert dying in str(failure.value), "it says who was asked, and what came of it"
        assert not (tmp_path / "b" / "models" / "copy").exists()
        way.close()


@pytest.mark.parametrize("what", ["blob", "manifest", "tokenizer"])
def test_what_does_not_match_its_digest_is_not_believed(head: Path, tmp_path: Path, what: str) -> None:
    root = tmp_path / "neighbour"
    shutil.copytree(store_root(head), root)
    copy = root / "models" / head.name
    manifest = read_manifest(copy)
    paths = {
        "blob": blob_path(root, manifest.partitions[0].digest),
        "manifest": copy / "manifest.json",
        "tokenizer": copy / "tokenizer.json",
    }
    with serving(root) as damaged, serving(store_root(head)) as sound:
        assert Neighbour(damaged, TOKEN).read(manifest.checksum, 1 << 20)  # it knows by now what it has
        times = (copy / "manifest.json").stat().st_mtime_ns
        flip_bit(paths[what], 600)
        os.utime(copy / "manifest.json", ns=(times, times))
        with pytest.raises(SourceError, match="does not match its digest"):
            fetch(tmp_path / "a", head, [damaged])
        assert not (tmp_path / "a" / "models" / "copy").exists()
        check_same(fetch(tmp_path / "b", head, [damaged, sound]), head)


def test_who_has_not_the_token_gets_nothing_and_learns_nothing(head: Path, tmp_path: Path) -> None:
    digest = read_manifest(head).checksum
    whole = "bytes=0-"
    with serving(store_root(head)) as address:

        def status(target: str, authorization: str | None, asked: str = whole, method: str = "GET") -> int:
            connection = http.client.HTTPConnection(address, timeout=5)
            headers = {"Range": asked} | ({} if authorization is None else {"Authorization": authorization})
            connection.request(method, target, headers=headers)
            answer = connection.getresponse()
            assert not answer.read() or answer.status == 206
            connection.close()
            return answer.status

        def signed(target: str, asked: str = whole, token: bytes = TOKEN) -> str:
            return f"Dovetail {signature(token, target, asked)}"

        there, absent = target_of(digest), target_of("0" * 64)
        assert status(there, signed(there)) == 206
        wrong = signed(there, token=b"of another cluster")
        for given in (None, "", "Dovetail ", f"Bearer {TOKEN.decode()}", wrong, signed(absent)):
            assert status(there, given) == status(absent, given if given != signed(absent) else None) == 401
        assert status(there, signed(there), "bytes=5-") == 401, "a signature is for one range"
        assert status(there, signed(there), method="POST") == 404
        assert status(absent, signed(absent)) == 404
        odd = ["/weights/../../etc/passwd", "/weights/" + "A" * 64, f"{there}/", f"/weights/%2e%2e{digest}", "/", "//"]
        odd += [f"/weights/{name}" for name in ("manifest.json", "m", "..", f"{digest[:2]}/{digest}")]
        assert [status(target, signed(target)) for target in odd] == [404] * len(odd)
        size = (head / "manifest.json").stat().st_size
        for asked in (f"bytes={size}-", "bytes=-5", "bytes=5-2", "bytes=0-1,3-4", "lines=0-", ""):
            assert status(there, signed(there, asked), asked) == 416, asked
        with pytest.raises(SourceError, match="401"):
            fetch(tmp_path, head, [address], token=b"of another cluster")


def test_strangers_who_say_nothing_or_too_much_are_sent_away(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.store.sources.weight_server.HEAD_S", 0.05)
    with serving(store_root(head)) as address:
        host, _, port = address.rpartition(":")
        for said in (b"", b"GET /", b"GET / HTTP/1.1\r\nX: " + b"y" * 20000):
            with socket.create_connection((host, int(port)), timeout=5) as stranger:
                stranger.sendall(said)
                with suppress(ConnectionResetError):
                    assert not stranger.recv(1)


def test_links_in_a_store_lead_nowhere(head: Path, tmp_path: Path) -> None:
    root = tmp_path / "neighbour"
    shutil.copytree(store_root(head), root)
    secret = tmp_path / "secret"
    secret.write_text("of somebody else")
    manifest = read_manifest(head)
    for path in (root / "models" / head.name / "tokenizer.json", blob_path(root, manifest.partitions[0].digest)):
        path.unlink()
        path.symlink_to(secret)
    with serving(root) as address:
        for digest in (manifest.files["tokenizer.json"], manifest.partitions[0].digest):
            with pytest.raises(SourceError, match="404"):
                Neighbour(address, TOKEN).read(digest, 1 << 20)


def test_a_disk_that_is_too_small_is_said_before_and_a_full_one_leaves_nothing(
    head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(store_root(head)) as address:
        usage = shutil.disk_usage(tmp_path)
        with monkeypatch.context() as small:
            small.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
            with pytest.raises(SourceError, match=r"copy: needs .* MB are free"):
                fetch(tmp_path, head, [address])
        real = os.pwrite

        def full(descriptor: int, data: bytes, at: int) -> int:
            if at > 5 * CHUNK:
                raise OSError(28, "No space left on device")
            return real(descriptor, data, at)

        with monkeypatch.context() as filling:
            filling.setattr("os.pwrite", full)
            with pytest.raises(SourceError, match="No space left on device"):
                fetch(tmp_path, head, [address])
        assert not list((tmp_path / "tmp").iterdir()), "what had come does not fill the disk for others"
        check_same(fetch(tmp_path, head, [address]), head)


def test_a_store_with_a_limit_lets_go_of_what_was_used_longest_ago(
    head: Path, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    old = stored(tiny_folder("qwen3"), tmp_path, "old")
    size = read_manifest(head).size_bytes
    with serving(store_root(head)) as address:
        with pytest.raises(SourceError, match="no room"):
            fetch(tmp_path, head, [address], limit=size)  # `old` is mapped
        old.close()
        with pytest.raises(SourceError, match="no room"):
            fetch(tmp_path, head, [address], limit=size - 1)
        check_same(fetch(tmp_path, head, [address], limit=size), head)
    assert not (tmp_path / "models" / "old").exists()


def test_two_who_want_the_same_fetch_it_once(head: Path, tmp_path: Path) -> None:
    ends: list[object] = []

    def run(way: Cut) -> None:
        try:
            ends.append(fetch(tmp_path, head, [way.address]))
        except DovetailError as error:
            ends.append(error)

    with serving(store_root(head)) as address:
        way = Cut(address)
        threads = [threading.Thread(target=run, args=(way,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert ends == [tmp_path / "models" / "copy"] * 3
        assert way.connections == 2 + len(read_manifest(head).files)
        way.close()


def test_what_nobody_wants_any_more_is_given_up(head: Path, tmp_path: Path) -> None:
    with serving(store_root(head)) as address:
        job = give_up_half_way(tmp_path, head, address)
        assert 0 < job.done_bytes < job.total_bytes
        waiting = make_fetch(tmp_path, head, [address])
        with StorePaths(tmp_path).lock(f"source-{waiting._key}"):  # another process of this machine is at it
            threading.Timer(0.05, waiting.cancel).start()
            with pytest.raises(FetchCancelled):
                waiting.run()
        check_same(fetch(tmp_path, head, [address]), head)


def test_a_manifest_of_the_right_checksum_may_have_been_written_by_another_release(head: Path, tmp_path: Path) -> None:
    root = tmp_path / "neighbour"
    shutil.copytree(store_root(head), root)
    copy = root / "models" / head.name
    alter_manifest(copy, lambda manifest: manifest.update(of_a_later_release=1))
    assert json.loads((copy / "manifest.json").read_text())["of_a_later_release"] == 1
    with serving(root) as address:
        check_same(fetch(tmp_path / "copy", copy, [address]), copy)


class Asked:
    """A worker's fetcher, and what it has ended with."""

    def __init__(self, root: Path, address: str) -> None:
        self.ends: queue.Queue[tuple[StartLoad, Fetched]] = queue.Queue()
        self.fetcher = Fetcher(root, TOKEN, None, lambda command, end: self.ends.put((command, end)))
        self.fetcher.neighbours = (address,)

    def fetch(self, card: ModelCard, instance: int = 1) -> None:
        self.fetcher.fetch(StartLoad(instance, card.name, card.size_bytes, 0.0), card)

    def end(self) -> Fetched:
        return self.ends.get(timeout=20)[1]


def test_a_fetch_ends_when_everybody_has_left_and_not_before_anybody_came(head: Path, tmp_path: Path) -> None:
    card = read_card(head, "llama")
    with serving(store_root(head)) as address:
        held = threading.Event()
        way = Cut(address, *[read_manifest(head).size_bytes // 2] * 2, then=lambda: held.wait(20) and None)
        worker = Asked(tmp_path, way.address)
        card = worker.fetcher.local(msgspec.structs.replace(card, path="/on/the/head/llama"))
        assert Path(card.path).parent == tmp_path / "models"
        assert worker.fetcher.lacks(card)
        worker.fetch(card)
        eventually(lambda: (worker.fetcher.progress or Loading("", 0, 0)).done_bytes)
        worker.fetcher.drop_unwanted(lambda _: 0)  # it is warmed: nobody has asked yet
        worker.fetcher.drop_unwanted(lambda _: 2)
        worker.fetcher.drop_unwanted(lambda _: 0)  # they are gone
        held.set()
        assert worker.end().is_cancelled
        worker.fetch(card, instance=2)
        worker.fetcher.drop_unwanted(lambda _: 0)
        end = worker.end()
        assert (end.error, end.is_cancelled) == ("", False)
        assert not worker.fetcher.lacks(card)
        way.close()
        worker.fetcher.stop()


def test_what_a_machine_finds_where_the_head_does_is_used_there(head: Path, tmp_path: Path) -> None:
    worker = Asked(tmp_path, "127.0.0.1:9")
    card = read_card(head, "llama")
    assert worker.fetcher.local(card) == card, "a shared folder"
    other = msgspec.structs.replace(card, digest="0" * 64)
    assert worker.fetcher.local(other).path == str(tmp_path / "models" / "m-000000000000"), "another under its name"
    odd = msgspec.structs.replace(card, path="/somewhere/../my models/-é", digest="1" * 64)
    assert Path(worker.fetcher.local(odd).path).parent == tmp_path / "models"
    plain = msgspec.structs.replace(card, path="/on/the/head", digest="")
    assert worker.fetcher.local(plain) == plain, "nothing is known of it by which it could be fetched"
    assert not worker.fetcher.lacks(plain)
    worker.fetch(worker.fetcher.local(other))
    assert "not to be had from any neighbour" in worker.end().error
    worker.fetcher.stop()
