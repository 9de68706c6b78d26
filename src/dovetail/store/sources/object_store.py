"""Reads from an object store (s3://, gs://, az://) by ranged GETs, which are made again until it is hopeless.

Which bucket is in the address; credentials, region and endpoint come from the environment alone (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, …) and appear in no message. Knows bytes and names, not what they mean.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from dovetail.errors import DamagedCheckpoint, SourceError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3://", "gs://", "az://", "abfs://")
_QUERY = re.compile(r"\?\S*")  # may carry a signature
Answer = TypeVar("Answer")


class NoSuchObject(SourceError):
    """The store answers, and has no object of this name."""


class RetryPolicy(msgspec.Struct, frozen=True):
    """How often, and for how long, a request is made before it fails."""

    attempts: int = 6
    first_pause_s: float = 0.2  # doubled each time, and shaken, so that many do not come back at once
    longest_pause_s: float = 10.0
    answer_s: float = 10.0  # to connect and to begin
    min_bytes_per_s: float = 1e6  # a request that is slower than this is given up and made again
    range_bytes: int = 16 << 20  # the largest that is asked for at once


class ObjectInfo(msgspec.Struct, frozen=True):
    size_bytes: int
    version: str  # changes with the object


class Bucket:
    """A folder of an object store."""

    def __init__(self, url: str, retries: RetryPolicy | None = None) -> None:
        self.url = url.rstrip("/")
        self._retries = retries or RetryPolicy()
        self._store = _connect(self.url, self._retries)

    def has(self, path: str) -> bool:
        try:
            self.info(path)
            return True
        except NoSuchObject:
            return False

    def info(self, path: str) -> ObjectInfo:
        import obstore

        meta = self._persist(path, "looking", lambda: obstore.head(self._store, path))
        return ObjectInfo(int(meta["size"]), str(meta["e_tag"] or meta["last_modified"]))

    def write(self, path: str, content: bytes | Path) -> None:
        """A whole object, from memory or from a file."""
        import obstore

        self._persist(path, "writing", lambda: obstore.put(self._store, path, content))

    def read(self, path: str, begin: int, end: int) -> memoryview:
        """Bytes begin..end of an object."""
        return self.read_while(lambda: True, path, begin, end)

    def read_while(self, is_wanted: Callable[[], bool], path: str, begin: int, end: int) -> memoryview:
        """As `read`, but what is no longer wanted is not asked for again."""
        import obstore

        def get() -> memoryview:
            return memoryview(obstore.get_range(self._store, path, start=begin, end=end))

        data = self._persist(path, f"reading at byte {begin:,}", get, is_wanted)
        if len(data) != end - begin:
            raise DamagedCheckpoint(f"{self.url}/{path}: ends at byte {begin + len(data):,}, {end:,} expected")
        return data

    def read_all(self, path: str, limit_bytes: int) -> bytes:
        """A small object, whole."""
        size = self.info(path).size_bytes
        if size > limit_bytes:
            raise DamagedCheckpoint(f"{self.url}/{path}: {size:,} bytes, at most {limit_bytes:,} expected")
        step = self._retries.range_bytes
        return b"".join(self.read(path, at, min(at + step, size)) for at in range(0, size, step))

    def names(self, prefix: str = "") -> list[str]:
        """Of all objects below `prefix`."""
        import obstore

        def listed() -> list[str]:
            return [item["path"] for page in obstore.list(self._store, prefix=prefix or None) for item in page]

        return self._persist(prefix, "listing", listed)

    def _persist(
        self, path: str, what: str, ask: Callable[[], Answer], is_wanted: Callable[[], bool] = lambda: True
    ) -> Answer:
        from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError

        retries = self._retries
        pause_s = retries.first_pause_s
        for attempt in range(retries.attempts):
            try:
                return ask()
            except (NotFoundError, FileNotFoundError):
                raise NoSuchObject(f"{self.url}/{path}: no such object") from None
            except (PermissionDeniedError, UnauthenticatedError) as error:
                hint = "check the credentials in the environment"
                raise SourceError(f"{self.url}/{path}: {_reason(error)}; {hint}") from None
            except (BaseError, OSError) as error:
                if attempt + 1 == retries.attempts or not is_wanted():
                    told = f"{what} failed {attempt + 1} times: {_reason(error)}"
                    raise SourceError(f"{self.url}/{path}: {told}") from None
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, retries.longest_pause_s)
        raise AssertionError("at least one attempt is made")


def is_object_address(text: str) -> bool:
    return text.startswith(SCHEMES)


def _connect(url: str, retries: RetryPolicy) -> ObjectStore:
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    slowest_s = retries.answer_s + retries.range_bytes / retries.min_bytes_per_s
    try:
        return from_url(
            url,
            client_options={
                "timeout": timedelta(seconds=slowest_s),
                "connect_timeout": timedelta(seconds=retries.answer_s),
                "allow_http": True,  # an endpoint of one's own may be plain; which one is said by the environment
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=slowest_s)},  # ours, so that one counts
        )
    except (BaseError, ValueError) as error:
        raise SourceError(f"{url}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """One line without what could be signed."""
    text = str(error).strip().splitlines()
    return _QUERY.sub("", text[0])[:300] if text else type(error).__name__
