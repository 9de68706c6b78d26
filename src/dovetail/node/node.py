"""One device: its instances, its memory, whose turn it is, and what it accepts or refuses (S2, S4–S8).

A state machine: events come in as method calls with `now`, commands and notices go out through `outbox`. The node
has the last word on everything that touches its memory or its time; where else a request could go is not its business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dovetail.node.admission import KEEP, Admitter, Grant
from dovetail.node.events import (
    CaughtUp,
    Command,
    Evicted,
    Finished,
    FirstToken,
    HandedOver,
    InstanceClosed,
    InstanceGone,
    InstanceReady,
    Notice,
    Pausable,
    Resumed,
    SetTimer,
    Turn,
    Victim,
)
from dovetail.node.instance import Instance, State
from dovetail.node.pools import LOOK_AROUND_TURNS, Pools
from dovetail.node.residency import Residency
from dovetail.node.work import Phase, RequestRecord, Work
from dovetail.policy.headroom import INFINITY, Refusal, choose_turn, guards_decodes
from dovetail.policy.knobs import Knobs
from dovetail.policy.latency import IN_PLACE_RESIZE, TransferModel
from dovetail.policy.memory import OutputMean
from dovetail.policy.placement import DeviceKind, Hosting

# The device waits this long for an instance whose turn it is: in-place resizes take less, a turn of another takes more.
MOMENT_S = 0.005
# L4: one that is handed over with no more than so many tokens to compute takes part in the next decode.
MAX_GAP_TOKENS = 8


class Node:
    def __init__(
        self,
        name: str,
        kind: DeviceKind,
        memory_bytes: int,
        hostings: Mapping[str, Hosting],
        knobs: Knobs,
        *,
        has_matrix_unit: bool = True,
        first_instance: int = 0,
        transfer: TransferModel | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.knobs = knobs
        self.up = True
        self.instances: dict[int, Instance] = {}
        self.outbox: list[Command | Notice] = []
        self.outputs = OutputMean()
        if transfer is None:
            is_in_place = knobs.free_resize or kind is DeviceKind.CPU
            transfer = IN_PLACE_RESIZE if is_in_place else TransferModel()
        self.residency = Residency(memory_bytes, self.instances, self.outbox, self.update_active, transfer)
        self.admit = Admitter(kind, hostings, knobs, self.residency, self.instances, self.outputs, has_matrix_unit)
        self.pools = Pools(self.instances, self.residency, self.admit, self.outbox, self)
        self.turn: Turn | None = None
        self.turn_started_s = 0.0
        self._turn_ends_s: float | None = None  # when the turn under way should end, once somebody has asked
        self._active: list[Instance] = []  # can run and have work, in order of id
        self._almost: list[Instance] = []  # have work and could run but for a resize that is under way
        self._next_instance = first_instance
        self._throttle = knobs.shares if knobs.shares > 1 and kind is DeviceKind.GPU else 0
        self._rest_until: dict[int, float] = {}

    # What the cluster may see

    @property
    def in_use(self) -> bool:
        return bool(self.instances)

    @property
    def fullness(self) -> float:
        """CPUs are short of time, GPUs of memory: packing goes by that."""
        if self.kind is DeviceKind.GPU:
            return float(self.residency.ledger.planned)
        return sum(instance.decode_s() for instance in self.instances.values())

    # Admission

    def check_join(self, instance_id: int, work: Work, now: float) -> Refusal | None:
        grant = self._consider_join(instance_id, self.admit.timing.unbroken(work, now), now)
        return grant if isinstance(grant, Refusal) else None

    def check_start(self, work: Work, now: float) -> Refusal | None:
        work = self.admit.timing.unbroken(work, now)
        grant = self.admit.start(work, self._free_at_s(now)) if self.up else Refusal.CLOSED
        return grant if isinstance(grant, Refusal) else None

    def join(self, instance_id: int, work: Work, now: float) -> Refusal | None:
        """Add the work to an instance that is there."""
        grant = self._consider_join(instance_id, work, now)
        if isinstance(grant, Refusal):
            return grant
        self._accept(self.instances[instance_id], work, grant)
        return None

    def start(self, work: Work, now: float) -> int | Refusal:
        """Start an instance for the work; returns the instance's id."""
        grant = self.admit.start(work, self._free_at_s(now)) if self.up else Refusal.CLOSED
        if grant is Refusal.MEMORY and self.knobs.reclaim_idle:
            grant = self._reclaim(work, now)
        if isinstance(grant, Refusal):
            return grant
        instance = self._begin(work.model, work.phase)
        instance.add(work)
        self._load(instance, grant)
        return instance.id

    def warm(self, model: str, now: float) -> int | Refusal:
        """Start an instance before anybody asks for it; it is idle from the start. Its KV pool comes with its work."""
        self.residency.now_s = now
        hosting = self.admit.hostings.get(model)
        if hosting is None or not self.up:
            return Refusal.HARDWARE if self.up else Refusal.CLOSED
        if not hosting.weights_in_place and hosting.weight_bytes > self.residency.ledger.available:
            return Refusal.MEMORY
        instance = self._begin(model, Phase.ANY)
        self._load(instance, KEEP)
        self.after_leaving(instance, now)
        return instance.id

    def _begin(self, model: str, phase: Phase) -> Instance:
        silence_s = self.admit.rule.turn_silence_s
        instance = Instance(
            self._next_instance, model, self.admit.hostings[model], self.admit.overestimate, phase, silence_s
        )
        self._next_instance += 1
        self.instances[instance.id] = instance
        return instance

    def _load(self, instance: Instance, grant: Grant) -> None:
        self.residency.load(instance)
        if grant.kv_tokens is not None:
            self.residency.resize(instance, grant.kv_tokens)
        self.update_active(instance)

    def rehost(self, model: str, now: float) -> None:
        """The model's hosting was replaced: its instances go by the new one, and an idle one's time starts anew."""
        self.residency.now_s = now
        for instance in [one for one in self.instances.values() if one.model == model]:
            instance.hosting = self.admit.hostings[model]
            instance.refresh()
            if not instance.batch and instance.state is State.READY:
                self.after_leaving(instance, now)

    def close_idle(self, count: int = 1) -> int:
        """Close up to `count` idle instances, the longest idle first; returns how many. For a host short of memory."""
        closed = self._idle()[:count]
        for instance in closed:
            self._close(instance)
        return len(closed)

    def victims_for(self, instance_id: int, work: Work, now: float) -> list[Victim]:
        """S9: neighbours whose going, each alone, would let the instance take the work; smallest batch first."""
        instance = self.instances.get(instance_id)
        if instance is None or not self.up:
            return []
        found = self.admit.victims(instance, work, self._free_at_s(now))
        return [Victim(one.id, one.movable(), one.deadline_s - now) for one in found]

    def pausable_for(self, work: Work, now: float) -> list[Pausable]:
        """Instances that could be swapped out to start one for the work."""
        if not self.up:
            return []
        found = self.admit.pausable(work, now, self._free_at_s(now))
        return [Pausable(one.id, one.deadline_s - now, one.batch, one.hosting.weight_bytes) for one in found]

    def preempt(self, instance_id: int, reason: str) -> None:
        """Close an instance; its work comes back as Evicted notices."""
        instance = self.instances[instance_id]
        for work in instance.works():
            self.evict(instance, work, reason)
        self._close(instance)

    def withdraw(self, instance_id: int, work: Work, now: float) -> None:
        """Take back one piece of work (an abort, or a move that the cluster decided)."""
        self.residency.now_s = now
        instance = self.instances[instance_id]
        instance.remove(work)
        self.after_leaving(instance, now)

    def catch_up(self, instance_id: int, work: Work, record: RequestRecord, now: float, *, is_last: bool) -> None:
        """L4: a held work has more tokens. With the last of them it goes on here: in the next decode if little is left
        to compute, else when a prefill has computed that."""
        self.residency.now_s = now
        instance = self.instances[instance_id]
        if is_last:
            work.take(record)
            work.hold = 0
        else:
            work.produced = record.produced
        if work.id in instance.held:
            joins = is_last and work.pending_tokens <= MAX_GAP_TOKENS
            instance.wake(work, joins=joins)
            if joins:
                self.outbox.append(Resumed(work, instance.id))
                self.pools.make_room(instance, 0, now)
        else:
            instance.sort_waiting()
            instance.refresh()
        self.update_active(instance)

    def fail(self) -> list[Work]:
        """The device is gone, with everything on it; returns the work that was there."""
        lost = [work for instance in self.instances.values() for work in instance.works()]
        for instance in self.instances.values():
            for work in instance.works():
                instance.remove(work)
        self.instances.clear()
        self._active.clear()
        self._almost.clear()
        self._rest_until.clear()
        self.residency.ledger.clear()
        self.outbox.clear()
        self.turn = None
        self.up = False
        return lost

    def recover(self) -> None:
        self.up = True

    def _reclaim(self, work: Work, now: float) -> Grant | Refusal:
        """Close idle instances, the longest idle first, until the work's model can start."""
        for instance in self._idle():
            self._close(instance)
            grant = self.admit.start(work, self._free_at_s(now))
            if grant is not Refusal.MEMORY:
                return grant
        return Refusal.MEMORY

    def _idle(self) -> list[Instance]:
        """Instances that may be closed, the longest idle first; one that is kept forever is not among them."""
        idle = [one for one in self.instances.values() if not one.batch and one.state is State.READY]
        idle = [one for one in idle if one.hosting.keep_alive_s != INFINITY]
        return sorted(idle, key=lambda one: one.idle_since_s)

    def _consider_join(self, instance_id: int, work: Work, now: float) -> Grant | Refusal:
        instance = self.instances.get(instance_id)
        if instance is None or not self.up:
            return Refusal.CLOSED
        return self.admit.join(instance, work, self._free_at_s(now))

    def _accept(self, instance: Instance, work: Work, grant: Grant) -> None:
        instance.epoch += 1
        instance.add(work)
        if grant.kv_tokens is not None:
            self.residency.resize(instance, grant.kv_tokens)
        self.update_active(instance)

    def _free_at_s(self, now: float) -> float:
        """When the device should be done with the turn under way."""
        self.residency.now_s = now
        if self.turn is None:
            return now
        if self._turn_ends_s is None:  # asked for many times in a turn
            self._turn_ends_s = self.turn_started_s + self._turn_s(*self.turn)
        return max(now, self._turn_ends_s)

    def _turn_s(self, instance: Instance, prefill: Work | None) -> float:
        latency = instance.hosting.latency
        if prefill is not None:
            duration = latency.prefill_s(prefill.pending_tokens)
        else:
            duration = latency.decode_s(len(instance.running), instance.tokens) if instance.running else 0.0
        return duration * instance.overestimate

    # Turns

    def next_turn(self, now: float) -> Turn | None:
        """Whose turn it is (S2); None when the device is busy or nobody can run."""
        if self.turn is not None:
            return None
        self.residency.now_s = now
        while True:
            chosen = self._choose(now)
            if chosen is None:
                return None
            prefill = self._next_prefill(chosen, now)
            if prefill is not None and chosen.is_short(prefill.pending_tokens + 1):
                if not chosen.running:
                    self.pools.make_room(chosen, prefill.pending_tokens + 1, now)
                    continue
                prefill = None
            break
        chosen.begin_turn(prefill)
        self.turn = turn = Turn(chosen, prefill)
        self.turn_started_s = now
        self._turn_ends_s = None
        return turn

    def _next_prefill(self, instance: Instance, now: float) -> Work | None:
        """The prompt that a turn of the instance would compute; None for a decode."""
        if not instance.waiting:
            return None
        rule, first = self.admit.rule, instance.waiting[0]
        if not rule.guards_decodes or not instance.running:
            return first
        latest_s = min(instance.running_due_s, instance.spoke_s + rule.max_silence_s)
        prefill_s = instance.prefill_s(first.pending_tokens)
        waits = guards_decodes(now, prefill_s, instance.urgent_prefill_s(first), latest_s)
        return None if waits else first

    def _choose(self, now: float) -> Instance | None:
        candidates = self._rested(now) if self._throttle else self._active
        if self._almost:
            candidates = candidates + [one for one in self._almost if 0.0 <= one.op_end_s - now <= MOMENT_S]
        chosen = choose_turn(candidates, now, self.admit.rule.slack_s)
        return None if chosen in self._almost else chosen

    def has_only(self, instance: Instance) -> bool:
        """It alone has work that can run, and none of that waits."""
        return self._active == [instance] and not self._almost and not instance.waiting

    def turn_done(self, now: float, finished: Sequence[Work]) -> None:
        """The iteration has ended; `finished` got their last token in it."""
        self.residency.now_s = now
        turn = self.turn
        assert turn is not None, f"{self.name}: no turn under way"
        instance, prefill = turn
        self.turn = None
        instance.end_turn()
        instance.busy_s += now - self.turn_started_s
        instance.turns += 1
        if prefill is None:
            instance.decoded(now)
        elif prefill in instance.waiting:
            if prefill.hold:
                instance.hold(prefill)
                self.outbox.append(CaughtUp(prefill, instance.id))
            else:
                self._prefilled(instance, prefill, now)
        if finished:
            self._finish(instance, finished, now)
        if prefill is not None and instance.phase is Phase.PREFILL and prefill.id in instance.running:
            self._hand_over(instance, prefill, now)
        if instance.loose_tokens > instance.kv_tokens:
            self.pools.make_room(instance, 0, now)
        if instance.ops or instance.state is State.CLOSING:
            self.residency.pump(instance)
            self._after_op(instance)
        if self._throttle:
            self._rest(instance, now)
        if prefill is None and self.admit.timing.counts_growth and not instance.clock % LOOK_AROUND_TURNS:
            self.pools.look_around()

    def _prefilled(self, instance: Instance, work: Work, now: float) -> None:
        if now > work.true_due_s(work.due_s):
            work.late_tokens += 1
        work.got_token(now)
        instance.prefilled(work)
        if work.produced == 1:
            if self.knobs.paced_from_first_token:
                work.pace_from(now, self.admit.timing.pace_tokens(instance.model))
                instance.refresh()
            self.outbox.append(FirstToken(work, instance.id, work.grace_s))

    def _finish(self, instance: Instance, finished: Sequence[Work], now: float) -> None:
        for work in finished:
            instance.remove(work)
            self.admit.timing.answered(instance.model, work.produced)
            self.outbox.append(Finished(work, instance.id))
        self.after_leaving(instance, now)

    def _hand_over(self, instance: Instance, work: Work, now: float) -> None:
        """A prefill instance lets go of a request that has its first token."""
        instance.remove(work)
        self.outbox.append(HandedOver(work, instance.id, work.known_tokens * instance.hosting.kv_bytes_per_token))
        self.after_leaving(instance, now)

    def _rested(self, now: float) -> list[Instance]:
        return [one for one in self._active if self._rest_until.get(one.id, 0.0) <= now]

    def _rest(self, instance: Instance, now: float) -> None:
        """A static share of a device: after each turn the instance rests until it has had no more than its share."""
        until = self.turn_started_s + (now - self.turn_started_s) * min(self._throttle, instance.hosting.slots)
        self._rest_until[instance.id] = until
        if instance.batch:
            self.outbox.append(SetTimer(until, instance.id, -1))

    # Memory

    def load_done(self, instance_id: int, now: float, duration_s: float) -> None:
        self.residency.now_s = now
        instance = self.instances[instance_id]
        for work in instance.works():  # S1: those who waited for the cold start get it on top
            if work.produced == 0:
                work.give_grace(min(duration_s, now - work.arrival_s))
        if instance.state is State.LOADING:
            instance.state = State.READY
            self.outbox.append(InstanceReady(instance.id, instance.model))
        instance.sort_waiting()
        instance.refresh()
        self.residency.done(instance, "weights")
        self._after_op(instance)

    def load_failed(self, instance_id: int, now: float) -> None:
        self.residency.now_s = now
        instance = self.instances[instance_id]
        for work in instance.works():
            self.evict(instance, work, "load_failed")
        self.residency.failed(instance)
        if instance.state is State.CLOSING:
            self._after_op(instance)
        else:
            self._close(instance)

    def unload_done(self, instance_id: int, now: float) -> None:
        self.residency.now_s = now
        self.residency.done(self.instances[instance_id], "weights")
        self._after_op(self.instances[instance_id])

    def resize_done(self, instance_id: int, now: float) -> None:
        self.residency.now_s = now
        instance = self.instances[instance_id]
        self.residency.done(instance, "kv")
        instance.starved = False
        self._after_op(instance)

    def timer(self, instance_id: int, epoch: int, now: float) -> None:
        """Keep-alive is over, unless the instance has had work since (S11)."""
        self.residency.now_s = now
        instance = self.instances.get(instance_id)
        if instance is not None and instance.epoch == epoch and not instance.batch:
            self._close(instance)

    # Leaving

    def evict(self, instance: Instance, work: Work, reason: str) -> None:
        instance.remove(work)
        work.moves += 1
        self.outbox.append(Evicted(work, instance.id, reason))
        self.update_active(instance)

    def after_leaving(self, instance: Instance, now: float) -> None:
        instance.starved = False
        if instance.batch:
            self.pools.shrink(instance)
            self.update_active(instance)
            return
        self.update_active(instance)
        instance.epoch += 1
        instance.idle_since_s = now
        keep_alive_s = instance.hosting.keep_alive_s
        if keep_alive_s is None:
            keep_alive_s = 0.0 if instance.hosting.weights_in_place else self.knobs.keep_alive_s
        if keep_alive_s <= 0.0:
            self._close(instance)
        elif keep_alive_s != INFINITY:
            self.outbox.append(SetTimer(now + keep_alive_s, instance.id, instance.epoch))

    def _close(self, instance: Instance) -> None:
        if instance.state is State.CLOSING:
            return
        instance.state = State.CLOSING
        self.update_active(instance)
        self.outbox.append(InstanceClosed(instance.id, instance.model))
        self.residency.release(instance)
        self._after_op(instance)

    def _after_op(self, instance: Instance) -> None:
        self.update_active(instance)
        if instance.state is State.CLOSING and not instance.in_turn and self.residency.is_empty(instance):
            del self.instances[instance.id]
            self._rest_until.pop(instance.id, None)
            self.outbox.append(InstanceGone(instance.id, instance.model))

    def update_active(self, instance: Instance) -> None:
        wanted = instance.has_turns and instance.can_run
        if wanted != (instance in self._active):
            if wanted:
                self._active.append(instance)
                self._active.sort(key=lambda one: one.id)
            else:
                self._active.remove(instance)
        resizes = instance.has_turns and instance.state is State.READY and instance.op_running
        if resizes != (instance in self._almost):
            if resizes:
                self._almost.append(instance)
            else:
                self._almost.remove(instance)
