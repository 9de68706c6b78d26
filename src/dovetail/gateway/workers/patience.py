"""How long anybody waits where there is no worker at all: one that never comes back must not hold requests for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dovetail.cluster.dispatch import Dispatcher
from dovetail.errors import Overloaded, RequestError, WorkerLost

HOPELESS_S = 30.0  # without any worker: nobody waits for one any longer
POSITIONS_S = 0.25  # how old the order of those who wait may be when it is told


class Patience:
    def __init__(self, dispatcher: Dispatcher, give_up: Callable[[RequestError], None]) -> None:
        """`give_up`: whoever waits hears this."""
        self._dispatcher = dispatcher
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None  # runs while there is no worker

    def lost(self, lost: WorkerLost) -> None:
        if self._timer is None and not any(one.up for one in self._dispatcher.nodes.values()):
            self._timer = asyncio.get_running_loop().call_later(HOPELESS_S, self._end, lost)

    def found(self) -> None:
        """A worker is up, or there is nobody left who waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, lost: WorkerLost) -> None:
        """Those who come later have a new worker's time."""
        self._timer = None
        message = f"{lost.message}, and no worker has come up for {HOPELESS_S:g} s"
        self._give_up(Overloaded(message, code="no_worker", retry_after_s=HOPELESS_S))


class Positions:
    """Of those without a place: 1 = the next. Counted once for all who ask within a moment."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._looked_s, self._known = float("-inf"), dict[str, int]()

    def of(self, request_id: str) -> int:
        now = time.monotonic()
        if now - self._looked_s > POSITIONS_S:
            self._looked_s, self._known = now, self._dispatcher.positions()
        return self._known.get(request_id, len(self._known) + 1)
