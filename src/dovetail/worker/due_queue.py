"""Orders for a thread, the most urgent first; of equally urgent ones the first that came."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterator
from typing import Generic, TypeVar

OrderT = TypeVar("OrderT")


class DueQueue(Generic[OrderT]):
    def __init__(self) -> None:
        self._entries: queue.PriorityQueue[tuple[float, int, OrderT | None]] = queue.PriorityQueue()
        self._serials = itertools.count()  # so that orders are never compared themselves

    def put(self, due_s: float, order: OrderT) -> None:
        self._entries.put((due_s, next(self._serials), order))

    def stop(self) -> None:
        """Before anything that is due."""
        self._entries.put((float("-inf"), next(self._serials), None))

    def __iter__(self) -> Iterator[OrderT]:
        """Waits for each, until it is stopped."""
        while (order := self._entries.get()[2]) is not None:
            yield order
