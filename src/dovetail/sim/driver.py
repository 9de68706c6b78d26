"""Virtual time: an event heap with a total order drives the production core on simulated devices.

The heap's key is (time, priority, serial): the same inputs and seed give the same run, to the byte of the event log.
It reports what happened and carries out what they say; it decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from typing import Any

from dovetail.cluster.decisions import Failed, GiveUp, Kill, RequestRejected
from dovetail.cluster.intake import Submission
from dovetail.cluster.local import LocalCluster, Output
from dovetail.cluster.local_node import Preparation
from dovetail.cluster.retry import RetryRule
from dovetail.eventlog import EventLog
from dovetail.node import events, protocol
from dovetail.node.runtime import NodeRuntime
from dovetail.policy.compositions import Composition
from dovetail.policy.headroom import INFINITY, SloRule
from dovetail.policy.placement import DeviceKind
from dovetail.sim.device import Device, requests_of
from dovetail.sim.faults import Fault
from dovetail.sim.metrics import Fate, Result
from dovetail.sim.operations import Operation, Operator
from dovetail.sim.sampling import Sampler
from dovetail.sim.slicing import Slicer
from dovetail.sim.stories import Stories
from dovetail.sim.striking import MEMORY, REQUEST, SAMPLE, TIMER, TURN, Striker
from dovetail.sim.trace import Arrival

SAMPLE_EVERY_S = 1.0


class Simulation:
    def __init__(
        self,
        devices: Sequence[Device],
        composition: Composition,
        arrivals: Sequence[Arrival],
        *,
        rule: SloRule | None = None,
        horizon_s: float | None = None,
        log: EventLog | None = None,
        faults: Sequence[Fault] = (),
        on_one_thread: bool = False,
        retry: RetryRule | None = None,
        deadly: Collection[int] = (),
        hang_s: float = 0.0,
        operations: Sequence[Operation] = (),
        preparations: Mapping[int, Preparation] | None = None,
        are_viewed: bool = False,
    ) -> None:
        """`on_one_thread`: the one node decides on the thread that computes, and hears of what happens during a turn at
        the end of the turn. `deadly`: requests that end every worker that computes them."""
        self.devices = list(devices)
        self.rule = rule or SloRule()
        self.arrivals = arrivals
        self.horizon_s = horizon_s if horizon_s is not None else arrivals[-1].arrival_s
        self.now = 0.0
        self.log = log
        self.stories = Stories(arrivals)
        self.records = self.stories.records
        self.faults = faults
        self.operations = operations
        self.keep_samples = True
        self.on_sample: Callable[[float], None] | None = None
        self.cluster = LocalCluster(
            [device.node for device in self.devices],
            composition,
            rule=self.rule,
            retry=retry,
            log=log,
            are_viewed=are_viewed,
        )
        self.cluster.preparations = dict(preparations or {})
        self._device_of = {device.node.name: device for device in self.devices}
        self.node_of = {id(device): node for device, node in zip(self.devices, self.cluster.nodes, strict=True)}
        for device in self.devices:
            if device.machine is not None:
                handle = self.cluster.handles[device.node.name]
                handle.facts = replace(handle.facts, host=device.machine.name)
        self.result = Result(composition.name, self.records, [], [d.node.name for d in self.devices], self.horizon_s)
        self.result.rule = self.rule
        self._heap: list[tuple[float, int, int, Callable[..., None], Any]] = []
        self._serial = 0
        self._wake_s = INFINITY  # when the controller will be woken
        self._sampler = Sampler(self.devices)
        self._striker = Striker(self)
        self.operator = Operator(self)
        self._slicer = Slicer(self)
        self.on_one_thread = on_one_thread
        self._deadly = frozenset(deadly)
        self.hang_s = hang_s  # a worker that stands still for longer is taken to hang; 0 = never
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
            self.push(fault.at_s, MEMORY, self._striker.strike, fault)
        for device in self.devices:
            self.operator.offer_all(device, 0.0)
        for operation in self.operations:
            self.push(operation.at_s, REQUEST, self.operator.act, operation)
        self.push(0.0, SAMPLE, self._sample, None)
        heap = self._heap
        while heap:
            now, priority, _, handler, argument = heappop(heap)
            self.now = now
            if self.on_one_thread and priority not in (TURN, SAMPLE) and self.devices[0].node.turn is not None:
                self._miss(priority, handler, argument)
            else:
                handler(now, argument)
        self.result.events = self._serial
        for device in self.devices:
            self.result.decode_turns += device.decode_turns
            self.result.decode_tokens += device.decode_tokens
        return self.result

    def push(self, time_s: float, priority: int, handler: Callable[..., None], argument: Any) -> None:
        self._serial = serial = self._serial + 1
        heappush(self._heap, (time_s, priority, serial, handler, argument))

    def _announce(self, index: int) -> None:
        """The next arrival; a node that may hear of several at once needs all of them in the heap."""
        last = len(self.arrivals) if self.on_one_thread else index + 1
        for number in range(index, min(last, len(self.arrivals))):
            self.push(self.arrivals[number].arrival_s, REQUEST, self._arrive, number)

    # Events

    def _arrive(self, now: float, index: int) -> None:
        arrival = self.arrivals[index]
        if not self.on_one_thread:
            self._announce(index + 1)
        self.stories.open += len(arrival.produced)
        self.cluster.submit(submission_of(arrival), now)
        self.settle(now)

    def _wake(self, now: float, wake_s: float) -> None:
        if wake_s != self._wake_s:
            return  # it was woken before
        self._wake_s = INFINITY
        due_s = self.cluster.next_wake_s()
        if due_s is not None and due_s <= now:  # else it woke by itself to choose a turn
            self.cluster.wake(now)
        self.settle(now)

    def turn_end(self, now: float, key: tuple[Device, int]) -> None:
        device, epoch = key
        if not self.goes_on(device, epoch, now, self.turn_end, key):
            return
        cluster, turn, node = self.cluster, device.node.turn, self.node_of[id(device)]
        assert turn is not None
        if self._deadly and self._deadly & requests_of(turn):
            self._striker.kill(device, now)
            self.hear_all(now)
            return
        done, computed = device.end(turn)
        if done and device.dies_telling:
            self._striker.die_telling(device, done, computed, now)
            return
        cluster.turn_ended(node, now, done, computed)
        if cluster.outbox:
            self.carry_out_all(now)
        self.hear_all(now)
        if device.durations.gap_s:
            self.push(now + device.durations.gap_s, TURN, self._choose, key)
        else:
            self._choose(now, key)

    def goes_on(self, device: Device, epoch: int, now: float, handler: Callable[..., None], argument: Any) -> bool:
        """What a turn comes to is handled now, unless the device has died since; one that is stalled, later."""
        if epoch == device.epoch and now < device.stalled_until_s:
            self.push(device.stalled_until_s, TURN, handler, argument)
            return False
        return epoch == device.epoch

    def _miss(self, priority: int, handler: Callable[..., None], argument: Any) -> None:
        """It happened during a turn."""
        if priority == TIMER:
            self._wake_s = INFINITY  # the choice of the next turn begins with that
        else:
            self._unheard.append((handler, argument))

    def hear_all(self, now: float) -> None:
        """What happened during the turn that has ended."""
        if not self.on_one_thread:
            return
        self._is_hearing = True
        unheard, self._unheard = self._unheard, []
        for handler, argument in unheard:
            handler(now, argument)
        self._is_hearing = False

    def _choose(self, now: float, key: tuple[Device, int]) -> None:
        """The device is free again."""
        node = self.node_of[id(key[0])]
        self.cluster.touched[node.name] = node
        self.settle(now)

    def _op_end(self, now: float, key: tuple[Device, int, Callable[..., None], int]) -> None:
        device, epoch, event, instance = key
        if now < device.stalled_until_s:
            self.push(device.stalled_until_s, MEMORY, self._op_end, key)
        elif epoch == device.epoch:
            event(instance, now)
            self.cluster.settle(now)
            self.settle(now)

    def _sample(self, now: float, _: None) -> None:
        if self.keep_samples:
            self.result.samples.append(self._sampler.take(now, len(self.cluster.controller.queued)))
            self.result.gpu_instance_s += SAMPLE_EVERY_S * self._sampler.gpu_instances
        if self.on_sample is not None:
            self.on_sample(now)
        if now + SAMPLE_EVERY_S <= self.horizon_s or self.stories.open:
            self.push(now + SAMPLE_EVERY_S, SAMPLE, self._sample, None)

    # Carrying out what controller and nodes say

    def settle(self, now: float) -> None:
        """Carry everything out, then start turns on the nodes that changed."""
        cluster = self.cluster
        if cluster.outbox:
            self.carry_out_all(now)
        while cluster.touched and not self._is_hearing:
            node = next(iter(cluster.touched.values()))
            turn = cluster.next_turn(node, now)
            if cluster.outbox:
                self.carry_out_all(now)
            if turn is not None:
                device = self._device_of[node.name]
                self._slicer.compute(device, turn, device.turn_s(turn), now)
        wake_s = cluster.next_wake_s()
        if wake_s is not None and wake_s < self._wake_s:
            self._wake_s = wake_s
            self.push(max(wake_s, now), TIMER, self._wake, wake_s)

    def carry_out_all(self, now: float) -> None:
        outbox = self.cluster.outbox
        while outbox:
            self._carry_out(*outbox.popleft(), now)
            self.cluster.settle(now)

    def _carry_out(self, node: NodeRuntime | None, said: Output, now: float) -> None:
        if isinstance(said, RequestRejected):
            self.stories.refuse(said, now)
        elif isinstance(said, Failed):
            self.stories.end(said.work, Fate.FAILED, said.reason, now)
        elif isinstance(said, GiveUp | Kill):
            self._striker.obey(said, now)
        elif node is not None:  # else: no node is left, which each request was told
            self._carry_out_on(node, said, now)

    def _carry_out_on(self, node: NodeRuntime, said: Output, now: float) -> None:
        device = self._device_of[node.name]
        if isinstance(said, events.Enter):
            device.entered(said.instance, said.work)
            self.stories.entered(device, said.instance, said.work, now)
        elif isinstance(said, events.Leave):
            device.left(said.instance, said.work)
        elif isinstance(said, events.Resumed):
            device.resumed(said.instance, said.work)
            self.stories.resumed(said.work, now)
        elif isinstance(said, events.StartResize):
            duration = device.resize(said)
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
            self.push(now + duration, MEMORY, self._op_end, (device, device.epoch, event, instance))
        else:
            event(instance, now)  # over before the next turn is chosen

    def _load(self, device: Device, node: NodeRuntime, said: events.StartLoad, now: float) -> None:
        end = device.load_end_s(said, now)
        self.result.cold_starts += 1
        event: Callable[..., None] = node.load_ended
        if device.machine is not None:
            event = partial(self._arrived, device, said.model)
        if device.failing_loads:
            device.failing_loads -= 1
            event = node.load_failed
        self.push(end, MEMORY, self._op_end, (device, device.epoch, event, said.instance))

    def _arrived(self, device: Device, model: str, instance: int, now: float) -> None:
        """A load has ended: the weights are in its machine's tiers too, and what went for them is not any more."""
        machine = device.machine
        assert machine is not None
        self.node_of[id(device)].load_ended(instance, now)
        changed = machine.loaded(model)
        for one in self.devices if changed else ():
            for each in changed if one.machine is machine and one.node.up else ():
                self.node_of[id(one)].offer(each, now)

    # Records

    def _record(self, device: Device, said: Output, now: float) -> None:
        if isinstance(said, events.FirstToken):
            self.stories.first_token(device, said, now)
        elif isinstance(said, protocol.Finished):
            self.stories.end(said.request, Fate.FINISHED, "", now)
        elif isinstance(said, protocol.InstanceGone):
            device.forget(said.instance)


def submission_of(arrival: Arrival) -> Submission:
    return Submission(
        str(arrival.model),
        arrival.input_tokens,
        arrival.arrival_s,
        arrival.produced,
        arrival.ttft_s,
        arrival.tpot_s,
        arrival.is_best_effort,
        arrival.goes_first,
        arrival.output_tokens,
    )
