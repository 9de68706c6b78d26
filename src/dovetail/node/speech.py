"""What a node says, sorted: what its driver carries out goes into `outbox`, what becomes of requests and instances into
`mailbox`, and every line that the log of decisions has of it is written here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict

from dovetail import logschema
from dovetail.eventlog import EventLog
from dovetail.node import events, protocol
from dovetail.node.log_lines import note_event, note_turn
from dovetail.node.node import Node
from dovetail.node.work import Work
from dovetail.profiles.files import hosting_values

# What a driver carries out or is told.
Output = (
    events.StartLoad
    | events.StartUnload
    | events.StartResize
    | events.SetTimer
    | events.Enter
    | events.Leave
    | events.Resumed
    | events.FirstToken
    | events.Finished
    | events.InstanceGone
)


class Speech:
    def __init__(self, node: Node, log: EventLog | None) -> None:
        self.outbox: deque[Output] = deque()
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
            memory_bytes, knobs = node.residency.ledger.capacity, asdict(node.knobs)
            self._log.header(real=True, node=node.name, device=device, memory_bytes=memory_bytes, knobs=knobs)

    def note_turn(self, turn: events.Turn, now: float) -> None:
        if self._log is not None and self._log.is_detailed:
            note_turn(self._log, self._node.name, turn, now)

    def note_hosting(self, model: str, now: float) -> None:
        if self._log is not None:
            self._log.write(now, logschema.HOSTING, model=model, **hosting_values(self._node.admit.hostings[model]))

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

    def _hear(self, said: events.Command | events.Notice, now: float) -> None:
        if isinstance(said, events.SetTimer):
            self.outbox.append(said)
        elif isinstance(said, events.StartLoad):
            self.load_asked_s[said.instance] = now
            self._note(said, now)
            self.outbox.append(said)
        elif isinstance(said, events.StartResize):
            self._note(said, now)
            self.outbox.append(said)
        elif isinstance(said, events.StartUnload):
            self._loaded.discard(said.instance)
            self._tell(said, now)
        elif isinstance(said, events.FirstToken):
            self._note(said, now)
            self.outbox.append(said)
        elif isinstance(said, events.Finished):
            del self.places[said.work.id]
            self.outbox.append(said)
            self.mailbox.append(protocol.Finished(said.work.record(), said.instance))
        else:
            self._note(said, now)
            self._notice(said, now)

    def _notice(self, said: events.Notice, now: float) -> None:
        if isinstance(said, events.Evicted):
            self._part(said.work, said.instance, now)
            self.mailbox.append(protocol.Evicted(said.work.record(), said.instance, said.reason, said.work.hold))
        elif isinstance(said, events.Overcommitted):
            record = said.work.as_of(said.produced).record()
            self.mailbox.append(protocol.Overcommitted(record, said.instance))
        elif isinstance(said, events.CaughtUp):
            self.mailbox.append(protocol.CaughtUp(said.work.id, said.work.hold, said.work.produced))
        elif isinstance(said, events.Resumed):
            self.outbox.append(said)
        elif isinstance(said, events.HandedOver):
            self._part(said.work, said.instance, now)
            self.mailbox.append(protocol.HandedOver(said.work.record(), said.instance, said.kv_bytes))
        elif isinstance(said, events.InstanceReady):
            self.mailbox.append(protocol.InstanceReady(said.instance, said.model))
        elif isinstance(said, events.InstanceClosed):
            self.mailbox.append(protocol.InstanceClosed(said.instance, said.model))
        elif isinstance(said, events.InstanceGone):
            self.outbox.append(said)
            self.mailbox.append(protocol.InstanceGone(said.instance, said.model))

    def _part(self, work: Work, instance: int, now: float) -> None:
        del self.places[work.id]
        self.leave(work, instance, now)

    def _tell(self, output: events.Enter | events.Leave | events.StartUnload, now: float) -> None:
        if self._log is not None and self._log.is_detailed:
            self._note(output, now)
        self.outbox.append(output)

    def _note(self, said: Output | events.Notice, now: float) -> None:
        if self._log is not None:
            note_event(self._log, self._node.name, said, now)
