"""What lies in a node's memory: turns the ledger's decisions (S7) into loads, unloads and resizes, one at a time each.

An instance takes no turn while an operation of its own is under way or waiting for the end of its turn.
"""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.node.device import Device
from dovetail.node.events import Command, StartLoad, StartResize, StartUnload
from dovetail.node.instance import Instance, PendingOp, State
from dovetail.policy.headroom import INFINITY
from dovetail.policy.memory import Account, Op, Part
from dovetail.policy.placement import Hosting


class Residency:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._ledger = device.ledger
        self._transfer = device.transfer  # what operations should take

    def planned_kv_tokens(self, instance: Instance) -> int:
        return self._ledger.planned_of(Account(Part.KV, instance.id)) // instance.hosting.kv_bytes_per_token

    def planned_bytes(self, instance: Instance) -> int:
        return self._ledger.planned_of(Account(Part.KV, instance.id)) + self._ledger.planned_of(
            Account(Part.WEIGHTS, instance.id)
        )

    def is_empty(self, instance: Instance) -> bool:
        """Everything it held has been given back."""
        return not instance.ops and not instance.op_running and self._holds_nothing(instance)

    def _holds_nothing(self, instance: Instance) -> bool:
        ledger = self._ledger
        return all(ledger.is_settled(one) and ledger.planned_of(one) == 0 for one in _accounts(instance))

    def loaded_s(self, hosting: Hosting) -> float:
        """When weights that are ordered now should be there."""
        return max(self._device.now_s, self._device.link_free_s) + hosting.load_s

    def resize_s(self, instance: Instance | None, hosting: Hosting, kv_tokens: int | None) -> float:
        """What bringing a KV pool to this size should take, room for it being waited for; None leaves it."""
        if kv_tokens is None:
            return 0.0
        old_bytes = 0 if instance is None else self._ledger.planned_of(Account(Part.KV, instance.id))
        new_bytes = kv_tokens * hosting.kv_bytes_per_token
        wait_s = 0.0 if self._ledger.held + new_bytes - old_bytes <= self._ledger.capacity else self._transfer.unload_s
        return wait_s + self._transfer.resize_s(old_bytes, new_bytes)

    def ready_s(self, instance: Instance, free_at_s: float) -> tuple[float, float]:
        """When an instance should be able to take turns, and when its weights should be there (now, if they are)."""
        if instance.can_run:
            return 0.0, 0.0
        now = self._device.now_s
        loaded = now
        if instance.state is State.LOADING:
            is_ordered = instance.loaded_s != INFINITY
            loaded = max(instance.loaded_s, now) if is_ordered else self.loaded_s(instance.hosting)
        ready = loaded
        if instance.op_running:
            ready = max(ready, instance.op_end_s)
        elif instance.in_turn:
            ready = max(ready, free_at_s)
        for op in instance.ops:
            if op.part is Part.KV:
                ready += self._transfer.resize_s(op.old_bytes, op.new_bytes)
        if not instance.op_running and not instance.ops:  # what it needs waits for somebody else's memory
            ready += self._transfer.unload_s
        return ready, loaded

    def load(self, instance: Instance) -> None:
        if instance.hosting.weights_in_place:
            instance.state = State.READY
        else:
            self._queue(self._ledger.issue(Account(Part.WEIGHTS, instance.id), instance.hosting.weight_bytes))

    def resize(self, instance: Instance, kv_tokens: int) -> None:
        num_bytes = kv_tokens * instance.hosting.kv_bytes_per_token
        self._queue(self._ledger.issue(Account(Part.KV, instance.id), num_bytes))

    def release(self, instance: Instance) -> None:
        self._queue(self._ledger.issue(Account(Part.KV, instance.id), 0))
        self._queue(self._ledger.issue(Account(Part.WEIGHTS, instance.id), 0))

    # Adapters: each has an account of its own, whose operations are over as soon as they are counted.

    def keep_adapter(self, number: int, num_bytes: int) -> bool:
        """False if there is no room for it now."""
        if max(self._ledger.planned, self._ledger.held) + num_bytes > self._ledger.capacity:
            return False
        self._settle_adapter(number, num_bytes)
        return True

    def drop_adapter(self, number: int) -> None:
        """Its memory is free: growths may have waited for it."""
        self._settle_adapter(number, 0)

    def _settle_adapter(self, number: int, num_bytes: int) -> None:
        account = Account(Part.ADAPTER, number)
        for _ in self._ledger.issue(account, num_bytes):  # nothing, where it has no bytes
            self._queue(self._ledger.done(account))

    def done(self, instance: Instance, part: Part) -> None:
        """The device reports the end of the instance's operation."""
        assert instance.op_running
        instance.op_running = False
        account = Account(part, instance.id)
        held = self._ledger.held_of(account)
        ops = self._ledger.done(account)
        if part is Part.WEIGHTS:
            self._mend_link()
        if part is Part.KV:
            instance.kv_tokens = min(held, self._pool_bytes(instance, ops)) // instance.hosting.kv_bytes_per_token
        self._queue(ops)
        self.pump(instance)

    def failed(self, instance: Instance) -> None:
        """The load came to nothing."""
        assert instance.op_running
        instance.op_running = False
        self._mend_link()
        self._queue(self._ledger.failed(Account(Part.WEIGHTS, instance.id)))
        self.pump(instance)

    def _mend_link(self) -> None:
        """A load has ended, early or late: those behind it on the link are expected from now on."""
        expected = self._device.now_s
        behind = [one for one in self._device.instances.values() if one.state is State.LOADING and one.op_running]
        for instance in sorted(behind, key=lambda one: one.loaded_s):
            expected += instance.hosting.load_s
            instance.loaded_s = instance.op_end_s = expected
        self._device.link_free_s = expected

    def _pool_bytes(self, instance: Instance, ops: Iterable[Op]) -> int:
        """What the pool holds for sure: its old size where a next operation has been handed out already."""
        for op in ops:
            if op.account == Account(Part.KV, instance.id):
                return op.old_bytes
        return self._ledger.held_of(Account(Part.KV, instance.id))

    def _queue(self, ops: Iterable[Op]) -> None:
        for op in ops:
            part, instance_id = op.account
            instance = self._device.instances[instance_id]
            instance.ops.append(PendingOp(part, op.old_bytes, op.new_bytes))
            self.pump(instance)
            self._device.update(instance)

    def pump(self, instance: Instance) -> None:
        """Start the instance's next operation, unless it is in a turn or in another operation."""
        if instance.in_turn or instance.op_running or not instance.ops:
            return
        op = instance.ops.popleft()
        instance.op_running = True
        instance.op_end_s = self._expected_end_s(instance, op)
        self._device.outbox.append(self._command(instance, op))

    def _expected_end_s(self, instance: Instance, op: PendingOp) -> float:
        if op.part is Part.KV:
            return self._device.now_s + self._transfer.resize_s(op.old_bytes, op.new_bytes)
        if not op.new_bytes:
            return self._device.now_s + self._transfer.unload_s
        instance.ordered_s = self._device.now_s
        instance.loaded_s = self._device.link_free_s = self.loaded_s(instance.hosting)
        return instance.loaded_s

    def _command(self, instance: Instance, op: PendingOp) -> Command:
        if op.part is Part.KV:
            if op.new_bytes < op.old_bytes:  # the tail may go at any moment from now on
                instance.kv_tokens = op.new_bytes // instance.hosting.kv_bytes_per_token
            return StartResize(instance.id, instance.model, op.old_bytes, op.new_bytes)
        if op.new_bytes:
            return StartLoad(instance.id, instance.model, op.new_bytes, instance.deadline_s)
        return StartUnload(instance.id, instance.model)


def _accounts(instance: Instance) -> tuple[Account, Account]:
    return Account(Part.WEIGHTS, instance.id), Account(Part.KV, instance.id)
