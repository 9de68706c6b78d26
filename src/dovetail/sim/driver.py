"""Virtual time: an event heap with a total order drives the production runtime on simulated devices.

The heap's key is (time, priority, serial): the same inputs and seed give the same run, to the byte of the event log.
It reports what happened and carries out what the runtime says; it decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from dovetail.cluster.decisions import Refused
from dovetail.cluster.intake import Submission
from dovetail.cluster.local import LocalCluster, Output
from dovetail.eventlog import EventLog
from dovetail.node import events
from dovetail.node.runtime import NodeRuntime
from dovetail.node.work import Work
from dovetail.policy.headroom import INFINITY, SloRule
from dovetail.policy.knobs import Knobs
from dovetail.policy.placement import DeviceKind
from dovetail.sim.device import Device
from dovetail.sim.faults import Fault, FaultKind
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
        on_one_thread: bool = False,
    ) -> None:
        """`on_one_thread`: the one node decides on the thread that computes, and hears of what happens during a turn at
        the end of the turn."""
        self.devices = list(devices)
        self.rule = rule or SloRule()
        self.arrivals = arrivals
        self.horizon_s = horizon_s if horizon_s is not None else arrivals[-1].arrival_s
        self.now = 0.0
        self.log = log
        self.records = _records(arrivals)
        self.open = 0  # requests that have arrived and not ended
        self.faults = faults
        self.keep_samples = True
        self.on_sample: Callable[[float], None] | None = None
        self.cluster = LocalCluster([device.node for device in self.devices], knobs, rule=self.rule, log=log)
        self._device_of = {device.node.name: device for device in self.devices}
        self._node_of = {id(device): node for device, node in zip(self.devices, self.cluster.nodes, strict=True)}
        self.result = Result(knobs.name, self.records, [], [d.node.name for d in self.devices], self.horizon_s)
        self.result.rule = self.rule
        self._heap: list[tuple[float, int, int, Callable[..., None], Any]] = []
        self._serial = 0
        self._wake_s = INFINITY  # when the runtime will be woken
        self._sampler = Sampler(self.devices)
        self._on_one_thread = on_one_thread
        self._unheard: list[tuple[Callable[..., None], Any]] = []  # what happened during the turn of the one thread
        self._is_hearing = False  # it takes that in: no turn begins before it has heard everything

    # The loop

    def timed_run(self) -> Result:
        """Run, and note the wall time."""
        started = time.perf_counter()
        result = self.run()
        result.wall_s = time.perf_counter() - started
        return result

    def run(self) -> Result:
        self._announce(0)
        for fault in self.faults:
            self._push(fault.at_s, MEMORY, self._strike, fault)
        self._push(0.0, SAMPLE, self._sample, None)
        heap = self._heap
        while heap:
            now, priority, _, handler, argument = heappop(heap)
            self.now = now
            if self._on_one_thread and priority not in (TURN, SAMPLE) and self.devices[0].node.turn is not None:
                self._miss(priority, handler, argument)
            else:
                handler(now, argument)
        self.result.events = self._serial
        for device in self.devices:
            self.result.decode_turns += device.decode_turns
            self.result.decode_tokens += device.decode_tokens
        return self.result

    def _push(self, time_s: float, priority: int, handler: Callable[..., None], argument: Any) -> None:
        self._serial = serial = self._serial + 1
        heappush(self._heap, (time_s, priority, serial, handler, argument))

    def _announce(self, index: int) -> None:
        """The next arrival; a node that may hear of several at once needs all of them in the heap."""
        last = len(self.arrivals) if self._on_one_thread else index + 1
        for number in range(index, min(last, len(self.arrivals))):
            self._push(self.arrivals[number].arrival_s, REQUEST, self._arrive, number)

    # Events

    def _arrive(self, now: float, index: int) -> None:
        arrival = self.arrivals[index]
        if not self._on_one_thread:
            self._announce(index + 1)
        self.open += len(arrival.produced)
        self.cluster.submit(submission_of(arrival), now)
        self._settle(now)

    def _wake(self, now: float, wake_s: float) -> None:
        if wake_s != self._wake_s:
            return  # it was woken before
        self._wake_s = INFINITY
        due_s = self.cluster.next_wake_s()
        if due_s is not None and due_s <= now:  # else it woke by itself to choose a turn
            self.cluster.wake(now)
        self._settle(now)

    def _turn_end(self, now: float, key: tuple[Device, int]) -> None:
        device, epoch = key
        if epoch != device.epoch:
            return
        if now < device.stalled_until_s:
            self._push(device.stalled_until_s, TURN, self._turn_end, key)
            return
        cluster, turn, node = self.cluster, device.node.turn, self._node_of[id(device)]
        assert turn is not None
        cluster.turn_ended(node, now, device.finished(turn))
        if cluster.outbox:
            self._carry_out_all(now)
        if self._on_one_thread:
            self._hear_all(now)
        if device.durations.gap_s:
            self._push(now + device.durations.gap_s, TURN, self._choose, key)
        else:
            self._choose(now, key)

    def _miss(self, priority: int, handler: Callable[..., None], argument: Any) -> None:
        """It happened during a turn."""
        if priority == TIMER:
            self._wake_s = INFINITY  # the choice of the next turn begins with that
        else:
            self._unheard.append((handler, argument))

    def _hear_all(self, now: float) -> None:
        self._is_hearing = True
        unheard, self._unheard = self._unheard, []
        for handler, argument in unheard:
            handler(now, argument)
        self._is_hearing = False

    def _choose(self, now: float, key: tuple[Device, int]) -> None:
        """The device is free again."""
        node = self._node_of[id(key[0])]
        self.cluster.touched[node.name] = node
        self._settle(now)

    def _op_end(self, now: float, key: tuple[Device, int, Callable[..., None], int]) -> None:
        device, epoch, event, instance = key
        if now < device.stalled_until_s:
            self._push(device.stalled_until_s, MEMORY, self._op_end, key)
        elif epoch == device.epoch:
            event(instance, now)
            self.cluster.settle(now)
            self._settle(now)

    def _sample(self, now: float, _: None) -> None:
        if self.keep_samples:
            self.result.samples.append(self._sampler.take(now, self.cluster.runtime.controller.num_queued))
            self.result.gpu_instance_s += SAMPLE_EVERY_S * self._sampler.gpu_instances
        if self.on_sample is not None:
            self.on_sample(now)
        if now + SAMPLE_EVERY_S <= self.horizon_s or self.open:
            self._push(now + SAMPLE_EVERY_S, SAMPLE, self._sample, None)

    # Carrying out what the runtime says

    def _settle(self, now: float) -> None:
        """Carry everything out, then start turns on the nodes that changed."""
        cluster = self.cluster
        if cluster.outbox:
            self._carry_out_all(now)
        while cluster.touched and not self._is_hearing:
            node = next(iter(cluster.touched.values()))
            turn = cluster.next_turn(node, now)
            if cluster.outbox:
                self._carry_out_all(now)
            if turn is not None:
                device = self._device_of[node.name]
                self._push(now + device.turn_s(turn), TURN, self._turn_end, (device, device.epoch))
        wake_s = cluster.next_wake_s()
        if wake_s is not None and wake_s < self._wake_s:
            self._wake_s = wake_s
            self._push(max(wake_s, now), TIMER, self._wake, wake_s)

    def _carry_out_all(self, now: float) -> None:
        outbox = self.cluster.outbox
        while outbox:
            self._carry_out(*outbox.popleft(), now)
            self.cluster.settle(now)

    def _carry_out(self, node: NodeRuntime | None, said: Output, now: float) -> None:
        if isinstance(said, Refused):
            self._refuse(said, now)
            return
        assert node is not None
        device = self._device_of[node.name]
        if isinstance(said, events.Enter):
            device.entered(said.instance, said.work)
        elif isinstance(said, events.Resumed):
            device.resumed(said.instance, said.work)
        elif isinstance(said, events.StartResize):
            duration = device.resize_s(said)
            if node.kind is DeviceKind.GPU:
                self.result.resizes += 1
                self.result.resize_s += duration
            self._op(device, now, duration, node.resize_ended, said.instance)
        elif isinstance(said, events.StartLoad):
            self._load(device, node, said, now)
        elif isinstance(said, events.StartUnload):
            self._op(device, now, device.unload_s(), node.unload_ended, said.instance)
        else:
            self._record(device, said, now)

    def _op(self, device: Device, now: float, duration: float, event: Callable[..., None], instance: int) -> None:
        if duration > 0.0 or now < device.stalled_until_s:
            self._push(now + duration, MEMORY, self._op_end, (device, device.epoch, event, instance))
        else:
            event(instance, now)  # over before the next turn is chosen

    def _load(self, device: Device, node: NodeRuntime, said: events.StartLoad, now: float) -> None:
        end = max(now, device.link_free_s) + device.load_s(said)  # one link, one load at a time
        device.link_free_s = end
        self.result.cold_starts += 1
        event = node.load_ended
        if device.failing_loads:
            device.failing_loads -= 1
            event = node.load_failed
        self._push(end, MEMORY, self._op_end, (device, device.epoch, event, said.instance))

    # Records

    def _record(self, device: Device, said: Output, now: float) -> None:
        if isinstance(said, events.FirstToken):
            record = self.records[said.work.id]
            record.first_token_s = now
            record.grace_s = said.grace_s
            record.on_gpu = device.node.kind is DeviceKind.GPU
        elif isinstance(said, events.Finished):
            self._end(said.work, Fate.FINISHED, "", now)
        elif isinstance(said, events.InstanceGone):
            device.forget(said.instance)

    def _refuse(self, refused: Refused, now: float) -> None:
        unserved = Fate.REJECTED if refused.reason in ("hardware", "too_large") else Fate.DROPPED
        self._end(refused.work, unserved if refused.work.produced == 0 else Fate.FAILED, refused.reason, now)

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
        elif fault.kind is FaultKind.MOVE:
            self.cluster.move_all(device.node.name, now)
            self._settle(now)
        elif fault.kind is FaultKind.DRAIN:
            self.cluster.drain(device.node.name, now)
            self._settle(now)
            self._push(now + fault.duration_s, MEMORY, self._undrain, device)
        else:
            handle = self.cluster.handles[device.node.name]
            if fault.kind is FaultKind.LATE:
                handle.lag_s = fault.factor
            else:
                handle.is_mute = True
            self._push(now + fault.duration_s, MEMORY, self._calm, device)

    def _calm(self, now: float, device: Device) -> None:
        device.slowdown = 1.0
        handle = self.cluster.handles[device.node.name]
        handle.lag_s, handle.is_mute = 0.0, False

    def _undrain(self, now: float, device: Device) -> None:
        self.cluster.runtime.undrain(self.cluster.handles[device.node.name])
        self._settle(now)

    def _die(self, device: Device, fault: Fault, now: float) -> None:
        if not device.node.up:
            return
        device.die()
        lost = self._node_of[id(device)].fail()
        self._push(now + DETECT_S, REQUEST, self._lost, (device, lost))
        self._push(now + DETECT_S + fault.duration_s, MEMORY, self._recover, device)

    def _lost(self, now: float, key: tuple[Device, list[Work]]) -> None:
        device, works = key
        self.cluster.lost(self._node_of[id(device)], works, now)
        self._settle(now)

    def _recover(self, now: float, device: Device) -> None:
        device.node.recover()


def submission_of(arrival: Arrival) -> Submission:
    return Submission(
        str(arrival.model),
        arrival.input_tokens,
        arrival.arrival_s,
        arrival.produced,
        arrival.ttft_s,
        arrival.tpot_s,
        arrival.is_best_effort,
        arrival.output_tokens,
    )


def _records(arrivals: Sequence[Arrival]) -> list[Record]:
    """One for each choice, numbered as the runtime numbers them."""
    records: list[Record] = []
    for one in arrivals:
        for _ in one.produced:
            records.append(Record(len(records), one.model, one.arrival_s, one.input_tokens, one.output_tokens))
    return records
