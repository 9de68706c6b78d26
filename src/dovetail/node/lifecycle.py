"""The life of a node's instances: begun, loaded, kept alive while idle (S11), closed. Who is on them is the node's."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.node.admission import Admitter, Grant
from dovetail.node.events import Resumed, Said, SetTimer
from dovetail.node.instance import Instance, State
from dovetail.node.pools import Pools
from dovetail.node.protocol import Evicted, Finished, HandedOver, InstanceClosed, InstanceGone, InstanceReady
from dovetail.node.residency import Residency
from dovetail.node.turns import Turns
from dovetail.node.work import Phase, RequestRecord, Work
from dovetail.policy.headroom import INFINITY, Refusal

# L4: one that is handed over with no more than so many tokens to compute takes part in the next decode, unless it has
# its next token in a small part of the time by itself.
MAX_GAP_TOKENS = 8
SMALL_PART = 0.5


class Lifecycle:
    def __init__(
        self,
        instances: dict[int, Instance],
        residency: Residency,
        admit: Admitter,
        turns: Turns,
        outbox: list[Said],
        first_instance: int,
    ) -> None:
        self.pools = Pools(instances, residency, admit, outbox, self)
        self._instances = instances
        self._residency = residency
        self._admit = admit
        self._turns = turns
        self._outbox = outbox
        self._next_instance = first_instance

    # Beginning

    def begin(self, model: str, phase: Phase) -> Instance:
        admit = self._admit
        instance = Instance(self._next_instance, model, admit.hostings[model], admit.overestimate, phase, admit.rule)
        self._next_instance += 1
        self._instances[instance.id] = instance
        return instance

    def load(self, instance: Instance, grant: Grant) -> None:
        self._residency.load(instance)
        if grant.kv_tokens is not None:
            self._residency.resize(instance, grant.kv_tokens)
        self._turns.update(instance)

    def loaded(self, instance: Instance, now: float, duration_s: float) -> None:
        for work in instance.works():  # S1: those who waited for the cold start get it on top
            if work.produced == 0:
                work.give_grace(min(duration_s, now - work.arrival_s))
        if instance.state is State.LOADING:
            instance.state = State.READY
            self._outbox.append(InstanceReady(instance.id, instance.model))
        instance.sort_waiting()
        instance.refresh()
        self._residency.done(instance, "weights")
        self.after_op(instance)

    def load_failed(self, instance: Instance) -> None:
        for work in instance.works():
            self.evict(instance, work, "load_failed")
        self._residency.failed(instance)
        if instance.state is State.CLOSING:
            self.after_op(instance)
        else:
            self.close(instance)

    # Idle

    def idle(self) -> list[Instance]:
        """Instances that may be closed, the longest idle first; one that is kept forever is not among them."""
        return sorted((one for one in self._instances.values() if one.is_idle), key=lambda one: one.idle_since_s)

    def reclaim(self, work: Work, free_at_s: float) -> Grant | Refusal:
        """Close idle instances, the longest idle first, until the work's model can start; none, if all of them would
        not be enough. Where weights may take a share of the device only, it can start when they are gone."""
        idle = self.idle()
        missing = self._admit.missing_bytes(self._admit.hostings[work.model], work)
        if sum(self._residency.planned_bytes(one) for one in idle) < missing:
            return Refusal.MEMORY
        for instance in idle:
            missing -= self._residency.planned_bytes(instance)
            self.close(instance)
            grant = self._admit.start(work, free_at_s)
            if grant is not Refusal.MEMORY or missing <= 0:
                return grant
        return Refusal.MEMORY

    def after_leaving(self, instance: Instance, now: float) -> None:
        instance.starved = False
        if instance.batch:
            self.pools.shrink(instance)
            self._turns.update(instance)
            return
        self._turns.update(instance)
        instance.epoch += 1
        instance.idle_since_s = now
        keep_alive_s = instance.hosting.keep_alive_s
        if keep_alive_s is None:
            keep_alive_s = 0.0 if instance.hosting.weights_in_place else self._admit.knobs.keep_alive_s
        if keep_alive_s <= 0.0:
            self.close(instance)
        elif keep_alive_s != INFINITY:
            self._outbox.append(SetTimer(now + keep_alive_s, instance.id, instance.epoch))

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
                self._outbox.append(Resumed(work, instance.id))
                self._turns.joined(instance)
                self.pools.make_room(instance, now)
        else:
            instance.sort_waiting()
            instance.refresh()
        self._turns.update(instance)

    def prepared(self, instance: Instance, work: Work, now: float, *, is_there: bool) -> None:
        if is_there:
            work.prepares = False
            instance.wake(work, joins=False)
            self._turns.update(instance)
        else:
            self.evict(instance, work, "kv_short")
            self.after_leaving(instance, now)

    # Ends

    def finish(self, instance: Instance, finished: Sequence[Work], now: float) -> None:
        instance.remove(*finished)
        for work in finished:
            self._admit.timing.answered(instance.model, work.produced)
            self._admit.timing.held(work.input_tokens + work.produced)
            self._outbox.append(Finished(work.record(), instance.id))
        self.after_leaving(instance, now)

    def hand_over(self, instance: Instance, work: Work, now: float) -> None:
        """A prefill instance lets go of a request that has its first token."""
        instance.remove(work)
        kv_bytes = work.known_tokens * instance.hosting.kv_bytes_per_token
        self._outbox.append(HandedOver(work.record(), instance.id, kv_bytes))
        self.after_leaving(instance, now)

    def evict(self, instance: Instance, work: Work, reason: str) -> None:
        instance.remove(work)
        work.moves += 1
        self._outbox.append(Evicted(work.record(), instance.id, reason, work.hold))
        self._turns.update(instance)

    def close(self, instance: Instance) -> None:
        if instance.state is State.CLOSING:
            return
        instance.state = State.CLOSING
        self._turns.update(instance)
        self._outbox.append(InstanceClosed(instance.id, instance.model))
        self._residency.release(instance)
        self.after_op(instance)

    def after_op(self, instance: Instance) -> None:
        """An operation of it has ended, or a turn."""
        self._turns.update(instance)
        if instance.state is State.CLOSING and not instance.in_turn and self._residency.is_empty(instance):
            del self._instances[instance.id]
            self._turns.forget(instance)
            self._outbox.append(InstanceGone(instance.id, instance.model))

    def update_active(self, instance: Instance) -> None:
        self._turns.update(instance)


def _goes_alone(instance: Instance, work: Work) -> bool:
    """Whether one that is handed over has an iteration of its own: where rows are dear, that of a large batch takes
    several times as long, and everybody waits a little instead of one for long."""
    if not instance.rule.in_rounds or not instance.running:
        return False
    latency = instance.hosting.latency
    decode_s = latency.decode_s(len(instance.running) + 1, instance.tokens + work.known_tokens)
    return latency.prefill_s(work.pending_tokens) <= SMALL_PART * decode_s
