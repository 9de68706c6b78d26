"""What a request waits for before its first token, for whoever watches, and what each part of that wait took.

A stream that is held says it in SSE comments, which clients ignore by the standard; what it took is in headers, or
where those went out before it was known, in the last comment and in the usage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Literal

import msgspec

from dovetail.gateway.generation_task import Delta, Waits
from dovetail.gateway.http.replies import WaitTimes

FIRST_S = 1.0  # a stream that waits longer says what for; its status line goes out with the first word
EVERY_S = 0.5
SILENCE_S = 5.0  # without news the same is said again, so that no proxy takes the connection for dead

HEADERS = ("x-dovetail-queue-ms", "x-dovetail-load-ms", "x-dovetail-first-token-ms")

_MARK = b": dovetail "


class Standing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a request is on its way to the first token."""

    state: Literal["starting", "queued", "loading", "computing"]
    position: int = 0  # queued: 1 = the next that gets a place
    done_bytes: int = 0  # loading: of its weights, where that is known
    total_bytes: int = 0


def wait_times(waits: Waits) -> WaitTimes:
    queue, load, first = (round(1000 * seconds, 1) for seconds in (waits.queue, waits.load, waits.first_token))
    return WaitTimes(queue_ms=queue, load_ms=load, first_token_ms=first)


def headers_of(waits: Waits | None) -> list[tuple[bytes, bytes]]:
    if waits is None:
        return []
    times = wait_times(waits)
    values = (times.queue_ms, times.load_ms, times.first_token_ms)
    return [(name.encode(), str(value).encode()) for name, value in zip(HEADERS, values, strict=True)]


def standing_comment(standing: Standing) -> bytes:
    return _MARK + msgspec.json.encode(standing) + b"\n\n"


def waits_comment(waits: Waits) -> bytes:
    return _MARK + b'{"state":"speaking",' + wait_times(waits).model_dump_json().encode()[1:] + b"\n\n"


class HeldStream:
    """Says in a stream what it waits for: after a moment, when there is news, and now and then without."""

    def __init__(self, look: Callable[[], Standing | None], say: Callable[[bytes], Awaitable[None]]) -> None:
        self._look = look
        self._say = say
        self._last: Standing | None = None
        self._said_s = float("-inf")

    @property
    def has_spoken(self) -> bool:
        return self._last is not None

    async def over(self, run: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """The deltas of a job, which ends with this. Before the first, word of what it waits for."""
        async with aclosing(run) as deltas:
            first = await self._first(deltas)
            if first is None:
                return
            if self.has_spoken and first.waits is not None:
                await self._say(waits_comment(first.waits))
            yield first
            async for delta in deltas:
                yield delta

    async def _first(self, deltas: AsyncGenerator[Delta, None]) -> Delta | None:
        first = asyncio.ensure_future(anext(deltas, None))
        try:
            timeout_s = FIRST_S
            while not (await asyncio.wait({first}, timeout=timeout_s))[0]:
                await self._tell()
                timeout_s = EVERY_S
        finally:
            if not first.done():  # nobody wants it any more; it is over when this is
                first.cancel()
                await asyncio.wait({first})
        return first.result()

    async def _tell(self) -> None:
        standing, now = self._look(), time.monotonic()
        if standing is not None and (standing != self._last or now - self._said_s >= SILENCE_S):
            self._last, self._said_s = standing, now
            await self._say(standing_comment(standing))
