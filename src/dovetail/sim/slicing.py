"""Turns as a simulated device computes them: at once, or in slices, with turns of others in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.node.events import Turn
from dovetail.sim.device import Device
from dovetail.sim.striking import TURN

if TYPE_CHECKING:
    from dovetail.sim.driver import Simulation

# A device, as of which of its lives, the turn that has stopped there, and what that takes still, or when it ends that
# reads its layers from a disk
Halted = tuple[Device, int, Turn, float]


class Slicer:
    def __init__(self, simulation: Simulation) -> None:
        self._sim = simulation

    def compute(self, device: Device, turn: Turn, left_s: float, now: float) -> None:
        """A slice, or all that is left."""
        if turn.instance.hosting.layer_s is not None:
            self._read(now, (device, device.epoch, turn, now + left_s))
        elif turn.slice_s < left_s:
            self._sim.push(now + turn.slice_s, TURN, self._halt, (device, device.epoch, turn, left_s - turn.slice_s))
        else:
            self._sim.push(now + left_s, TURN, self._sim.turn_end, (device, device.epoch))

    def _halt(self, now: float, halted: Halted) -> None:
        device, epoch, turn, left_s = halted
        if not self._sim.goes_on(device, epoch, now, self._halt, halted):
            return
        inner = self._sim.node_of[id(device)].interlude(now)
        if inner is None:
            self.compute(device, turn, left_s, now)
        else:
            self._sim.push(now + device.turn_s(inner), TURN, self._inner_end, halted)

    def _inner_end(self, now: float, halted: Halted) -> None:
        device, epoch, _, _ = halted
        if not self._sim.goes_on(device, epoch, now, self._inner_end, halted):
            return
        inner, node = device.node.turn, self._sim.node_of[id(device)]
        assert inner is not None
        if self._sim.on_one_thread:  # which goes on with what has stopped before it does anything else
            node.turn_ended(now, *device.end(inner))
        else:
            self._sim.cluster.turn_ended(node, now, *device.end(inner))
            self._sim.settle(now)
        self._halt(now, halted)

    def _read(self, now: float, reading: Halted) -> None:
        """Layers come from a disk while others compute. They are looked for as often as a layer could be computed; that
        it is takes none of the others' time here."""
        device, epoch, turn, end_s = reading
        if not self._sim.goes_on(device, epoch, now, self._read, reading):
            return
        node, layer_s = self._sim.node_of[id(device)], turn.instance.hosting.layer_s
        assert layer_s is not None
        if now >= end_s:
            self._sim.turn_end(now, (device, epoch))
            return
        self._sim.hear_all(now)
        inner = node.interlude(now, is_layer_here=False)
        if device.node.outbox:
            node.changed(now)
            self._sim.settle(now)
        if inner is None:
            self._sim.push(min(now + layer_s, end_s), TURN, self._read, reading)
        else:
            self._sim.push(now + device.turn_s(inner), TURN, self._inner_read, reading)

    def _inner_read(self, now: float, reading: Halted) -> None:
        device, epoch, _, _ = reading
        if not self._sim.goes_on(device, epoch, now, self._inner_read, reading):
            return
        inner, node = device.node.turn, self._sim.node_of[id(device)]
        assert inner is not None
        self._sim.cluster.turn_ended(node, now, *device.end(inner))
        self._sim.settle(now)
        self._read(now, reading)
