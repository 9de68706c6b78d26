"""Virtual time: an event heap with a total order drives the production node and controller on simulated devices.

The heap's key is (time, priority, serial): the same inputs and seed give the same run, to the byte of the event log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from dovetail.cluster.controller import Controller
from dovetail.cluster.decisions import Dropped, Moving, Placed, Queued
from dovetail.eventlog import EventLog
from dovetail.node import events
from dovetail.node.node import Node
from dovetail.node.work import Work
from dovetail.policy.headroom import SloRule
from dovetail.policy.knobs import Knobs
from dovetail.policy.placement import DeviceKind
from dovetail.sim.device import Device
from dovetail.sim.faults import Fault, FaultKind
from dovetail.sim.handle import Handle
from dovetail.sim.metrics import Fate, Record, Result
from dovetail.sim.sampling import Sampler
from dovetail.sim.trace import Arrival

# Priorities of events at the same instant: memory first, then turns, then timers, then requests, then samples.
MEMORY, TURN, TIMER, REQUEST, SAMPLE = range(5)
SAMPLE_EVERY_S = 1.0
DETECT_S = 0.5  # until the controller knows that a node is gone


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
        faults: Sequence[Fault] = (),
    ) -> None:
        self.devices = list(devices)
        self.knobs = knobs
        self.rule = rule or SloRule()
        self.arrivals = arrivals
        self.horizon_s = horizon_s if horizon_s is not None else arrivals[-1].arrival_s
        self.now = 0.0
        self.log = log
        self.records = [
            Record(i, a.model, a.arrival_s, a.input_tokens, a.output_tokens) for i, a in enumerate(arrivals)
        ]
        self.open = 0  # requests that have arrived and not ended
        self.faults = faults
        self.keep_samples = True
        self.on_sample: Callable[[float], None] | None = None
        self._dirty: list[Device] = []
        self.handles = [Handle(device, self._dirty) for device in self.devices]
        self._handle_of = {id(device): handle for device, handle in zip(self.devices, self.handles, strict=True)}
        self.controller = Controller(self.handles, knobs)
        self.result = Result(knobs.name, self.records, [], [d.node.name for d in self.devices], self.horizon_s)
        self.result.rule = self.rule
        self._heap: list[tuple[float, int, int, Callable[..., None], Any]] = []
        self._serial = 0
        self._sampler = Sampler(self.devices)

    # The loop

    def timed_run(self) -> Result:
        """Run, and note the wall time."""
        started = time.perf_counter()
        result = self.run()
        result.wall_s = time.perf_counter() - started
        return result

    def run(self) -> Result:
        self._push(self.arrivals[0].arrival_s, REQUEST, self._arrive, 0)
        for fault in self.faults:
            self._push(fault.at_s, MEMORY, self._strike, fault)
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
        name = str(arrival.model)
        work = Work(index, name, arrival.input_tokens, arrival.arrival_s, ttft_s, self.rule.tpot_s * scale, scale)
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
        if now < device.stalled_until_s:
            self._push(device.stalled_until_s, TURN, self._turn_end, key)
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
        if now < device.stalled_until_s:
            self._push(device.stalled_until_s, MEMORY, self._op_end, key)
        elif epoch == device.epoch:
            method(*arguments)
            self._dirty.append(device)
            self._settle(now)

    def _sample(self, now: float, _: None) -> None:
        if self.keep_samples:
            self.result.samples.append(self._sampler.take(now, len(self.controller.queued)))
            self.result.gpu_instance_s += SAMPLE_EVERY_S * self._sampler.gpu_instances
        if self.on_sample is not None:
            self.on_sample(now)
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
            self._push(
                said.at_s,
                TIMER,
                self._op_end,
                (device, device.epoch, node.timer, (said.instance, said.epoch, said.at_s)),
            )
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
        if duration > 0.0 or now < device.stalled_until_s:
            self._push(end, MEMORY, self._op_end, (device, device.epoch, method, (instance, end)))
            return
        method(instance, now)  # what takes no time is over before the next turn is chosen
        self._dirty.append(device)

    def _load(self, device: Device, said: events.StartLoad, now: float) -> None:
        duration = device.load_s(said)
        end = max(now, device.link_free_s) + duration  # one link, one load at a time
        device.link_free_s = end
        self.result.cold_starts += 1
        if device.failing_loads:
            device.failing_loads -= 1
            self._push(end, MEMORY, self._op_end, (device, device.epoch, device.node.load_failed, (said.instance, end)))
        else:
            arguments = (said.instance, end, end - now)  # the cold start is what was waited, the link's queue included
            self._push(end, MEMORY, self._op_end, (device, device.epoch, device.node.load_done, arguments))
        self._note(now, device.node, "load", said)

    def _report(self, device: Device, notice: events.Notice, now: float) -> None:
        if isinstance(notice, events.FirstToken):
            record = self.records[notice.work.id]
            record.first_token_s = now
            record.grace_s = notice.work.grace_s  # what comes after the first token excuses no late first token
            record.on_gpu = device.node.kind is DeviceKind.GPU
            if self.log is not None:
                self.log.write(now, "first_token", request=notice.work.id, node=device.node.name)
            return
        handle = self._handle_of[id(device)]
        handle.changed()
        if isinstance(notice, events.Finished):
            self._end(notice.work, Fate.FINISHED, "", now)
        elif isinstance(notice, events.InstanceGone):
            device.forget(notice.instance)
        if self.log is not None and not isinstance(notice, events.Finished):
            self._note(now, device.node, type(notice).__name__.lower(), notice)
        if device.lag_s or device.last_said_s > now:
            device.last_said_s = max(device.last_said_s, now + device.lag_s)  # late, but in order
            self._push(device.last_said_s, REQUEST, self._deliver, (device, notice))
        else:
            self.controller.notice(handle, notice, now)

    def _deliver(self, now: float, key: tuple[Device, events.Notice]) -> None:
        self.controller.notice(self._handle_of[id(key[0])], key[1], now)
        self._settle(now)

    def _decide(self, decision: Placed | Queued | Dropped | Moving, now: float) -> None:
        work = decision.work
        if isinstance(decision, Dropped):
            unserved = Fate.REJECTED if decision.reason == "hardware" else Fate.DROPPED
            self._end(work, unserved if work.produced == 0 else Fate.FAILED, decision.reason, now)
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
        record.late_tokens = work.late_tokens
        record.moves = work.moves
        record.silence_s = work.silence_s
        self.open -= 1
        if self.log is not None:
            self.log.write(now, fate.value, request=work.id, reason=reason)

    def _note(self, now: float, node: Node, event: str, said: Any) -> None:
        if self.log is not None:
            self.log.said(now, node.name, event, said)

    # Faults

    def _strike(self, now: float, fault: Fault) -> None:
        device = self.devices[fault.node]
        if self.log is not None:
            self.log.write(now, "fault", node=device.node.name, kind=fault.kind.value)
        if fault.kind is FaultKind.DIE:
            self._die(device, fault, now)
        elif fault.kind is FaultKind.STALL:
            device.stalled_until_s = max(device.stalled_until_s, now + fault.duration_s)
        elif fault.kind is FaultKind.SLOW:
            device.slowdown = fault.factor
            self._push(now + fault.duration_s, MEMORY, self._calm, device)
        elif fault.kind is FaultKind.LOAD_FAILS:
            device.failing_loads += 1
        else:
            device.lag_s = fault.factor
            self._push(now + fault.duration_s, MEMORY, self._calm, device)

    def _calm(self, now: float, device: Device) -> None:
        device.slowdown = 1.0
        device.lag_s = 0.0

    def _die(self, device: Device, fault: Fault, now: float) -> None:
        if not device.node.up:
            return
        lost = device.die()
        self._push(now + DETECT_S, REQUEST, self._lost, (device, lost))
        self._push(now + DETECT_S + fault.duration_s, MEMORY, self._recover, device)

    def _lost(self, now: float, key: tuple[Device, list[Work]]) -> None:
        device, works = key
        self.controller.lost(self._handle_of[id(device)], works, now)
        self._settle(now)

    def _recover(self, now: float, device: Device) -> None:
        device.node.recover()
