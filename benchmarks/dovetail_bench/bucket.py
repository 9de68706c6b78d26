"""A model in a bucket behind a slow line, served while it downloads: when what is there, and whether the text is right.

The model has a head of its own, so that a first token needs a few rows of its embedding only, which comes last.
The bucket is a folder on loopback that answers as S3 does, at a limited rate; the tests have the same against a whole
S3 server. The model has random weights.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import msgspec

from dovetail.errors import DovetailError
from dovetail_bench.fleet import HALF_BILLION, Fleet
from dovetail_bench.servers import OURS

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
PIECE_BYTES = 256 * 1024
WAIT_S = 600.0
SHAPE = msgspec.structs.replace(HALF_BILLION, tied_embeddings=False)  # as models of 7B and more have it
PREFIX = "s3://bench/v1"
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class BucketRun(msgspec.Struct, frozen=True):
    """Seconds since `dovetail serve` was started."""

    weight_bytes: int
    limit_mb_per_s: float
    listening_s: float
    offered_s: float
    in_memory_s: float  # all chunks had left the proxy
    first_token_s: float
    on_disk_s: float
    same_text: bool


def measure(folder: Path, limit_mb_per_s: float, report: Callable[[str], None]) -> BucketRun:
    """Makes the model in `folder` unless it is there, and serves it through the slow line."""
    report("making a random model")
    model = Fleet(folder).make_random("half-billion-with-head", SHAPE)
    size = sum(path.stat().st_size for path in model.blobs)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        report("asking a server that has it on disk")
        expected = _text_of(Path(place), folder / "store", model.name)
        report(f"serving {size / 1e9:.2f} GB at {limit_mb_per_s:g} MB/s")
        with SlowBucket(folder / "store", limit_mb_per_s) as bucket:
            return _served(Path(place), bucket, model.name, size, limit_mb_per_s, expected)


def _served(folder: Path, bucket: SlowBucket, name: str, size: int, limit: float, expected: str) -> BucketRun:
    root = folder / "empty"
    began = time.monotonic()
    with _server(folder, root, f"{PREFIX}/models/{name}", bucket.endpoint) as url:
        listening = time.monotonic()
        _until(lambda: name in _get(f"{url}/v1/models"))
        offered = time.monotonic()
        first, text = _ask(url, name)
        in_memory = _until(lambda: bucket.bytes_sent >= size and bucket.last_byte_at)
        manifest = root / "models" / name / "manifest.json"
        _until(manifest.exists)
        on_disk = manifest.stat().st_mtime - bucket.wall_offset
    return BucketRun(
        weight_bytes=size,
        limit_mb_per_s=limit,
        listening_s=listening - began,
        offered_s=offered - began,
        in_memory_s=in_memory - began,
        first_token_s=first - began,
        on_disk_s=on_disk - began,
        same_text=text == expected,
    )


class SlowBucket:
    """A store's folder as the bucket `bench`, below v1/: whole objects and ranges of them, as S3 gives them out.

    Weights leave it at so many megabytes a second, all connections together.
    """

    def __init__(self, root: Path, limit_mb_per_s: float) -> None:
        self.bytes_sent = 0  # of weights
        self.last_byte_at = 0.0
        self.wall_offset = time.time() - time.monotonic()
        self._root = root
        self._free_at, self._rate = time.monotonic(), limit_mb_per_s * 1e6
        self._lock = threading.Lock()
        bucket = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                bucket._answer(self)

            def do_HEAD(self) -> None:
                bucket._answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> SlowBucket:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        key = urlsplit(handler.path).path.removeprefix("/bench/v1/")
        path = self._root / unquote(key)
        if not path.is_file():
            handler.send_error(404)
            return
        size = path.stat().st_size
        asked = _RANGE.fullmatch(handler.headers["Range"] or "")
        begin, end = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked else (0, size)
        handler.send_response(206 if asked else 200)
        handler.send_header("Content-Length", str(end - begin))
        handler.send_header("ETag", f'"{size}"')
        handler.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
        if asked:
            handler.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        handler.end_headers()
        if handler.command == "GET":
            self._send(handler, path, begin, end, is_slow=key.startswith("blobs/"))

    def _send(self, handler: BaseHTTPRequestHandler, path: Path, begin: int, end: int, *, is_slow: bool) -> None:
        with path.open("rb") as file:
            file.seek(begin)
            while begin < end:
                piece = file.read(min(PIECE_BYTES, end - begin))
                if is_slow:
                    self._take(len(piece))
                handler.wfile.write(piece)
                begin += len(piece)

    def _take(self, count: int) -> None:
        """Waits until the line has carried so many more bytes."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self._rate
            free_at = self._free_at
        time.sleep(max(free_at - time.monotonic(), 0.0))
        with self._lock:
            self.bytes_sent += count
            self.last_byte_at = time.monotonic()


def _environment(endpoint: str) -> dict[str, str]:
    return dict(os.environ) | ENVIRONMENT | {"AWS_ENDPOINT_URL": endpoint}


@contextmanager
def _server(folder: Path, root: Path, source: str, endpoint: str = "") -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (folder / "log").open("ab")
    options = ("--store", str(root), "--host", "127.0.0.1", "--port", str(port))
    process = subprocess.Popen([*OURS, "serve", source, *options], env=_environment(endpoint), stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        _until(lambda: process.poll() is None and _get(f"{url}/live"))
        yield url
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def _text_of(folder: Path, root: Path, name: str) -> str:
    """What the model on disk answers."""
    with _server(folder, root, name) as url:
        return _ask(url, name)[1]


def _ask(url: str, name: str) -> tuple[float, str]:
    """When the first text came, and all of it."""
    body = {"model": name, "prompt": "a b c", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    first, text = 0.0, ""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first = first or time.monotonic()
                text += msgspec.json.decode(line[6:])["choices"][0]["text"]
    if not first:
        raise DovetailError(f"{name}: no answer ({answer.status_code})")
    return first, text


def _get(url: str) -> str:
    try:
        return httpx.get(url, timeout=10).text
    except httpx.TransportError:
        return ""


def _until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + WAIT_S
    while not (found := condition()):
        if time.monotonic() > end:
            raise DovetailError("the server did not get there in time")
        time.sleep(0.05)
    return found
