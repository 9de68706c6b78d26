"""Faults as they strike a simulation, and how they end. What becomes of the requests, the controller decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail import logschema
from dovetail.cluster.decisions import GiveUp, Kill
from dovetail.cluster.liveness import DOUBT_S
from dovetail.cluster.retry import Loss
from dovetail.node.events import Computed
from dovetail.policy.work import Work
from dovetail.pulse import LOOK_S
from dovetail.sim.device import Device, requests_of
from dovetail.sim.faults import Fault, FaultKind

if TYPE_CHECKING:
    from dovetail.sim.driver import Simulation

# Priorities of events at the same instant: memory first, then turns, then timers, then requests, then samples.
MEMORY, TURN, TIMER, REQUEST, SAMPLE = range(5)
NOTICE_S = 0.5  # until a shell sees that a process has ended, or that a connection is lost
RESTART_S = 2.0  # of a worker that a request has ended


class Striker:
    def __init__(self, simulation: Simulation) -> None:
        self._sim = simulation

    def strike(self, now: float, fault: Fault) -> None:
        sim, device = self._sim, self._sim.devices[fault.node]
        if sim.log is not None:
            sim.log.write(now, logschema.FAULT, node=device.node.name, kind=fault.kind.value)
        if fault.kind is FaultKind.STALL:
            device.stalled_until_s = max(device.stalled_until_s, now + fault.duration_s)
            if sim.hang_s:
                sim.push(now + LOOK_S, REQUEST, self._look, (device, device.epoch, now))
        elif fault.kind is FaultKind.SLOW:
            device.slowdown = fault.factor
            sim.push(now + fault.duration_s, MEMORY, self._calm, device)
        elif fault.kind is FaultKind.LOAD_FAILS:
            device.failing_loads += 1
        elif fault.kind is FaultKind.MOVE:
            sim.cluster.move_all(device.node.name, now)
            sim.settle(now)
        elif fault.kind in (FaultKind.LATE, FaultKind.DEAF, FaultKind.MUTE):
            self._disturb(device, fault, now)
        else:
            self._take_away(device, fault, now)

    def _disturb(self, device: Device, fault: Fault, now: float) -> None:
        """What is said to the node, or what it says."""
        handle = self._sim.cluster.handles[device.node.name]
        if fault.kind is FaultKind.LATE:
            handle.lag_s = fault.factor
        elif fault.kind is FaultKind.DEAF:
            handle.order_lag_s = fault.factor
        else:
            handle.is_mute = True
        self._sim.push(now + fault.duration_s, MEMORY, self._calm, device)

    def _calm(self, now: float, device: Device) -> None:
        device.slowdown = 1.0
        handle = self._sim.cluster.handles[device.node.name]
        handle.lag_s, handle.order_lag_s, handle.is_mute = 0.0, 0.0, False

    def _take_away(self, device: Device, fault: Fault, now: float) -> None:
        """The node, for a while."""
        sim, handle = self._sim, self._sim.cluster.handles[device.node.name]
        if not device.node.up or handle.is_cut or handle.is_away:
            return  # it is away already
        if fault.kind is FaultKind.DIE:
            self._die(device, fault.duration_s, now)
        elif fault.kind is FaultKind.PARTITION:
            sim.cluster.cut(device.node.name)
            sim.push(now + NOTICE_S, REQUEST, self._unreachable, device)
            sim.push(now + NOTICE_S + DOUBT_S + fault.duration_s, MEMORY, self._heal, device)
        else:
            sim.cluster.drain(device.node.name, now)
            sim.settle(now)
            end, arguments = (
                (self._leave, (device, fault)) if fault.kind is FaultKind.LEAVE else (self._undrain, device)
            )
            sim.push(now + fault.duration_s, MEMORY, end, arguments)

    # Deaths

    def kill(self, device: Device, now: float) -> None:
        """A request ends the worker that computes it, or it hangs and is ended."""
        device.stalled_until_s = min(device.stalled_until_s, now)
        self._die(device, RESTART_S, now)
        self._sim.settle(now)

    def die_telling(self, device: Device, done: list[int], computed: Computed, now: float) -> None:
        """Tokens and what follows from them are two messages: these have their last ones, and no more is heard."""
        handle = self._sim.cluster.handles[device.node.name]
        handle.has_no_notices = True
        self._sim.cluster.turn_ended(self._sim.node_of[id(device)], now, done, computed)
        self._sim.carry_out_all(now)
        self.kill(device, now)
        handle.has_no_notices = False
        self._sim.hear_all(now)

    def _die(self, device: Device, duration_s: float, now: float) -> None:
        suspects = self._suspects(device)
        device.die()
        lost = self._sim.node_of[id(device)].fail()
        self._sim.cluster.handles[device.node.name].forget_underway()
        self._sim.push(now + NOTICE_S, REQUEST, self._lost, (device, lost, suspects))
        self._sim.push(now + NOTICE_S + duration_s, MEMORY, self._recover, device)

    def _suspects(self, device: Device) -> frozenset[int]:
        """As its pulse tells: the requests of the iteration that it dies in."""
        turn = device.node.turn
        if turn is None:
            return frozenset()
        groups = {id: work.group for id, work in self._sim.cluster.controller.works.items()}
        return frozenset(groups.get(id, id) for id in requests_of(turn))

    def _lost(self, now: float, key: tuple[Device, list[Work], frozenset[int]]) -> None:
        device, works, suspects = key
        loss = Loss(f"the worker '{device.node.name}' died", suspects)
        self._sim.cluster.lost(self._sim.node_of[id(device)], works, now, loss)
        self._sim.settle(now)

    def _recover(self, now: float, device: Device) -> None:
        device.node.device.up = True
        self._sim.operator.offer_all(device, now)
        self._sim.cluster.settle(now)
        self._sim.settle(now)

    # Partitions

    def _unreachable(self, now: float, device: Device) -> None:
        self._sim.cluster.unreachable(device.node.name, now)
        self._sim.settle(now)

    # What the controller has its shell do

    def obey(self, command: GiveUp | Kill, now: float) -> None:
        name = command.node.name
        if isinstance(command, GiveUp):
            self._sim.cluster.give_up(name, now)
        else:
            self.kill(next(one for one in self._sim.devices if one.node.name == name), now)

    # Standing still

    def _look(self, now: float, key: tuple[Device, int, float]) -> None:
        """Its heartbeat has stood still since then; what comes of that is the controller's."""
        device, epoch, since_s = key
        handle = self._sim.cluster.handles[device.node.name]
        if device.epoch != epoch or now >= device.stalled_until_s or handle.is_cut or not device.node.up:
            return
        expected_s = device.node.turn.expected_s if device.node.turn is not None else 0.0
        self._sim.cluster.controller.liveness.stands_still(handle, now - since_s, expected_s, self._sim.hang_s)
        self._sim.cluster.settle(now)
        self._sim.settle(now)
        self._sim.push(now + LOOK_S, REQUEST, self._look, key)

    def _heal(self, now: float, device: Device) -> None:
        """The node hears that it was given up, and begins anew."""
        device.die()
        self._sim.node_of[id(device)].fail()
        device.node.device.up = True
        self._sim.operator.offer_all(device, now)
        self._sim.cluster.heal(device.node.name, now)
        self._sim.settle(now)

    # Leaving and joining

    def _undrain(self, now: float, device: Device) -> None:
        self._sim.cluster.controller.undrain(self._sim.cluster.handles[device.node.name])
        self._sim.settle(now)

    def _leave(self, now: float, key: tuple[Device, Fault]) -> None:
        device, fault = key
        handle = self._sim.cluster.handles[device.node.name]
        if not device.node.up or handle.is_cut:
            self._undrain(now, device)
            return
        device.die()
        works = self._sim.node_of[id(device)].fail()
        handle.forget_underway()
        self._sim.cluster.leave(self._sim.node_of[id(device)], works, now)
        self._sim.settle(now)
        self._sim.push(now + fault.duration_s, MEMORY, self._join, device)

    def _join(self, now: float, device: Device) -> None:
        device.node.device.up = True
        self._sim.operator.offer_all(device, now)
        self._sim.cluster.join(device.node.name, now)
        self._sim.settle(now)
