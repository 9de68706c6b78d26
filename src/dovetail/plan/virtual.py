"""An event loop in virtual time: nothing waits, the clock jumps to the next timer. What runs on it cannot tell."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.DefaultSelector):
    """Where a loop would sleep until a socket or a timer is ready."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("all wait for each other: virtual time has no timer left to jump to")
        if timeout > 0:
            self._jump(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual_s = 0.0
        super().__init__(_Jump(self._advance))

    def time(self) -> float:
        return self._virtual_s

    def _advance(self, seconds: float) -> None:
        self._virtual_s += seconds


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
