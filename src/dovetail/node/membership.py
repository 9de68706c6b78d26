"""How requests leave a device's instances, and how those that are held or are being prepared begin to run (L4)."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.node.device import Device
from dovetail.node.events import Resumed
from dovetail.node.instance import Instance
from dovetail.node.pools import Pools
from dovetail.node.protocol import Finished, HandedOver
from dovetail.node.turns import Turns
from dovetail.policy.work import RequestRecord, Work

# L4: one that is handed over with no more than so many tokens to compute takes part in the next decode, unless it has
# its next token in a small part of the time by itself.
MAX_GAP_TOKENS = 8
SMALL_PART = 0.5


class Membership:
    def __init__(self, device: Device, turns: Turns, pools: Pools) -> None:
        self._device = device
        self._turns = turns
        self._pools = pools

    # Beginning to run

    def catch_up(self, instance: Instance, work: Work, record: RequestRecord, now: float, *, is_last: bool) -> None:
        """L4, see `Node.catch_up`."""
        if is_last:
            work.take(record)
            work.hold = 0
        else:
            work.produced = record.produced
        if work.prepares:
            return  # it asks for a prefill when its grammar and adapter are there
        if work.id in instance.held:
            joins = is_last and work.pending_tokens <= MAX_GAP_TOKENS and not _goes_alone(instance, work)
            instance.wake(work, joins=joins)
            if joins:
                self._device.outbox.append(Resumed(work, instance.id))
                self._turns.joined(instance)
                self._pools.make_room(instance, now)
        else:
            instance.sort_waiting()
            instance.refresh()
        self._device.update(instance)

    def prepared(self, instance: Instance, work: Work, now: float, *, is_there: bool) -> None:
        if is_there:
            work.prepares = False
            instance.wake(work, joins=False)
            self._device.update(instance)
        else:
            self._device.evict(instance, work, "kv_short")
            self._pools.after_leaving(instance, now)

    # Ends

    def finish(self, instance: Instance, finished: Sequence[Work], now: float) -> None:
        instance.remove(*finished)
        for work in finished:
            self._device.lengths.ended(instance.model, work.input_tokens, work.produced)
            self._device.outbox.append(Finished(work.record(), instance.id))
        self._pools.after_leaving(instance, now)

    def hand_over(self, instance: Instance, work: Work, now: float) -> None:
        """A prefill instance lets go of a request that has its first token."""
        instance.remove(work)
        kv_bytes = work.known_tokens * instance.hosting.kv_bytes_per_token
        self._device.outbox.append(HandedOver(work.record(), instance.id, kv_bytes))
        self._pools.after_leaving(instance, now)


def _goes_alone(instance: Instance, work: Work) -> bool:
    """Whether one that is handed over has an iteration of its own: where rows are dear, that of a large batch takes
    several times as long, and everybody waits a little instead of one for long."""
    if not instance.rule.in_rounds or not instance.running:
        return False
    latency = instance.hosting.latency
    decode_s = latency.decode_s(len(instance.running) + 1, instance.tokens + work.known_tokens)
    return latency.prefill_s(work.pending_tokens) <= SMALL_PART * decode_s
