"""A real S3 server on loopback, and a proxy before it that misbehaves on demand."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

SECRET = "not-to-be-seen-anywhere"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
# Of a request's method, path and number: None = pass it on, or what goes wrong with it.
Rule = Callable[[str, str, int], str | None]


@contextmanager
def s3_server() -> Iterator[tuple[str, Any]]:
    """(endpoint, a client to fill it with)."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key=SECRET,
    )
    try:
        yield endpoint, client
    finally:
        server.stop()


def upload(client: Any, bucket: str, prefix: str, folder: Path) -> None:
    client.create_bucket(Bucket=bucket)
    for path in folder.iterdir():
        client.put_object(Bucket=bucket, Key=f"{prefix}/{path.name}", Body=path.read_bytes())


class FaultyProxy:
    """Passes requests on to `endpoint`, except where `rule` says: "500", "403", "cut" (the body ends half-way),
    "stall" (it never goes on)."""

    def __init__(self, endpoint: str) -> None:
        self.rule: Rule = lambda method, path, number: None
        self.requests: list[tuple[str, str]] = []  # method and path
        self.ranges: list[str] = []
        self.before_range: Callable[[str], object] = lambda asked: None  # what a ranged request waits for
        self._released = threading.Event()
        proxy, target = self, endpoint.removeprefix("http://")

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy._answer(self, target)

            do_GET = do_HEAD = do_PUT = handle_any  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler, target: str) -> None:
        self.requests.append((handler.command, handler.path))
        if handler.headers["Range"]:
            self.ranges.append(handler.headers["Range"])
            self.before_range(handler.headers["Range"])
        fault = self.rule(handler.command, handler.path, len(self.requests))
        if fault in ("500", "403"):
            handler.send_response(int(fault))
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        connection = http.client.HTTPConnection(target, timeout=30)
        try:
            connection.request(handler.command, handler.path, headers=dict(handler.headers))
            reply = connection.getresponse()
            body = reply.read()
            handler.send_response(reply.status)
            for key, value in reply.getheaders():
                if key.lower() not in ("connection", "transfer-encoding", "content-length", "server", "date"):
                    handler.send_header(key, value)
            length = reply.headers["Content-Length"] if handler.command == "HEAD" else len(body)
            handler.send_header("Content-Length", str(length or 0))
            handler.end_headers()
            handler.wfile.write(body[: len(body) // 2] if fault else body)
            if fault == "stall":
                handler.wfile.flush()
                self._released.wait(60)
            if fault:
                handler.close_connection = True
        finally:
            connection.close()


def use(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests of the store go there."""
    for key, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": endpoint}).items():
        monkeypatch.setenv(key, value)


@contextmanager
def proxied(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """All requests of the store go through it."""
    proxy = FaultyProxy(endpoint)
    use(proxy.endpoint, monkeypatch)
    yield proxy
    proxy.close()
