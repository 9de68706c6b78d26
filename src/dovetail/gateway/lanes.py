"""Threads for work on text that would stop the event loop: few of them, taken in turns by the clients that wait.

A client that brings a hundred long texts is served one, then the next client one. Work that nobody waits for any more
is not begun; what has begun is bounded by the limits on bodies and texts.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from dovetail.confined import thread_gives_way
from dovetail.errors import Overloaded
from dovetail.gateway.clients import current_client
from dovetail.machine import trim_memory

Result = TypeVar("Result")

SHORT_CHARS = 64 * 1024  # of a text that is tokenised in a few hundredths of a second
_MAX_WAITING = 256  # in one lane; one client alone may have half of them
_TRIM_BYTES = 128 * 1024  # after work on so much, memory is given back to the system
_TRIM_AFTER_S = 1.0
_LONG_NICENESS = 10  # whoever brings a long text waits for its prefill anyway; streams go on meanwhile
_RESTS = 3.0  # a quarter of a core, whoever sends how much


class Lane:
    """Work in `num_threads` threads. `rests`: work that holds the interpreter is followed by a pause so many times as
    long as it took, in which the event loop, and on a small machine the worker, come in. Nobody waits for the pause
    but whoever is next. `niceness`: of the threads, for work that holds the interpreter next to never; who waited for
    it with the interpreter in hand would hold everybody."""

    def __init__(self, name: str, num_threads: int, *, rests: float = 0.0, niceness: int = 0) -> None:
        self._executor = ThreadPoolExecutor(
            num_threads, thread_name_prefix=name, initializer=thread_gives_way, initargs=(niceness,)
        )
        self._rests = rests
        self._free = num_threads
        self._waiting: OrderedDict[str, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    async def run(self, work: Callable[[], Result]) -> Result:
        client = current_client.get()
        queue = self._waiting.get(client, deque())
        if len(queue) >= _MAX_WAITING - self.num_waiting:
            raise Overloaded("too many texts are waiting to be read", code="texts_full", retry_after_s=1)
        entry = (work, asyncio.get_running_loop().create_future())
        queue.append(entry)
        self._waiting[client] = queue
        self._begin()
        try:
            result: Result = await entry[1]
            return result
        finally:
            if entry in queue:  # cancelled before its turn
                self._remove(client, entry)

    def _begin(self) -> None:
        while self._free and self._waiting:
            client, queue = next(iter(self._waiting.items()))
            self._waiting.move_to_end(client)
            work, waiter = queue[0]
            self._remove(client, queue[0])
            self._free -= 1
            loop = asyncio.get_running_loop()
            done = loop.run_in_executor(self._executor, work)
            done.add_done_callback(partial(self._end, waiter, loop.time()))

    def _end(self, waiter: asyncio.Future[Any], started_s: float, done: asyncio.Future[Any]) -> None:
        """The answer goes out at once; the thread is free for the next one after its pause."""
        loop, error = done.get_loop(), done.exception()
        if not waiter.done():
            if error is not None:
                waiter.set_exception(error)
            else:
                waiter.set_result(done.result())
        if self._rests:
            loop.call_later(self._rests * (loop.time() - started_s), self._free_one)
        else:
            self._free_one()

    def _free_one(self) -> None:
        self._free += 1
        self._begin()

    def _remove(self, client: str, entry: tuple[Callable[[], Any], asyncio.Future[Any]]) -> None:
        queue = self._waiting[client]
        queue.remove(entry)
        if not queue:
            del self._waiting[client]


class TextLanes:
    """The lanes of a gateway, and the memory that their work leaves behind."""

    def __init__(self) -> None:
        self.parse = Lane("parse", 1, rests=_RESTS)
        self.write = Lane("write", 1, rests=_RESTS)  # of answers that are long
        self._short = Lane("text", 2)
        self._long = Lane("long-text", 1, niceness=_LONG_NICENESS)
        self._trim: asyncio.TimerHandle | None = None

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """Work on a text of this size."""
        try:
            return await (self._short if size <= SHORT_CHARS else self._long).run(work)
        finally:
            self.note(size)

    def note(self, size: int) -> None:
        """So much was worked on; some time after the last of it the C library gives back what it kept."""
        if size >= _TRIM_BYTES:
            if self._trim is not None:
                self._trim.cancel()
            loop = asyncio.get_running_loop()
            self._trim = loop.call_later(_TRIM_AFTER_S, lambda: loop.run_in_executor(None, trim_memory))
