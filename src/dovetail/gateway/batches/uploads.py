"""Bodies that are too large for memory: streamed to disk, counted as they come. A form with a file, or JSON."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from dovetail.errors import InvalidRequest, Overloaded, PayloadTooLarge, RequestTimeout
from dovetail.gateway.batches.store import BatchStore

_MAX_AT_ONCE = 16  # uploads of everyone
_MAX_OF_OWNER = 4
_MAX_FIELDS = 16  # of a form, its file among them
_MAX_FIELD_BYTES = 4096
_FLUSH_BYTES = 1 << 20
_MAX_NAME_CHARS = 255


class Upload:
    """Grows on disk; gone unless it was kept. Raises what a client can act on."""

    def __init__(self, store: BatchStore, max_bytes: int, limit_key: str, announced: int) -> None:
        store.check_room(announced)
        self.path = store.new_upload()
        self.size_bytes = 0
        self._store = store
        self._max_bytes = max_bytes
        self._limit_key = limit_key
        self._pending = bytearray()
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def add(self, piece: bytes) -> None:
        self.size_bytes += len(piece)
        if self.size_bytes > self._max_bytes:
            raise PayloadTooLarge(
                f"the file is larger than {self._max_bytes} bytes ({self._limit_key})", code="file_too_large"
            )
        self._pending += piece

    async def write(self, *, is_last: bool = False) -> None:
        """What has piled up; at the end all of it is on disk."""
        if len(self._pending) < _FLUSH_BYTES and not is_last:
            return
        piece, self._pending = bytes(self._pending), bytearray()

        def work() -> None:
            view = memoryview(piece)
            while view:
                view = view[os.write(self._file, view) :]
            if is_last:
                os.fsync(self._file)

        try:
            await asyncio.to_thread(work)
            self._store.check_room(0)
        except OSError as error:
            raise Overloaded(f"the file cannot be written: {error.strerror}", code="storage_full") from error

    def close(self) -> None:
        os.close(self._file)
        self.path.unlink(missing_ok=True)  # its content has another name by now, or nobody wants it


class Uploads:
    """Those that are on their way, by owner."""

    def __init__(self, store: BatchStore) -> None:
        self._store = store
        self._running: Counter[str] = Counter()

    @contextmanager
    def begin(self, owner: str, max_bytes: int, limit_key: str, announced: int) -> Iterator[Upload]:
        if announced > max_bytes + _MAX_FIELDS * _MAX_FIELD_BYTES:
            raise PayloadTooLarge(f"the file is larger than {max_bytes} bytes ({limit_key})", code="file_too_large")
        if self._running.total() >= _MAX_AT_ONCE or self._running[owner] >= _MAX_OF_OWNER:
            raise Overloaded(
                f"{self._running.total()} files are being uploaded, {self._running[owner]} of them with this key "
                f"({_MAX_AT_ONCE} and {_MAX_OF_OWNER} at a time)",
                code="uploads_full",
                retry_after_s=5,
            )
        self._running[owner] += 1
        upload: Upload | None = None
        try:
            upload = Upload(self._store, max_bytes, limit_key, announced)
            yield upload
        finally:
            if upload is not None:
                upload.close()
            self._running[owner] -= 1


@dataclass
class Form:
    """What a form says beside its file."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None  # None: it had no file


class FormReader:
    """The parts of a form, as they come. The file's bytes go to `on_file`."""

    def __init__(self, content_type: str, on_file: Callable[[bytes], None]) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise InvalidRequest(
                "send the file as multipart/form-data, with the fields 'file' and 'purpose'", param="file"
            )
        self.form = Form()
        self._on_file = on_file
        self._header: list[bytes] = [b"", b""]
        self._disposition = b""
        self._name: str | None = None
        self._value = bytearray()
        self._is_file = self._has_ended = False
        self._num_parts = 0
        try:
            self._parser = MultipartParser(options[b"boundary"], self._callbacks())  # type: ignore[arg-type]
        except FormParserError as error:
            raise InvalidRequest(f"the form cannot be read: {error}") from error

    def _callbacks(self) -> dict[str, Callable[..., None]]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._begin_data,
            "on_part_data": lambda data, start, end: self._add(data[start:end]),
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def feed(self, piece: bytes) -> None:
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise InvalidRequest(f"the form cannot be read: {error}") from error

    def finish(self) -> Form:
        if not self._has_ended:
            raise InvalidRequest("the form ends before its last boundary")
        return self.form

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_FIELDS:
            raise InvalidRequest(f"the form has more than {_MAX_FIELDS} fields")
        self._disposition, self._name, self._is_file = b"", None, False
        self._value.clear()

    def _add_header(self, at: int, piece: bytes) -> None:
        self._header[at] += piece

    def _end_header(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = value
        self._header = [b"", b""]

    def _begin_data(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._name == "file" and b"filename" in options
        if self._is_file:
            if self.form.filename is not None:
                raise InvalidRequest("the form has more than one file", param="file")
            self.form.filename = plain_name(options[b"filename"].decode(errors="replace"))

    def _add(self, piece: bytes) -> None:
        if self._is_file:
            self._on_file(piece)
            return
        self._value += piece
        if len(self._value) > _MAX_FIELD_BYTES:
            raise InvalidRequest(f"a field of the form is longer than {_MAX_FIELD_BYTES} bytes", param=self._name)

    def _end(self) -> None:
        if not self._is_file and self._name:
            self.form.fields[self._name] = self._value.decode(errors="replace")

    def _finish(self) -> None:
        self._has_ended = True


def plain_name(name: str) -> str:
    """What a client calls its file, to be shown: no path, nothing unprintable."""
    last = name.replace("\\", "/").rpartition("/")[2]
    shown = "".join(char for char in last if char.isprintable()).strip()
    return shown[:_MAX_NAME_CHARS] if shown.strip(".") else "file"


async def pieces_of(request: Request, timeout_s: float) -> AsyncIterator[bytes]:
    """Of a body, however long it takes as a whole; each within the time that a small body has."""
    stream = request.stream().__aiter__()
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                piece = await anext(stream, None)
        except TimeoutError:
            raise RequestTimeout(f"nothing came for {timeout_s:g} s", code="timeout") from None
        if piece is None:
            return
        yield piece


async def received_form(request: Request, upload: Upload, timeout_s: float) -> Form:
    reader = FormReader(request.headers.get("content-type", ""), upload.add)
    async for piece in pieces_of(request, timeout_s):
        reader.feed(piece)
        await upload.write()
    form = reader.finish()
    await upload.write(is_last=True)
    return form


async def received_body(request: Request, upload: Upload, timeout_s: float) -> None:
    """As it is."""
    async for piece in pieces_of(request, timeout_s):
        upload.add(piece)
        await upload.write()
    await upload.write(is_last=True)
