"""The page's own files, as responses: compressed once, and not sent again to a browser that has them."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from importlib.resources import files

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response

_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
# Nothing of another host, nothing inline, in nobody's frame.
_HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # ask each time, with the tag
    "vary": "Accept-Encoding",
}


@dataclass(frozen=True)
class _File:
    content: bytes
    compressed: bytes
    media_type: str
    tag: str


class PageFiles:
    def __init__(self) -> None:
        here = files(__package__).iterdir()
        self._files = {item.name: _read(item.name, item.read_bytes()) for item in here if _kind(item.name) in _TYPES}

    def answer(self, name: str, headers: Headers) -> Response:
        file = self._files.get(name)
        if file is None:
            raise HTTPException(404)
        sent = _HEADERS | {"etag": file.tag}
        if file.tag in headers.get("if-none-match", ""):
            return Response(status_code=304, headers=sent)
        if "gzip" in headers.get("accept-encoding", ""):
            return Response(file.compressed, headers=sent | {"content-encoding": "gzip"}, media_type=file.media_type)
        return Response(file.content, headers=sent, media_type=file.media_type)


def _read(name: str, content: bytes) -> _File:
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return _File(content, gzip.compress(content, mtime=0), _TYPES[_kind(name)], tag)


def _kind(name: str) -> str:
    return name.rpartition(".")[2]
