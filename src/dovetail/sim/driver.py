"""Virtual time: an event heap with a total order drives the production node and controller on simulated devices.

The heap's key is (time, priority, serial): the same inputs and seed give the same run, to the byte of the event log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from dovetail.cluster.controller import Controller
from dovetail.cluster.decisions import Dropped, Moving, Placed, Queued
from dovetail.node import events
from dovetail.node.node import Node
from dovetail.node.work import Work
from dovetail.policy.headroom import Refusal, SloRule
from dovetail.policy.knobs import Knobs
from dovetail.policy.placement import DeviceKind
from dovetail.sim.device import Device
from dovetail.sim.log import EventLog
from dovetail.sim.metrics import Fate, Record, Result, Sample
from dovetail.sim.trace import Arrival

# Priorities of events at the same instant: memory first, then turns, then timers, then requests, then samples.
MEMORY, TURN, TIMER, REQUEST, SAMPLE = range(5)
SAMPLE_EVERY_S = 1.0


class Handle:
    """An in-process NodeHandle that notes which nodes have something to say."""

    def __init__(self, device: Device, dirty: list[Device]) -> None:
        node = device.node
        self._device = device
        self._dirty = dirty
        self._node = node
        self.name = node.name
        self.kind = node.kind
        self.check_join = node.check_join
        self.check_start = node.check_start
        self.victims_for = node.victims_for
        self.pausable_for = node.pausable_for

    @property
    def up(self) -> bool:
        return self._node.up

    @property
    def in_use(self) -> bool:
        return self._node.in_use

    @property
    def fullness(self) -> float:
        return self._node.fullness

    def join(self, instance_id: int, work: Work, now: float) -> Refusal | None:
        answer = self._node.join(instance_id, work, now)
        if answer is None:
            self._dirty.append(self._device)
            if work.cached:
                self._device.joined_running(instance_id, work)
        return answer

    def start(self, work: Work, now: float) -> int | Refusal:
        answer = self._node.start(work, now)
        if not isinstance(answer, Refusal):
            self._dirty.append(self._device)
            if work.cached:
                self._device.joined_running(answer, work)
        return answer

    def preempt(self, instance_id: int, reason: str) -> None:
        self._node.preempt(instance_id, reason)
        self._dirty.append(self._device)


class Simulation:
    def __init__(
        self,
        devices: Sequence[Device],
        knobs: Knobs,
        arrivals: Sequence[Arrival],
        *,
        rule: SloRule | None = None,
        horizon_s: float | None = None,
        log: EventLog | None = None,
        model_name: Callable[[int], str] = str,
    ) -> None:
        self.devices = list(devices)
        self.knobs = knobs
        self.rule = rule or SloRule()
        self.arrivals = arrivals
        self.horizon_s = horizon_s if horizon_s is not None else arrivals[-1].arrival_s
        self.now = 0.0
        self.log = log
        self.records = [Record(i, a.model, a.arrival_s, a.input_tokens, a.output_tokens) for i, a in enumerate(arrivals)]
        self.open = 0  # requests that have arrived and not ended
        self._model_name = model_name
        self._dirty: list[Device] = []
        self.handles = [Handle(device, self._dirty) for device in self.devices]
        self._handle_of = {id(device): handle for device, handle in zip(self.devices, self.handles, strict=True)}
        self.controller = Controller(self.handles, knobs)
        self.result = Result(knobs.name, self.records, [], [d.node.name for d in self.devices], self.horizon_s)
        self.result.rule = self.rule
        self._heap: list[tuple[float, int, int, Callable[..., None], Any]] = []
        self._serial = 0
        self._born: dict[tuple[str, int], float] = {}
        self._busy_before: dict[tuple[str, int], float] = {}

    # The loop

    def run(self) -> Result:
        self._push(self.arrivals[0].arrival_s, REQUEST, self._arrive, 0)
        self._push(0.0, SAMPLE, self._sample, None)
        heap = self._heap
        while heap:
            now, _, _, handler, argument = heappop(heap)
            self.now = now
            handler(now, argument)
        self.result.events = self._serial
        for device in self.devices:
            self.result.decode_turns += device.decode_turns
            self.result.decode_tokens += device.decode_tokens
        return self.result

    def _push(self, time_s: float, priority: int, handler: Callable[..., None], argument: Any) -> None:
        self._serial = serial = self._serial + 1
        heappush(self._heap, (time_s, priority, serial, handler, argument))

    # Events

    def _arrive(self, now: float, index: int) -> None:
        arrival = self.arrivals[index]
        if index + 1 < len(self.arrivals):
            self._push(self.arrivals[index + 1].arrival_s, REQUEST, self._arrive, index + 1)
        scale = self.knobs.slo_scale
        ttft_s = self.rule.ttft_s(arrival.input_tokens) * scale
        name = self._model_name(arrival.model)
        work = Work(index, name, arrival.input_tokens, now, ttft_s, self.rule.tpot_s * scale, scale)
        self.open += 1
        if self.log is not None:
            self.log.write(now, "arrive", request=index, model=name, input=arrival.input_tokens)
        self.controller.submit(work, now)
        self._settle(now)

    def _retry(self, now: float, work_id: int) -> None:
        self.controller.retry(work_id, now)
        self._settle(now)

    def _turn_end(self, now: float, key: tuple[Device, int]) -> None:
        device, epoch = key
        if epoch != device.epoch:
            return
        node = device.node
        turn = node.turn
        node.turn_done(now, device.finished(turn))  # type: ignore[arg-type]
        if node.outbox or self._dirty:
            self._dirty.append(device)
            self._settle(now)
        if node.turn is None:
            turn = node.next_turn(now)
            if turn is not None:
                self._serial = serial = self._serial + 1
                end = now + device.duration_s(turn)
                heappush(self._heap, (end, TURN, serial, self._turn_end, key))
            elif node.outbox:
                self._dirty.append(device)
                self._settle(now)

    def _op_end(self, now: float, key: tuple[Device, int, Callable[..., None], tuple[Any, ...]]) -> None:
        device, epoch, method, arguments = key
        if epoch == device.epoch:
            method(*arguments)
            self._dirty.append(device)
            self._settle(now)

    def _sample(self, now: float, _: None) -> None:
        self.result.samples.append(self._take_sample(now))
        if now + SAMPLE_EVERY_S <= self.horizon_s or self.open:
            self._push(now + SAMPLE_EVERY_S, SAMPLE, self._sample, None)

    # Carrying out what nodes and controller say

    def _settle(self, now: float) -> None:
        """Deliver every command, notice and decision, then start turns on the nodes that changed."""
        touched: dict[int, Device] = {}
        controller = self.controller
        while self._dirty or controller.outbox:
            while controller.outbox:
                decisions, controller.outbox = controller.outbox, []
                for decision in decisions:
                    self._decide(decision, now)
            if self._dirty:
                device = self._dirty.pop(0)
                touched[id(device)] = device
                box = device.node.outbox
                while box:
                    self._carry_out(device, box.pop(0), now)
        for device in touched.values():
            self._begin_turn(device, now)

    def _begin_turn(self, device: Device, now: float) -> None:
        node = device.node
        if node.turn is None and node.up:
            turn = node.next_turn(now)
            if turn is not None:
                self._push(now + device.duration_s(turn), TURN, self._turn_end, (device, device.epoch))
            if node.outbox:
                self._dirty.append(device)
                self._settle(now)

    def _carry_out(self, device: Device, said: events.Command | events.Notice, now: float) -> None:
        node = device.node
        if isinstance(said, events.SetTimer):
            self._push(said.at_s, TIMER, self._op_end, (device, device.epoch, node.timer, (said.instance, said.epoch, said.at_s)))
        elif isinstance(said, events.StartResize):
            duration = device.resize_s(said) if node.kind is DeviceKind.GPU else 0.0
            self._op(device, now, duration, node.resize_done, said.instance)
            if node.kind is DeviceKind.GPU:
                self.result.resizes += 1
                self.result.resize_s += duration
            self._note(now, node, "resize", said)
        elif isinstance(said, events.StartLoad):
            self._load(device, said, now)
        elif isinstance(said, events.StartUnload):
            self._op(device, now, device.unload_s(), node.unload_done, said.instance)
        else:
            self._report(device, said, now)

    def _op(self, device: Device, now: float, duration: float, method: Callable[..., None], instance: int) -> None:
        end = now + duration
        self._push(end, MEMORY, self._op_end, (device, device.epoch, method, (instance, end)))

    def _load(self, device: Device, said: events.StartLoad, now: float) -> None:
        duration = device.load_s(said)
        end = max(now, device.link_free_s) + duration  # one link, one load at a time
        device.link_free_s = end
        self.result.cold_starts += 1
        arguments = (said.instance, end, duration)
        self._push(end, MEMORY, self._op_end, (device, device.epoch, device.node.load_done, arguments))
        self._note(now, device.node, "load", said)

    def _report(self, device: Device, notice: events.Notice, now: float) -> None:
        if isinstance(notice, events.FirstToken):
            record = self.records[notice.work.id]
            record.first_token_s = now
            record.on_gpu = device.node.kind is DeviceKind.GPU
            if self.log is not None:
                self.log.write(now, "first_token", request=notice.work.id, node=device.node.name)
            return
        if isinstance(notice, events.Finished):
            self._end(notice.work, Fate.FINISHED, "", now)
        elif isinstance(notice, events.InstanceGone):
            device.forget(notice.instance)
        if self.log is not None and not isinstance(notice, events.Finished):
            self._note(now, device.node, type(notice).__name__.lower(), notice)
        self.controller.notice(self._handle_of[id(device)], notice, now)

    def _decide(self, decision: Placed | Queued | Dropped | Moving, now: float) -> None:
        work = decision.work
        if isinstance(decision, Dropped):
            self._end(work, Fate.DROPPED if work.produced == 0 else Fate.FAILED, decision.reason, now)
        elif isinstance(decision, Queued | Moving):
            self._push(decision.retry_at_s, REQUEST, self._retry, work.id)
        if self.log is not None:
            self.log.decision(now, decision)

    def _end(self, work: Work, fate: Fate, reason: str, now: float) -> None:
        record = self.records[work.id]
        assert record.fate is None, f"request {work.id} ended twice: {record.fate}, then {fate}"
        record.fate = fate
        record.reason = reason
        record.end_s = now
        record.grace_s = work.grace_s
        record.late_tokens = work.late_tokens
        record.moves = work.moves
        self.open -= 1
        if self.log is not None:
            self.log.write(now, fate.value, request=work.id, reason=reason)

    def _note(self, now: float, node: Node, event: str, said: Any) -> None:
        if self.log is not None:
            self.log.said(now, node.name, event, said)

    # Samples

    def _take_sample(self, now: float) -> Sample:
        used = {DeviceKind.CPU: 0, DeviceKind.GPU: 0}
        memory: list[float] = []
        kv: list[float] = []
        batches: list[int] = []
        holders: list[dict[str, float]] = []
        resident: list[list[str]] = []
        for device in self.devices:
            node = device.node
            held: dict[str, float] = {}
            if node.in_use:
                used[node.kind] += 1
                if node.kind is DeviceKind.GPU:
                    memory.append(node.residency.ledger.planned / node.residency.ledger.capacity)
            for instance in node.instances.values():
                batches.append(instance.batch)
                if node.kind is DeviceKind.GPU and instance.kv_tokens:
                    kv.append(min(instance.tokens / instance.kv_tokens, 1.0))
                key = (node.name, instance.id)
                held[instance.model] = held.get(instance.model, 0.0) + instance.busy_s - self._busy_before.get(key, 0.0)
                self._busy_before[key] = instance.busy_s
            holders.append(held)
            resident.append([instance.model for instance in node.instances.values()])
        mean_memory = sum(memory) / len(memory) if memory else 0.0
        mean_kv = sum(kv) / len(kv) if kv else 0.0
        return Sample(
            now,
            used[DeviceKind.CPU],
            used[DeviceKind.GPU],
            len(self.controller.queued),
            mean_memory,
            mean_kv,
            batches,
            holders,
            resident,
        )
