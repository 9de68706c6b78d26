"""One neighbour of a cluster as a source of files that are known by their digests: how it is asked, and who may ask.

    GET /weights/<digest>    Range: bytes=<begin>-    Authorization: Dovetail <signature>

The signature is an HMAC of what is asked for, under a token that only machines of the cluster have: the token itself
never travels, and whoever repeats a request that was overheard gets the bytes that were overheard. What comes back is
believed by its digest alone, which came another way.
"""

from __future__ import annotations

import hmac
import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import IO

from dovetail.errors import SourceError

SCHEME = "Dovetail"
STALL_S = 10.0  # to connect, and between two pieces of an answer


def target_of(digest: str) -> str:
    return f"/weights/{digest}"


def signature(token: bytes, target: str, asked_range: str) -> str:
    return hmac.digest(token, f"GET {target} {asked_range}".encode(), "sha256").hex()


class NeighbourFailed(SourceError):
    """This one cannot be had from there; another neighbour may have it."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final  # asking again would be of no use


class Neighbour:
    def __init__(self, address: str, token: bytes, stall_s: float = STALL_S) -> None:
        self.address = address  # host:port
        self._token = token
        self._stall_s = stall_s

    @contextmanager
    def open(self, digest: str, begin: int = 0) -> Iterator[IO[bytes]]:
        """The file from this byte on. Whatever goes wrong with the neighbour, while it is read too, is
        NeighbourFailed."""
        target, asked_range = target_of(digest), f"bytes={begin}-"
        signed = f"{SCHEME} {signature(self._token, target, asked_range)}"
        connection = http.client.HTTPConnection(self.address, timeout=self._stall_s)
        try:
            connection.request("GET", target, headers={"Range": asked_range, "Authorization": signed})
            response = connection.getresponse()
            if response.status != HTTPStatus.PARTIAL_CONTENT:
                is_final = response.status < HTTPStatus.INTERNAL_SERVER_ERROR
                raise NeighbourFailed(f"{self.address}: {response.status} {response.reason}", is_final=is_final)
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise NeighbourFailed(f"{self.address}: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def read(self, digest: str, limit_bytes: int) -> bytes:
        """A small file, whole."""
        with self.open(digest) as response:
            content = response.read(limit_bytes + 1)
        if len(content) > limit_bytes:
            raise NeighbourFailed(f"{self.address}: more than {limit_bytes:,} bytes for {digest}")
        return content
