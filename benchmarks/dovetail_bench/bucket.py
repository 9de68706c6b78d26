"""A model in a bucket behind a slow line, served while it downloads: when what is there, and whether the text is right.

The bucket is moto's S3 server on loopback; a proxy before it hands out answers at a limited rate, all connections
together. The model has random weights.
"""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec

from dovetail.errors import DovetailError
from dovetail_bench.fleet import Fleet
from dovetail_bench.servers import OURS

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "bench",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
PIECE_BYTES = 256 * 1024
WAIT_S = 600.0
PREFIX = "s3://bench/v1"


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
    """Makes the model in `folder` unless it is there, uploads it, and serves it through the slow line."""
    report("making a random model")
    model = Fleet(folder).make(0, shapes=1)[0]
    size = sum(path.stat().st_size for path in model.blobs)
    with tempfile.TemporaryDirectory(dir=folder) as place, _s3_server() as endpoint:
        report("uploading")
        _command(endpoint, "store", "upload", model.name, PREFIX, "--store", str(folder / "store"))
        expected = _text_of(Path(place), folder / "store", model.name)
        report(f"serving {size / 1e9:.2f} GB at {limit_mb_per_s:g} MB/s")
        with SlowProxy(endpoint, limit_mb_per_s) as proxy:
            return _served(Path(place), proxy, model.name, size, limit_mb_per_s, expected)


def _served(folder: Path, proxy: SlowProxy, name: str, size: int, limit: float, expected: str) -> BucketRun:
    root = folder / "empty"
    began = time.monotonic()
    with _server(folder, root, f"{PREFIX}/models/{name}", proxy.endpoint) as url:
        listening = time.monotonic()
        _until(lambda: name in _get(f"{url}/v1/models"))
        offered = time.monotonic()
        first, text = _ask(url, name)
        in_memory = _until(lambda: proxy.bytes_sent >= size and proxy.last_byte_at)
        manifest = root / "models" / name / "manifest.json"
        _until(manifest.exists)
        on_disk = manifest.stat().st_mtime - proxy.wall_offset
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


class SlowProxy:
    """Passes requests on; bodies of blobs leave it at so many megabytes a second, all connections together."""

    def __init__(self, endpoint: str, limit_mb_per_s: float) -> None:
        self.bytes_sent = 0
        self.last_byte_at = 0.0
        self.wall_offset = time.time() - time.monotonic()
        self._free_at, self._rate = time.monotonic(), limit_mb_per_s * 1e6
        self._lock = threading.Lock()
        proxy, target = self, endpoint.removeprefix("http://")

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy._answer(self, target)

            do_GET = do_HEAD = handle_any  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> SlowProxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler, target: str) -> None:
        connection = http.client.HTTPConnection(target, timeout=60)
        try:
            connection.request(handler.command, handler.path, headers=dict(handler.headers))
            reply = connection.getresponse()
            handler.send_response(reply.status)
            for key, value in reply.getheaders():
                if key.lower() not in ("connection", "transfer-encoding", "server", "date"):
                    handler.send_header(key, value)
            handler.end_headers()
            while piece := reply.read(PIECE_BYTES):
                if "/blobs/" in handler.path:
                    self._take(len(piece))
                handler.wfile.write(piece)
        finally:
            connection.close()

    def _take(self, count: int) -> None:
        """Waits until the line has carried so many more bytes."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self._rate
            free_at = self._free_at
        time.sleep(max(free_at - time.monotonic(), 0.0))
        with self._lock:
            self.bytes_sent += count
            self.last_byte_at = time.monotonic()


@contextmanager
def _s3_server() -> Iterator[str]:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    keys = {"aws_access_key_id": "bench", "aws_secret_access_key": "bench"}
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys).create_bucket(Bucket="bench")
    try:
        yield endpoint
    finally:
        server.stop()


def _environment(endpoint: str) -> dict[str, str]:
    return dict(os.environ) | ENVIRONMENT | {"AWS_ENDPOINT_URL": endpoint}


def _command(endpoint: str, *words: str) -> None:
    done = subprocess.run([*OURS, *words], env=_environment(endpoint), capture_output=True, text=True)
    if done.returncode:
        raise DovetailError(f"dovetail {' '.join(words)}: {done.stderr.strip()}")


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
