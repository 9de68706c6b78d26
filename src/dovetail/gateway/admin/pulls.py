"""Pulls that a running server does on the side: each in a thread of its own, with progress that anybody may look at.

How a model is fetched and converted is the store's; this knows when it began, how far it is, and how it ended.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from dovetail.errors import DovetailError, EngineFailed, SourceError
from dovetail.types import ModelCard

logger = logging.getLogger("dovetail.gateway")

MAX_AT_ONCE = 2  # converting is work for cores that are there to serve
_TELL_S = 5.0  # how often the log says how far a pull is
_KEPT = 32  # ended ones that can still be looked at

Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all (0 = not known)
OnServable = Callable[[ModelCard], None]


class Puller(Protocol):
    """What fetches models, of `store.Catalogue`."""

    def pull(self, source: str, name: str, layout: str, progress: Progress, on_servable: OnServable) -> ModelCard:
        """`on_servable` is called where the model can be loaded while the rest of it comes."""


@dataclass(eq=False)
class Pull:
    """One model on its way into the store. Written by its thread, read by anyone."""

    name: str
    source: str
    layout: str  # as the configuration has it
    started: float  # Unix seconds
    state: Literal["waiting", "running", "done", "failed", "cancelled"] = "waiting"
    stage: str = ""  # download, unpack, convert
    done_bytes: int = 0
    total_bytes: int = 0  # 0 = not known
    error: str | None = None
    is_cancelled: bool = False
    told: float = 0.0  # when the log last said how far it is (monotonic)

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "failed", "cancelled")

    def describe(self) -> str:
        if not self.stage:
            return self.state
        share = f" {100 * self.done_bytes / self.total_bytes:.0f} %" if self.total_bytes else ""
        return f"{self.stage}{share}"

    def report(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """The store calls this as it goes; what is raised here ends the pull, its downloads and its files."""
        if self.is_cancelled:
            raise SourceError(f"{self.source}: the pull was cancelled")
        is_new, now = stage != self.stage, time.monotonic()
        self.stage, self.done_bytes, self.total_bytes = stage, done_bytes, total_bytes
        if total_bytes and (is_new or now - self.told >= _TELL_S):
            self.told = now
            logger.info("%s: %s, %.0f of %.0f MB", self.name, self.describe(), done_bytes / 1e6, total_bytes / 1e6)


class Pulls:
    def __init__(self, puller: Puller) -> None:
        self._puller = puller
        self._pulls: deque[Pull] = deque()
        self._places = asyncio.Semaphore(MAX_AT_ONCE)

    def all(self) -> list[Pull]:
        return list(self._pulls)

    def begin(self, name: str, source: str, layout: str, now: float) -> Pull:
        ended = [pull for pull in self._pulls if pull.is_over]
        for pull in ended[: max(len(ended) - _KEPT + 1, 0)]:
            self._pulls.remove(pull)
        pull = Pull(name, source, layout, now)
        self._pulls.append(pull)
        return pull

    def cancel(self, name: str) -> None:
        for pull in self._pulls:
            if pull.name == name and not pull.is_over:
                pull.is_cancelled = True

    async def run(self, pull: Pull, on_servable: OnServable) -> ModelCard | None:
        """The model once it is there; None if it was cancelled. Raises DovetailError when it cannot be had.
        `on_servable` is called before that for a model that can be served while it downloads."""
        loop = asyncio.get_running_loop()

        def announce(card: ModelCard) -> None:
            loop.call_soon_threadsafe(on_servable, card)

        async with self._places:
            if pull.is_cancelled:
                pull.state = "cancelled"
                return None
            pull.state = "running"
            try:
                card = await _in_thread(
                    lambda: self._puller.pull(pull.source, pull.name, pull.layout, pull.report, announce), pull.name
                )
            except (DovetailError, OSError) as error:
                pull.state = "cancelled" if pull.is_cancelled else "failed"
                pull.error = str(error)
                if pull.is_cancelled:
                    return None
                raise
            pull.state = "cancelled" if pull.is_cancelled else "done"
            return None if pull.is_cancelled else card


async def _in_thread(work: Callable[[], ModelCard], name: str) -> ModelCard:
    """A thread that does not hold up the end of the process, as those of `asyncio.to_thread` do."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[ModelCard] = loop.create_future()

    def run() -> None:
        outcome: ModelCard | Exception = EngineFailed(f"the pull of '{name}' ended unexpectedly; the log says how")
        try:
            outcome = work()
        except (DovetailError, OSError) as error:
            outcome = error
        finally:  # whatever else is raised is shown by the thread's own hook
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, result, outcome)

    threading.Thread(target=run, daemon=True, name=f"pull-{name}").start()
    return await result


def _settle(result: asyncio.Future[ModelCard], outcome: ModelCard | Exception) -> None:
    if result.done():  # nobody waits any more
        return
    if isinstance(outcome, Exception):
        result.set_exception(outcome)
    else:
        result.set_result(outcome)
