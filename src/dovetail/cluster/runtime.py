"""Everything between a request's arrival and its end: the controller and its nodes, events in, commands out.

The worker drives it with devices and a clock, the simulator with durations and faults. A driver reports what happened,
then carries out what is in `outbox`, in order, and asks `next_turn` for a device that is free. It decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from heapq import heappop, heappush
from typing import Any

from dovetail.cluster.controller import Controller
from dovetail.cluster.decisions import Decision, Moving, Placed, Refused
from dovetail.cluster.intake import Submission, works_of
from dovetail.eventlog import EventLog
from dovetail.node import events
from dovetail.node.node import Node
from dovetail.node.runtime import NodeRuntime
from dovetail.node.work import Work
from dovetail.policy.headroom import Refusal, SloRule
from dovetail.policy.knobs import Knobs
from dovetail.policy.placement import Hosting
from dovetail.profiles.files import hosting_values

# What a driver carries out or is told, with the node that it is about; of a refused request there is none.
Output = (
    events.StartLoad
    | events.StartUnload
    | events.StartResize
    | events.Enter
    | events.Leave
    | events.FirstToken
    | events.Finished
    | events.InstanceGone
    | Refused
)


class Runtime:
    def __init__(
        self, nodes: Sequence[Node], knobs: Knobs, *, rule: SloRule | None = None, log: EventLog | None = None
    ) -> None:
        self.knobs = knobs
        self.works: dict[int, Work] = {}  # unfinished
        self.outbox: deque[tuple[NodeRuntime | None, Output]] = deque()
        self.touched: dict[str, NodeRuntime] = {}  # nodes where something happened since their turn was last chosen
        self._rule = rule or SloRule()
        self._log = log
        self._dirty: list[NodeRuntime] = []
        self.nodes = [NodeRuntime(node, self._dirty, log) for node in nodes]
        self.controller = Controller(self.nodes, knobs)
        self._by_name = {node.name: node for node in self.nodes}
        self._places: dict[int, tuple[NodeRuntime, int]] = {}  # by request: node and instance
        self._timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0
        self._next_id = 0

    # Requests

    def submit(self, submission: Submission, now: float) -> list[int]:
        """Returns the number of each open choice."""
        works = works_of(submission, self._next_id, now, self._rule, self.knobs.slo_scale)
        self._next_id += len(works)
        for work in works:
            self.works[work.id] = work
            if self._log is not None:
                self._note_arrival(self._log, submission, work, now)
        if self._is_too_large(works[0]):
            for work in works:
                self._decide(Refused(work, "too_large", {}), now)
        else:
            self.controller.submit(works, now)
        self._settle(now)
        self._rouse()
        return [work.id for work in works]

    def _is_too_large(self, work: Work) -> bool:
        """No node could hold it, had it the node to itself. Of a model that nobody offers the controller says so."""
        rooms = [node.room_for(work.model) for node in self.nodes if node.hosting_of(work.model) is not None]
        return bool(rooms) and work.known_tokens + 1 > max(rooms)

    def cancel(self, ids: Iterable[int], now: float, fate: str = "aborted", reason: str = "") -> None:
        """Free what these hold. Nothing more is said of them."""
        works = [self.works[id] for id in ids if id in self.works]
        self.controller.cancel([work.id for work in works], now)
        for work in works:
            place = self._places.pop(work.id, None)
            if place is not None:
                self._leave(*place, work, now)
                place[0].withdraw(place[1], work, now)
                self.controller.withdrawn(*place)
            self._end(work, fate, reason, now)
        self._settle(now)

    def _leave(self, node: NodeRuntime, instance: int, work: Work, now: float) -> None:
        if node.is_loaded(instance):
            self._tell(node, events.Leave(work, instance), now)

    def _end(self, work: Work, fate: str, reason: str, now: float) -> None:
        del self.works[work.id]
        self._places.pop(work.id, None)
        if self._log is not None:
            facts = {"output": work.produced, "grace": round(work.grace_s, 6), "late": work.late_tokens}
            self._log.write(now, fate, request=work.id, reason=reason, **facts)

    # Models

    def offer(self, node: NodeRuntime, model: str, hosting: Hosting, now: float) -> None:
        """The node offers the model, or offers it in another way than before."""
        if self._log is not None:
            self._log.write(now, "hosting", model=model, **hosting_values(hosting))
        node.node.rehost(model, now)
        node.changed()
        self._settle(now)

    def warm(self, node: NodeRuntime, model: str, now: float) -> Refusal | None:
        """Start an instance before anybody asks for it."""
        answer = node.node.warm(model, now)
        if isinstance(answer, Refusal):
            return answer
        self.controller.warmed(node, answer, model)
        node.changed()
        self._settle(now)
        return None

    def close_model(self, node: NodeRuntime, model: str, now: float) -> None:
        for instance in node.open_instances(model):
            node.preempt(instance, "unloaded")
        self._settle(now)

    def close_idle(self, node: NodeRuntime, now: float) -> int:
        """The host is short of memory: close the longest idle instance; returns how many were closed."""
        closed = node.node.close_idle()
        node.changed()
        self._settle(now)
        return closed

    # Turns

    def next_turn(self, node: NodeRuntime, now: float) -> events.Turn | None:
        """Whose turn it is on a free device; None while the device is busy, nobody can run, or there is something in
        the outbox to be done before anybody can."""
        wake_s = self.next_wake_s()
        if wake_s is not None and wake_s <= now:  # whoever may ask again does so before it is decided who runs
            self.wake(now)
        self.touched.pop(node.name, None)
        if node.node.turn is not None or not node.up:
            return None
        if self.outbox:
            self.touched[node.name] = node  # to be asked again when that is done
            return None
        if self.knobs.extend_deadlines:
            node.ease_overdue(now)
        turn = self._choose(node, now)
        if turn is None and self.outbox:
            self.touched[node.name] = node
        elif turn is None:
            node.rest(now)
            self.controller.idle(node, now)
            if self.controller.outbox or self._dirty:
                self._settle(now)
                turn = self._choose(node, now)
        if turn is not None:
            self.touched.pop(node.name, None)
            if self._log is not None and self._log.is_detailed:
                self._note_turn(self._log, node, turn, now)
        return turn

    def _choose(self, node: NodeRuntime, now: float) -> events.Turn | None:
        turn = node.next_turn(now)
        if self._dirty:  # choosing had something to say, and somebody else may be able to run for it
            self._settle(now)
            turn = turn or node.next_turn(now)
        return turn

    def turn_ended(self, node: NodeRuntime, now: float, finished: Iterable[int], *, is_whole: bool = True) -> None:
        """`finished` got their last token in it."""
        turn = node.turn_ended(now, [self.works[id] for id in sorted(finished)], is_whole=is_whole)
        if turn.prefill is not None:
            self.controller.prefilled(turn.prefill, now)
        if self._dirty or self.controller.outbox:
            self._settle(now)

    # Memory

    def load_ended(self, node: NodeRuntime, instance: int, now: float) -> None:
        for work in node.load_ended(instance, now):
            self._tell(node, events.Enter(work, instance), now)
        self._settle(now)

    def load_failed(self, node: NodeRuntime, instance: int, now: float) -> None:
        node.load_failed(instance, now)
        self._settle(now)

    def resize_ended(self, node: NodeRuntime, instance: int, now: float) -> None:
        node.resize_ended(instance, now)
        self._settle(now)

    def unload_ended(self, node: NodeRuntime, instance: int, now: float) -> None:
        node.unload_ended(instance, now)
        self._settle(now)

    # Losses

    def lost(self, node: NodeRuntime, works: Sequence[Work], now: float) -> None:
        """It was noticed that the node is gone, and this work with it."""
        for work in works:
            self._places.pop(work.id, None)
        self.controller.lost(node, [work for work in works if work.id in self.works], now)
        self._settle(now)

    # Time

    def next_wake_s(self) -> float | None:
        """When `wake` has something to do."""
        next_s = self.controller.next_wake_s()
        if self._timers and (next_s is None or self._timers[0][0] < next_s):
            return self._timers[0][0]
        return next_s

    def wake(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            _, _, handler, arguments = heappop(self._timers)
            handler(*arguments, now)
        self.controller.wake(now)
        if self._dirty or self.controller.outbox:
            self._settle(now)
        self._rouse()

    def _rouse(self) -> None:
        """Idle devices are asked for a turn once more where that may help somebody."""
        if self.controller.wants_idle:
            self.touched.update((node.name, node) for node in self.nodes if node.node.turn is None and node.up)

    def _at(self, at_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        self._serial += 1
        heappush(self._timers, (at_s, self._serial, handler, arguments))

    # What node and controller say

    def _settle(self, now: float) -> None:
        """Until nobody has anything to say."""
        controller, dirty = self.controller, self._dirty
        while dirty or controller.outbox:
            while controller.outbox:
                decisions, controller.outbox = controller.outbox, []
                for decision in decisions:
                    self._decide(decision, now)
            if dirty:
                node = dirty.pop(0)
                self.touched[node.name] = node
                box = node.node.outbox
                while box:
                    self._hear(node, box.pop(0), now)

    def _decide(self, decision: Decision, now: float) -> None:
        if self._log is not None:
            self._log.decision(now, decision)
        if isinstance(decision, Placed):
            node = self._by_name[decision.node]
            self._places[decision.work.id] = node, decision.instance
            if node.is_loaded(decision.instance):
                self._tell(node, events.Enter(decision.work, decision.instance), now)
        elif isinstance(decision, Moving):
            place = self._places.pop(decision.work.id, None)
            if place is not None:  # taken back; of those who were evicted the node has said so
                self._leave(*place, decision.work, now)
        elif isinstance(decision, Refused):
            self._end(decision.work, "refused", decision.reason, now)
            self.outbox.append((None, decision))

    def _hear(self, node: NodeRuntime, said: events.Command | events.Notice, now: float) -> None:
        if isinstance(said, events.SetTimer):
            self._at(said.at_s, node.timer, said.instance, said.epoch)
        elif isinstance(said, events.StartLoad):
            node.load_started(said.instance, now)
            self._command(node, "load", said, now)
        elif isinstance(said, events.StartResize):
            self._command(node, "resize", said, now)
        elif isinstance(said, events.StartUnload):
            node.unload_started(said.instance)
            self._tell(node, said, now)
        else:
            self._notice(node, said, now)

    def _command(self, node: NodeRuntime, event: str, command: Any, now: float) -> None:
        self._note(node, event, command, now)
        self.outbox.append((node, command))

    def _tell(self, node: NodeRuntime, output: events.Enter | events.Leave | events.StartUnload, now: float) -> None:
        if self._log is not None and self._log.is_detailed:
            self._note(node, type(output).__name__.lower(), output, now)
        self.outbox.append((node, output))

    def _notice(self, node: NodeRuntime, notice: events.Notice, now: float) -> None:
        if isinstance(notice, events.FirstToken):
            if self._log is not None:
                self._log.write(now, "first_token", request=notice.work.id, node=node.name)
            self.outbox.append((node, notice))
            return
        if isinstance(notice, events.Finished):
            self._end(notice.work, "finished", "", now)
            self.outbox.append((node, notice))
        else:
            self._note(node, type(notice).__name__.lower(), notice, now)
            if isinstance(notice, events.Evicted | events.HandedOver):
                self._places.pop(notice.work.id, None)
                self._leave(node, notice.instance, notice.work, now)
            elif isinstance(notice, events.InstanceGone):
                self.outbox.append((node, notice))
        if node.lag_s or node.said_s > now:
            node.said_s = max(node.said_s, now + node.lag_s)  # late, but in order
            self._at(node.said_s, self.controller.notice, node, notice)
        else:
            self.controller.notice(node, notice, now)

    # The log

    def start_log(self, node: NodeRuntime, device: str) -> None:
        """First line of a real node's log: what a simulation of the same node needs. Its models follow as they come."""
        if self._log is not None:
            memory_bytes = node.node.residency.ledger.capacity
            knobs = asdict(self.knobs)
            self._log.header(real=True, node=node.name, device=device, memory_bytes=memory_bytes, knobs=knobs)

    def _note_arrival(self, log: EventLog, submission: Submission, work: Work, now: float) -> None:
        facts: dict[str, Any] = {"input": work.input_tokens, "at": round(work.arrival_s, 6)}
        if submission.asked_tokens:
            facts["asked"] = submission.asked_tokens
        if submission.is_best_effort:
            facts["best_effort"] = True
        elif submission.is_strict:
            facts["ttft_s"], facts["tpot_s"] = submission.ttft_s, submission.tpot_s
        log.write(now, "arrive", request=work.id, model=work.model, **facts)

    def _note_turn(self, log: EventLog, node: NodeRuntime, turn: events.Turn, now: float) -> None:
        requests = list(turn.instance.running) if turn.prefill is None else [turn.prefill.id]
        kind = "decode" if turn.prefill is None else "prefill"
        log.write(now, kind, node=node.name, instance=turn.instance.id, requests=requests)

    def _note(self, node: NodeRuntime, event: str, said: Any, now: float) -> None:
        if self._log is not None:
            self._log.said(now, node.name, event, said)
