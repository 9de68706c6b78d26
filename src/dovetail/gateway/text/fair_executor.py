"""Work on text that would stop the event loop, in threads or other processes: little of it at a time, and clients that
wait take turns.

A client that brings a hundred long texts is served one, then the next client one. Work that nobody waits for any more
is not begun; what has begun is bounded by the limits on bodies and texts.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from dovetail.errors import Overloaded
from dovetail.gateway.clients import current_client
from dovetail.machine import trim_memory

Result = TypeVar("Result")
Start = Callable[[Callable[[], Any]], asyncio.Future[Any]]

SHORT_SIZE = 64 * 1024  # characters of a text that is tokenised in a few hundredths of a second
_MAX_WAITING = 256  # of one executor; one client alone may have half of them
_TRIM_BYTES = 128 * 1024  # after work on so much, memory is given back to the system
_TRIM_AFTER_S = 1.0
_RESTS = 3.0  # a quarter of a core, whoever sends how much


class FairExecutor:
    """So many pieces of work at a time; `start` begins one. `rests`: work that holds the interpreter is followed by a
    pause so many times as long as it took, in which the event loop, and on a small machine the worker, come in. Nobody
    waits for the pause but whoever is next."""

    def __init__(self, start: Start, num_at_once: int, *, rests: float = 0.0) -> None:
        self._start = start
        self._rests = rests
        self._free = num_at_once
        self._waiting: OrderedDict[str, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        return sum(len(queue) for queue in self._waiting.values())

    async def _run(self, work: Callable[[], Any]) -> Any:
        client = current_client.get()
        queue = self._waiting.get(client, deque())
        if len(queue) >= _MAX_WAITING - self.num_waiting:
            raise Overloaded("too many texts are waiting to be read", code="texts_full", retry_after_s=1)
        entry = (work, asyncio.get_running_loop().create_future())
        queue.append(entry)
        self._waiting[client] = queue
        self._begin()
        try:
            return await entry[1]
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
            done = self._start(work)
            done.add_done_callback(partial(self._end, waiter, loop.time()))

    def _end(self, waiter: asyncio.Future[Any], started_s: float, done: asyncio.Future[Any]) -> None:
        """The answer goes out at once; the next one's turn is after its pause."""
        loop, error = done.get_loop(), None if done.cancelled() else done.exception()
        if not waiter.done():
            if done.cancelled():
                waiter.cancel()
            elif error is not None:
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


class FairThreads(FairExecutor):
    """Work in threads of its own."""

    def __init__(self, name: str, num_threads: int, *, rests: float = 0.0) -> None:
        executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        super().__init__(
            lambda work: asyncio.get_running_loop().run_in_executor(executor, work), num_threads, rests=rests
        )

    async def run(self, work: Callable[[], Result]) -> Result:
        result: Result = await self._run(work)
        return result


class FairCalls(FairExecutor):
    """Calls of other processes, which are awaited here."""

    def __init__(self, num_at_once: int) -> None:
        super().__init__(lambda call: asyncio.ensure_future(call()), num_at_once)

    async def run(self, call: Callable[[], Awaitable[Result]]) -> Result:
        result: Result = await self._run(call)
        return result


class TextExecutors:
    """The executors of a gateway, and the memory that their work leaves behind."""

    def __init__(self) -> None:
        self.parse = FairThreads("parse", 1, rests=_RESTS)
        self.write = FairThreads("write", 1, rests=_RESTS)  # of answers that are long
        self._short, self._long = FairCalls(2), FairCalls(1)  # of tokenizers' processes
        self._trim: asyncio.TimerHandle | None = None

    async def run(self, size: int, call: Callable[[], Awaitable[Result]]) -> Result:
        """Of a process, about a text of this size."""
        try:
            return await (self._short if size <= SHORT_SIZE else self._long).run(call)
        finally:
            self.note(size)

    def note(self, size: int) -> None:
        """So much was worked on; some time after the last of it the C library gives back what it kept."""
        if size >= _TRIM_BYTES:
            if self._trim is not None:
                self._trim.cancel()
            loop = asyncio.get_running_loop()
            self._trim = loop.call_later(_TRIM_AFTER_S, lambda: loop.run_in_executor(None, trim_memory))
