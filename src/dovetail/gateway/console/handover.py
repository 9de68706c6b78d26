"""Codes by which `dovetail open` hands its key to the page: each is good for one key, once, for a few minutes.

The address of a page stands in the browser's history and in the list of processes, where a key should not.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass

LIFETIME_S = 300.0  # whoever has no browser here copies the address to one
_MAX_CODES = 64


@dataclass(frozen=True)
class _Held:
    key: str
    until: float


class Handover:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: dict[bytes, _Held] = {}  # by the code's digest, the oldest first

    def issue(self, key: str) -> str:
        self._forget()
        while len(self._held) >= _MAX_CODES:
            del self._held[next(iter(self._held))]
        code = secrets.token_urlsafe(24)
        self._held[_digest(code)] = _Held(key, self._clock() + LIFETIME_S)
        return code

    def redeem(self, code: str) -> str | None:
        """The key, and the code is used up. None = it never was, or is no more."""
        self._forget()
        held = self._held.pop(_digest(code), None)
        return None if held is None else held.key

    def _forget(self) -> None:
        now = self._clock()
        self._held = {code: held for code, held in self._held.items() if held.until > now}


def _digest(code: str) -> bytes:
    return hashlib.sha256(code.encode(errors="surrogateescape")).digest()
