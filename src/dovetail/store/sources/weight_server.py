"""Gives neighbours of the cluster what this store holds: blobs, manifests and the files beside them, by digest.

A thread with a loop of its own. Who has not signed a request with the cluster's token learns nothing, not even what is
there. A digest is looked up, never made into a path from what was sent; bytes go from the file, or from the host pool
where they are in memory already, to the socket, a slice at a time.

One form of request is all that there is, so that no HTTP library reads what strangers send before they have signed; and
a file goes out by `sendfile`, memory of the pool without a copy, neither of which uvicorn does.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import re
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import IO, NamedTuple

from dovetail.errors import CheckpointError, DamagedCheckpoint, OutOfMemory
from dovetail.store.format.manifest import MANIFEST, blob_path, is_stored, read_manifest
from dovetail.store.host_pool.lease import Lease
from dovetail.store.host_pool.pool import HostPool
from dovetail.store.paths import StorePaths
from dovetail.store.sources.neighbour import SCHEME, signature

log = logging.getLogger("dovetail.store")

MAX_CONNECTIONS = 64
MAX_HEAD_BYTES = 8192
HEAD_S = 5.0  # for a whole request
SLICE_BYTES = 8 << 20
SLICE_S = 30.0  # a neighbour that takes a slice more slowly than this is given up
MEMORY_BYTES = 256 << 10  # of the pool, copied for the socket at once

_REQUEST = re.compile(r"GET (/weights/([0-9a-f]{64})) HTTP/1\.[01]")
_RANGE = re.compile(r"bytes=([0-9]{1,15})-([0-9]{1,15})?")


class Refused(Exception):
    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class Asked(NamedTuple):
    digest: str
    begin: int
    end: int | None  # after the last byte; None = to the end


def read_request(head: bytes, token: bytes) -> Asked:
    """Raises Refused. Who has not signed is told only that."""
    line, *fields = head.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    asked_range = headers.get("range", "")
    target = line.split(" ")[1] if line.count(" ") == 2 else ""
    signed = f"{SCHEME} {signature(token, target, asked_range)}"
    if not hmac.compare_digest(headers.get("authorization", "").encode("latin-1"), signed.encode()):
        raise Refused(HTTPStatus.UNAUTHORIZED)
    request, bounds = _REQUEST.fullmatch(line), _RANGE.fullmatch(asked_range)
    if request is None:
        raise Refused(HTTPStatus.NOT_FOUND)
    if bounds is None:
        raise Refused(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
    return Asked(request[2], int(bounds[1]), int(bounds[2]) + 1 if bounds[2] else None)


class DigestIndex:
    """Where what has a digest lies."""

    def __init__(self, paths: StorePaths) -> None:
        self._paths = paths
        self._files: dict[Path, tuple[int, dict[str, Path]]] = {}  # by folder: when its manifest was written, and what

    def find(self, digest: str) -> Path | None:
        blob = blob_path(self._paths.root, digest)
        if blob.is_file() and not blob.parent.is_symlink():
            return blob
        return next((files[digest] for files in self._small_files() if digest in files), None)

    def _small_files(self) -> Iterator[dict[str, Path]]:
        for folder in self._paths.folders():
            with suppress(CheckpointError, OSError):  # what cannot be read is nobody's to have
                if is_stored(folder):
                    yield self._of(folder)

    def _of(self, folder: Path) -> dict[str, Path]:
        written = (folder / MANIFEST).stat().st_mtime_ns
        known = self._files.get(folder)
        if known is None or known[0] != written:
            manifest = read_manifest(folder)
            files = {digest: folder / name for name, digest in manifest.files.items()}
            known = self._files[folder] = written, files | {manifest.checksum: folder / MANIFEST}
        return known[1]


class WeightServer:
    """`address` is where neighbours find it, until `close`."""

    def __init__(self, paths: StorePaths, token: bytes, host: str, port: int = 0, pool: HostPool | None = None) -> None:
        self._token = token
        self._index = DigestIndex(paths)
        self._looking = asyncio.Lock()
        self._pool = pool
        self._connections: set[asyncio.Task[None]] = set()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family)
        self.address = f"[{host}]" if ":" in host else host
        self.address += f":{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()  # not uvloop's, which has no sendfile
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="weight-server")
        self._thread.start()
        self._is_up.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        start = asyncio.start_server(self._accept, sock=self._listener, limit=MAX_HEAD_BYTES)
        server = self._loop.run_until_complete(start)
        self._loop.call_soon(self._is_up.set)
        self._loop.run_forever()
        server.close()
        for task in self._connections:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._connections, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._connections.add(task)
        try:
            await self._answer(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()  # it went away, or was too slow
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
            asked = read_request(head.removesuffix(b"\r\n\r\n"), self._token)
            with closing(await self._open(asked.digest)) as file:
                await self._send(writer, file, asked)
        except Refused as refused:
            writer.write(_head(refused.status, 0))
            await writer.drain()

    async def _open(self, digest: str) -> IO[bytes]:
        async with self._looking:
            path = await asyncio.to_thread(self._index.find, digest)
        if path is None:
            raise Refused(HTTPStatus.NOT_FOUND)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            raise Refused(HTTPStatus.NOT_FOUND) from None
        file = os.fdopen(descriptor, "rb", buffering=0)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            file.close()
            raise Refused(HTTPStatus.NOT_FOUND)
        return file

    async def _send(self, writer: asyncio.StreamWriter, file: IO[bytes], asked: Asked) -> None:
        size = os.fstat(file.fileno()).st_size
        begin, end = asked.begin, size if asked.end is None else min(asked.end, size)
        if begin > end or (begin == end and size):
            raise Refused(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
        more = f"Content-Range: bytes {begin}-{max(end - 1, 0)}/{size}\r\n"
        writer.write(_head(HTTPStatus.PARTIAL_CONTENT, end - begin, more))
        await writer.drain()
        with self._in_memory(asked.digest, size) as lease:
            for at in range(begin, end, SLICE_BYTES):
                async with asyncio.timeout(SLICE_S):
                    upto = min(at + SLICE_BYTES, end)
                    if lease is not None:
                        await _send_memory(writer, lease, at, upto)
                    else:
                        await self._loop.sendfile(writer.transport, file, at, upto - at)

    @contextmanager
    def _in_memory(self, digest: str, size: int) -> Iterator[Lease | None]:
        """The host pool's copy, if it has all of it."""
        lease = None
        if self._pool is not None and digest in self._pool.stats().ready_keys:
            with suppress(OutOfMemory, DamagedCheckpoint):
                lease = self._pool.reserve(digest, size)
        try:
            is_whole = lease is not None and not lease.is_loader and lease.arrived_bytes == size
            yield lease if is_whole else None
        finally:
            if lease is not None:
                lease.close()


async def _send_memory(writer: asyncio.StreamWriter, lease: Lease, begin: int, end: int) -> None:
    for piece in lease.pieces(begin, end):
        for at in range(0, len(piece), MEMORY_BYTES):
            writer.write(bytes(piece[at : at + MEMORY_BYTES]))  # it may lie there when the lease is closed
            await writer.drain()


def _head(status: HTTPStatus, length: int, more: str = "") -> bytes:
    text = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Length: {length}\r\nConnection: close\r\n{more}\r\n"
    return text.encode()


def address_towards(host: str) -> str:
    """This machine's own address on the way to `host`: where those find it who are there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        found: str = probe.getsockname()[0]
        return found
