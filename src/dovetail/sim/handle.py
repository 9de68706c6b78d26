"""An in-process NodeHandle that notes which simulated nodes have something to say."""

from __future__ import annotations

from dovetail.node.work import Work
from dovetail.policy.headroom import Refusal
from dovetail.sim.device import Device


class Handle:
    def __init__(self, device: Device, dirty: list[Device]) -> None:
        node = device.node
        self._device = device
        self._dirty = dirty
        self._node = node
        self._fullness: float | None = None
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
        """As of the node's last change of membership, like a view mirrored from reports."""
        if self._fullness is None:
            self._fullness = self._node.fullness
        return self._fullness

    def changed(self) -> None:
        self._fullness = None

    def join(self, instance_id: int, work: Work, now: float) -> Refusal | None:
        answer = self._node.join(instance_id, work, now)
        if answer is None:
            self._dirty.append(self._device)
            self._fullness = None
            if work.cached:
                self._device.joined_running(instance_id, work)
        return answer

    def start(self, work: Work, now: float) -> int | Refusal:
        answer = self._node.start(work, now)
        if not isinstance(answer, Refusal):
            self._dirty.append(self._device)
            self._fullness = None
            if work.cached:
                self._device.joined_running(answer, work)
        return answer

    def preempt(self, instance_id: int, reason: str) -> None:
        self._node.preempt(instance_id, reason)
        self._dirty.append(self._device)
        self._fullness = None
