"""What a node says, sorted: what its driver carries out goes into `outbox`, what becomes of requests and instances into
`mailbox`, and every line that the log of decisions has of it is written here.
"""

from __future__ import annotations

from collections import deque

from dovetail import logschema
from dovetail.eventlog import EventLog
from dovetail.node import events, protocol
from dovetail.node.log_lines import note_event, note_turn
from dovetail.node.node import Node
from dovetail.policy.work import Work
from dovetail.profiles.files import hosting_values


class Speech:
    def __init__(self, node: Node, log: EventLog | None) -> None:
        self.outbox: deque[events.Output] = deque()
        self.mailbox: deque[protocol.Notice] = deque()
        self.places: dict[int, tuple[int, Work]] = {}  # by request: its instance
        self.load_asked_s: dict[int, float] = {}  # by instance: since when its weights are awaited
        self._node = node
        self._log = log
        self._loaded: set[int] = set()

    def start_log(self, device: str) -> None:
        """First line of a real node's log: what a simulation of the same node needs. Its models follow as they come."""
        if self._log is not None:
            node = self._node
            memory_bytes, composition = node.device.ledger.capacity, node.composition.values()
            self._log.header(
                real=True, node=node.name, device=device, memory_bytes=memory_bytes, composition=composition
            )

    def note_turn(self, turn: events.Turn, now: float) -> None:
        if self._log is not None and self._log.is_detailed:
            note_turn(self._log, self._node.name, turn, now)

    def note_hosting(self, model: str, now: float) -> None:
        if self._log is not None:
            self._log.write(now, logschema.HOSTING, model=model, **hosting_values(self._node.device.hostings[model]))

    def clear(self) -> None:
        """The device is gone."""
        for kept in (self.outbox, self.mailbox, self.places, self.load_asked_s, self._loaded):
            kept.clear()

    def loaded(self, instance: int) -> float:
        """Its weights are there; returns since when they were awaited."""
        self._loaded.add(instance)
        return self.load_asked_s.pop(instance)

    def enter(self, work: Work, instance: int, now: float) -> None:
        """It has a place; it takes part in turns as soon as the weights are there."""
        if self._is_loaded(instance) and not work.prepares:
            self._tell(events.Enter(work, instance), now)

    def leave(self, work: Work, instance: int, now: float) -> None:
        if self._is_loaded(instance) and not work.prepares:
            self._tell(events.Leave(work, instance), now)

    def _is_loaded(self, instance_id: int) -> bool:
        """Its weights are on the device, though it may be closing."""
        if instance_id in self._loaded:
            return True
        instance = self._node.instances.get(instance_id)
        return instance is not None and instance.hosting.weights_in_place

    def pass_on(self, now: float) -> None:
        said = self._node.outbox
        while said:
            self._hear(said.pop(0), now)

    def _hear(self, said: events.Said, now: float) -> None:
        if isinstance(said, events.SetTimer):
            self.outbox.append(said)
        elif isinstance(said, events.StartLoad):
            self.load_asked_s[said.instance] = now
            self._note(said, now)
            self.outbox.append(said)
        elif isinstance(said, events.StartResize | events.FirstToken | events.Resumed):
            self._note(said, now)
            self.outbox.append(said)
        elif isinstance(said, events.StartUnload):
            self._loaded.discard(said.instance)
            self._tell(said, now)
        else:
            self._notice(said, now)

    def _notice(self, said: protocol.Notice, now: float) -> None:
        if isinstance(said, protocol.Finished):
            del self.places[said.request.id]
            self.outbox.append(said)
        else:
            self._note(said, now)
        if isinstance(said, protocol.Evicted | protocol.HandedOver):
            instance, work = self.places.pop(said.request.id)
            self.leave(work, instance, now)
        elif isinstance(said, protocol.InstanceGone):
            self.outbox.append(said)
        self.mailbox.append(said)

    def _tell(self, output: events.Enter | events.Leave | events.StartUnload, now: float) -> None:
        if self._log is not None and self._log.is_detailed:
            self._note(output, now)
        self.outbox.append(output)

    def _note(self, said: events.Output | protocol.Notice, now: float) -> None:
        if self._log is not None:
            note_event(self._log, self._node.name, said, now)
