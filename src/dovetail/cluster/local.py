"""Controller and nodes in one process: what they say to each other arrives at once, or as late as a fault has it.

A driver reports what happened, carries out what is in `outbox`, in order, and asks `next_turn` for a device that is
free. It decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

from dovetail.cluster.decisions import Refused, Warmed
from dovetail.cluster.intake import Submission
from dovetail.cluster.runtime import Runtime
from dovetail.eventlog import EventLog
from dovetail.node import events
from dovetail.node.node import Node
from dovetail.node.protocol import Answer, Check, Notice, Offered, Order, Propose, Question, Warm
from dovetail.node.protocol import Refused as Refuses
from dovetail.node.runtime import NodeRuntime
from dovetail.node.speech import Output as NodeOutput
from dovetail.node.work import Work
from dovetail.policy.headroom import Refusal, SloRule
from dovetail.policy.knobs import Knobs
from dovetail.policy.placement import DeviceKind, Hosting

# What a driver carries out or is told, with the node that it is about; of a refused request there is none.
Output = NodeOutput | Refused | Warmed


class LocalNode:
    """A `cluster.handle.NodeHandle` of a node in this process."""

    def __init__(self, runtime: NodeRuntime) -> None:
        self.runtime = runtime
        self.name = runtime.name
        self.kind: DeviceKind = runtime.kind
        self.is_draining = False
        self.lag_s = 0.0  # what the node says of itself is heard this late
        self.said_s = 0.0  # when the last of it is
        self._offers: dict[str, tuple[Hosting, Offered]] = {}

    @property
    def up(self) -> bool:
        return self.runtime.up

    @property
    def in_use(self) -> bool:
        return self.runtime.node.in_use

    @property
    def fullness(self) -> float:
        return self.runtime.fullness

    @property
    def free_bytes(self) -> int:
        return self.runtime.node.residency.ledger.available

    @property
    def is_idle(self) -> bool:
        return self.runtime.is_idle

    def offer_of(self, model: str) -> Offered | None:
        hosting = self.runtime.node.admit.hostings.get(model)
        if hosting is None:
            return None
        known = self._offers.get(model)
        if known is None or known[0] is not hosting:
            known = self._offers[model] = hosting, self.runtime.offer_of(model)
        return known[1]

    def ask(self, question: Question, now: float) -> Answer | int:
        if self.is_draining and isinstance(question, Propose | Check | Warm):
            return Refuses(Refusal.CLOSED)
        return self.runtime.answer(question, now)

    def order(self, order: Order, now: float) -> None:
        self.runtime.obey(order, now)


class LocalCluster:
    def __init__(
        self, nodes: Sequence[Node], knobs: Knobs, *, rule: SloRule | None = None, log: EventLog | None = None
    ) -> None:
        self.outbox: deque[tuple[NodeRuntime | None, Output]] = deque()
        self.touched: dict[str, NodeRuntime] = {}  # nodes where something happened since their turn was last chosen
        self._dirty: list[NodeRuntime] = []
        self.nodes = [NodeRuntime(node, self._dirty, log) for node in nodes]
        self.handles = {node.name: LocalNode(node) for node in self.nodes}
        self.runtime = Runtime(list(self.handles.values()), knobs, rule=rule, log=log)
        self.runtime.progress = self._progress
        self._timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    # Requests

    def submit(self, submission: Submission, now: float) -> list[int]:
        """Returns the number of each open choice."""
        ids = self.runtime.submit(submission, now)
        self.settle(now)
        return ids

    def cancel(self, ids: Iterable[int], now: float, fate: str = "aborted", reason: str = "") -> None:
        self.runtime.cancel(ids, now, fate, reason)
        self.settle(now)

    def lost(self, node: NodeRuntime, works: Sequence[Work], now: float) -> None:
        """It was noticed that the node is gone, and this work with it."""
        records = {work.id: work.record() for work in works}
        self.runtime.lost(self.handles[node.name], now, records)
        self.settle(now)

    def move_all(self, name: str, now: float) -> None:
        """What is on the node goes on elsewhere, if somebody takes it (L4)."""
        there = [id for id, (node, _) in self.runtime.places.items() if node.name == name]
        for id in there:
            self.runtime.migrate(id, "moved", now)
            self.settle(now)

    def drain(self, name: str, now: float) -> None:
        self.runtime.drain(self.handles[name], now)
        self.settle(now)

    def _progress(self, id: int) -> int | None:
        """Tokens that a request has, where it has a place."""
        node, _ = self.runtime.places[id]
        return self.handles[node.name].runtime.progress(id)

    # Turns

    def next_turn(self, node: NodeRuntime, now: float) -> events.Turn | None:
        """Whose turn it is on a free device. Whoever may ask again does so before that is decided, and what comes of it
        is carried out first."""
        wake_s = self.next_wake_s()
        if wake_s is not None and wake_s <= now:
            self.wake(now)
            if self.outbox:
                self.touched[node.name] = node
                return None
        self.touched.pop(node.name, None)
        turn = node.next_turn(now)
        if node.is_touched:
            self.touched[node.name] = node
        if self._dirty:
            self.settle(now)
        if turn is not None:
            self.touched.pop(node.name, None)
        return turn

    def turn_ended(self, node: NodeRuntime, now: float, finished: Iterable[int]) -> None:
        node.turn_ended(now, finished)
        if self._dirty:
            self.settle(now)

    # Time

    def next_wake_s(self) -> float | None:
        """When `wake` has something to do."""
        next_s = self.runtime.next_wake_s()
        if self._timers and (next_s is None or self._timers[0][0] < next_s):
            return self._timers[0][0]
        return next_s

    def wake(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            _, _, handler, arguments = heappop(self._timers)
            handler(*arguments, now)
        self.settle(now)
        self.runtime.wake(now)
        self.settle(now)

    def _at(self, at_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        self._serial += 1
        heappush(self._timers, (at_s, self._serial, handler, arguments))

    # What nodes and controller say

    def settle(self, now: float) -> None:
        """Until nobody has anything to say."""
        dirty, said = self._dirty, self.runtime.outbox
        while dirty or said:
            while said:
                self.outbox.append((None, said.popleft()))
            if dirty:
                self._hear(dirty.pop(0), now)

    def _hear(self, node: NodeRuntime, now: float) -> None:
        while node.outbox or node.mailbox:
            while node.outbox:
                output = node.outbox.popleft()
                if isinstance(output, events.SetTimer):
                    self._at(output.at_s, node.timer, output.instance, output.epoch)
                else:
                    self.outbox.append((node, output))
            if node.mailbox:
                self._deliver(self.handles[node.name], node.mailbox.popleft(), now)
        if node.is_touched:
            self.touched[node.name] = node

    def _deliver(self, node: LocalNode, notice: Notice, now: float) -> None:
        if node.lag_s or node.said_s > now:
            node.said_s = max(node.said_s, now + node.lag_s)  # late, but in order
            self._at(node.said_s, self.runtime.heard, node, notice)
        else:
            self.runtime.heard(node, notice, now)
