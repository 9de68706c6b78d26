"""The life of a device's instances: begun, loaded, kept while idle (S11), closed. Their requests are `membership`'s."""

from __future__ import annotations

from dovetail.node.admission import Admitter, Grant
from dovetail.node.device import Device
from dovetail.node.events import SetTimer
from dovetail.node.instance import Instance, State
from dovetail.node.protocol import InstanceClosed, InstanceGone, InstanceReady
from dovetail.node.residency import Residency
from dovetail.policy.headroom import INFINITY, Refusal
from dovetail.policy.memory import Part
from dovetail.policy.work import Work

LONG_IDLE_S = 30.0  # an instance that was in use since then is likely to be called again


class Lifecycle:
    def __init__(self, device: Device, residency: Residency, admit: Admitter) -> None:
        self._device = device
        self._residency = residency
        self._admit = admit

    # Beginning

    def load(self, instance: Instance, grant: Grant) -> None:
        self._residency.load(instance)
        if grant.kv_tokens is not None:
            self._residency.resize(instance, grant.kv_tokens)
        self._device.update(instance)

    def loaded(self, instance: Instance, now: float, duration_s: float) -> None:
        for work in instance.works():  # S1: those who waited for the cold start get it on top
            if work.produced == 0:
                work.give_grace(min(duration_s, now - work.arrival_s))
        if instance.state is State.LOADING:
            instance.state = State.READY
            self._device.outbox.append(InstanceReady(instance.id, instance.model))
        instance.sort_waiting()
        instance.refresh()
        self._residency.done(instance, Part.WEIGHTS)
        self.after_op(instance)

    def load_failed(self, instance: Instance) -> None:
        for work in instance.works():
            self._device.evict(instance, work, "load_failed")
        self._residency.failed(instance)
        if instance.state is State.CLOSING:
            self.after_op(instance)
        else:
            self.close(instance)

    # Idle

    def idle(self, since_s: float = INFINITY) -> list[Instance]:
        """Instances that may be closed, since then at least, the longest idle first; one that is kept forever is not
        among them."""
        found = [one for one in self._device.instances.values() if one.is_idle and one.idle_since_s <= since_s]
        return sorted(found, key=lambda one: one.idle_since_s)

    def reclaim(self, work: Work, free_at_s: float) -> Grant | Refusal:
        """Close idle instances, the longest idle first, until the work's model can start; none, if all of them would
        not be enough. Where weights may take a share of the device only, it can start when they are gone. For best
        effort nothing goes that was in use a moment ago."""
        idle = self.idle(self._device.now_s - LONG_IDLE_S) if work.is_best_effort else self.idle()
        missing = self._admit.missing_bytes(self._device.hostings[work.model], work)
        if sum(self._residency.planned_bytes(one) for one in idle) < missing:
            return Refusal.MEMORY
        for instance in idle:
            missing -= self._residency.planned_bytes(instance)
            self.close(instance)
            grant = self._admit.start(work, free_at_s)
            if grant is not Refusal.MEMORY or missing <= 0:
                return grant
        return Refusal.MEMORY

    def emptied(self, instance: Instance, now: float) -> None:
        """Its last request has left: it is closed when its keep-alive is over."""
        self._device.update(instance)
        instance.epoch += 1
        instance.idle_since_s = now
        keep_alive_s = instance.hosting.keep_alive_s
        if keep_alive_s is None:
            keep_alive_s = (
                0.0 if instance.hosting.weights_in_place else self._device.composition.reclaiming.keep_alive_s
            )
        if keep_alive_s <= 0.0:
            self.close(instance)
        elif keep_alive_s != INFINITY:
            self._device.outbox.append(SetTimer(now + keep_alive_s, instance.id, instance.epoch))

    def close(self, instance: Instance) -> None:
        if instance.state is State.CLOSING:
            return
        instance.state = State.CLOSING
        self._device.update(instance)
        self._device.outbox.append(InstanceClosed(instance.id, instance.model))
        self._residency.release(instance)
        self.after_op(instance)

    def after_op(self, instance: Instance) -> None:
        """An operation of it has ended, or a turn."""
        self._device.update(instance)
        if instance.state is State.CLOSING and not instance.in_turn and self._residency.is_empty(instance):
            self._device.forget(instance)
            self._device.outbox.append(InstanceGone(instance.id, instance.model))
