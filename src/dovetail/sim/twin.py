"""The simulated twin of a real node: the node of its log, asked the same in virtual time.

It takes from the log what belongs to the physics: how long turns and loads took, and what lay between turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop
from random import Random
from statistics import median
from typing import Any

from dovetail.cluster.decisions import Decision, Queued
from dovetail.cluster.waiting import WaitingRoom
from dovetail.eventlog import EventLog
from dovetail.node.events import InstanceGone, InstanceReady, Notice, StartLoad, Turn
from dovetail.node.instance import State
from dovetail.node.node import Node
from dovetail.node.work import Work
from dovetail.policy.headroom import INFINITY, SloRule
from dovetail.policy.knobs import Knobs
from dovetail.policy.latency import TransferModel
from dovetail.policy.placement import DeviceKind
from dovetail.profiles.live import LiveLatency
from dovetail.profiles.timings import kind_of
from dovetail.sim import real_log
from dovetail.sim.device import Device, Noise
from dovetail.sim.driver import REQUEST, SAMPLE, TURN, Simulation
from dovetail.sim.metrics import Fate, Result
from dovetail.sim.real_log import RealLog
from dovetail.sim.replay import knobs_of
from dovetail.sim.trace import Arrival


def simulate(stored: RealLog, real: Result, seed: int = 0, noise: float = 0.05, log: EventLog | None = None) -> Result:
    """The same requests on the same node in virtual time."""
    arrivals = [Arrival(r.arrival_s, r.model, r.input_tokens, r.output_tokens) for r in real.records]
    knobs = knobs_of(stored.header["knobs"])
    header = stored.header
    node = Node(header["node"], DeviceKind.CPU, header["memory_bytes"], real_log.hostings(stored), knobs)
    device = PacedDevice(node, arrivals, stored, Random(seed), noise)
    return OneThread(device, knobs, arrivals, log).timed_run()


class PacedDevice(Device):
    """Takes as long as the real one did on the whole, for turns of the same kind and for loads; the node on it begins
    with what was known at first and learns as well."""

    def __init__(self, node: Node, arrivals: Sequence[Arrival], log: RealLog, rng: Random, noise: float) -> None:
        outputs = {index: arrival.output_tokens for index, arrival in enumerate(arrivals)}
        super().__init__(node, outputs, TransferModel(INFINITY, 0.0, unload_s=0.0), Noise(rng, noise))
        self._rng = rng
        self._loads = real_log.load_times_s(log)
        self._pace = real_log.pace(log)

    def duration_s(self, turn: Turn) -> float:
        instance, prefill = turn
        latency = instance.hosting.latency
        assert isinstance(latency, LiveLatency)
        is_beside_load = any(one.state is State.LOADING for one in self.node.instances.values())
        if prefill is not None:
            tokens = prefill.known_tokens
            seconds = latency.base.prefill_s(tokens) * self._factor(is_beside_load, True, tokens)
            latency.observe_prefill(tokens, seconds)
        else:
            batch, tokens = self.count_decode(instance), instance.tokens
            seconds = latency.base.decode_s(batch, tokens) * self._factor(is_beside_load, False, batch)
            latency.observe_decode(batch, tokens, seconds)
        return seconds + self._pace.mean_gap_s

    def _factor(self, is_beside_load: bool, is_prefill: bool, amount: int) -> float:
        return self._pace.factor(kind_of(is_prefill, is_beside_load, amount)) * self.next_noise()

    def load_s(self, command: StartLoad) -> float:
        others = self.node.instances.values()
        is_busy = any(one.state is not State.LOADING and any(one.works()) for one in others)
        times = self._loads[is_busy] or self._loads[not is_busy]
        return self._rng.choice(times) if times else 0.0


class OneThread(Simulation):
    """A node that decides on the thread that computes: what happens during a turn is heard of when it ends, and those
    without a place ask again as they do there."""

    def __init__(self, device: Device, knobs: Knobs, arrivals: Sequence[Arrival], log: EventLog | None) -> None:
        super().__init__([device], knobs, arrivals, rule=SloRule(), log=log)
        self._unheard: list[tuple[Callable[..., None], Any]] = []
        self._is_listening = False  # between two turns
        self._waiting = WaitingRoom()
        self._wake_s = INFINITY

    def _push(self, time_s: float, priority: int, handler: Callable[..., None], argument: Any) -> None:
        if priority in (TURN, SAMPLE):
            super()._push(time_s, priority, handler, argument)
        else:
            super()._push(max(time_s, self.now), priority, self._hear, (handler, argument))

    def _hear(self, now: float, said: tuple[Callable[..., None], Any]) -> None:
        if self.devices[0].node.turn is not None and not self._is_listening:
            self._unheard.append(said)
            return
        said[0](now, said[1])
        self._set_alarm()

    def _turn_end(self, now: float, key: tuple[Device, int]) -> None:
        self._is_listening = True
        unheard, self._unheard = self._unheard, []
        for said in unheard:
            self._hear(now, said)
        while self._heap and self._heap[0][0] <= now:  # what the unheard brought with it
            _, _, _, handler, argument = heappop(self._heap)
            handler(now, argument)
        self._waiting.retry(now, self._ask_again)
        self._is_listening = False
        super()._turn_end(now, key)
        self._set_alarm()

    def _op(self, device: Device, now: float, duration: float, method: Callable[..., None], instance: int) -> None:
        if duration > 0.0:
            super()._op(device, now, duration, method, instance)
        else:
            method(instance, now)
            self._dirty.append(device)

    def _ask_again(self, id: int, now: float) -> None:
        self._retry(now, id)

    def _set_alarm(self) -> None:
        next_s = self._waiting.next_s()
        if next_s is not None and next_s < self._wake_s:
            self._wake_s = next_s
            self._push(next_s, REQUEST, self._wake, None)

    def _wake(self, now: float, _: None) -> None:
        self._wake_s = INFINITY
        self._waiting.retry(now, self._ask_again)

    def _decide(self, decision: Decision, now: float) -> None:
        if isinstance(decision, Queued):
            self._waiting.enter(decision.work.id, decision.work)
            if self.log is not None:
                self.log.decision(now, decision)
        else:
            super()._decide(decision, now)

    def _end(self, work: Work, fate: Fate, reason: str, now: float) -> None:
        super()._end(work, fate, reason, now)
        self._waiting.changed()

    def _report(self, device: Device, notice: Notice, now: float) -> None:
        if isinstance(notice, InstanceReady | InstanceGone):
            self._waiting.changed()
        super()._report(device, notice, now)


def side_by_side(real: Result, simulated: Sequence[Result]) -> list[dict[str, float | int | str]]:
    """What really happened, and the median of each figure over the simulations."""
    rows = [_row(result) for result in simulated]
    middle = {name: median(row[name] for row in rows) for name in rows[0]}
    return [{"run": "real", **_row(real)}, {"run": "simulated", **middle}]


def _row(result: Result) -> dict[str, float]:
    summary = result.summary()
    row = {"requests": summary["requests"], "attainment": round(result.met() / len(result.records), 4)}
    return row | {name: summary[name] for name in ("ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "cold_starts")}
