"""Nodes that are to be left alone: nothing new goes there, and what is there moves away, a few answers at a time.

An answer that nobody else takes goes on where it is. A node is drained when it has nothing left.
"""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.cluster.handle import NodeHandle
from dovetail.cluster.migration import Migrations
from dovetail.cluster.request import RequestState, placed_on

ASK_AGAIN_S = 0.5  # one that nobody took
AT_ONCE = 4  # answers on their way: some are computed while others wait to be handed over


class Drain:
    """One node's."""

    def __init__(self, node: NodeHandle, migrations: Migrations, works: Mapping[int, RequestState]) -> None:
        self.node = node
        self.next_s: float | None = None  # when to look again though nothing has happened
        self._migrations = migrations
        self._works = works
        self._asked_s: dict[int, float] = {}  # by request: when it was last tried to move it
        node.is_draining = True

    def left(self) -> list[int]:
        """Requests that are there."""
        return [work.id for work in placed_on(self._works.values(), self.node)]

    @property
    def is_done(self) -> bool:
        return not self.left() and not self._migrations.of_destination(self.node)

    def step(self, now: float) -> None:
        """The next answers move, while few are on their way."""
        self.next_s = None
        there = self.left()
        self._asked_s = {id: at_s for id, at_s in self._asked_s.items() if id in there}
        while len(self._migrations.of_source(self.node)) < AT_ONCE:
            there = [id for id in there if id not in self._migrations]
            if not there:
                return
            id = min(there, key=lambda one: (self._asked_s.get(one, float("-inf")), one))
            last_s = self._asked_s.get(id)
            if last_s is not None and now < last_s + ASK_AGAIN_S:
                self.next_s = last_s + ASK_AGAIN_S
                return
            self._asked_s[id] = now
            self._migrations.begin(id, "drain")
