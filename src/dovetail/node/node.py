"""One device: its instances, its memory, whose turn it is, and what it accepts or refuses (S2, S4–S8).

A state machine: events come in as method calls with `now`, commands and notices go out through `outbox`. The node
has the last word on everything that touches its memory or its time; where else a request could go is not its business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from dovetail.node.admission import KEEP, Admitter, Grant
from dovetail.node.device import Device
from dovetail.node.events import FirstToken, SetTimer, Turn
from dovetail.node.instance import Instance, State
from dovetail.node.lifecycle import Lifecycle
from dovetail.node.membership import Membership
from dovetail.node.outlook import movable
from dovetail.node.pools import LOOK_AROUND_TURNS, Pools
from dovetail.node.ports import Prefixes
from dovetail.node.protocol import CaughtUp, Victim
from dovetail.node.residency import Residency
from dovetail.node.turns import Turns
from dovetail.policy.compositions import Composition
from dovetail.policy.headroom import INFINITY, Refusal
from dovetail.policy.latency import TransferModel
from dovetail.policy.memory import Part
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.policy.turn import advance
from dovetail.policy.work import Phase, RequestRecord, Work


class Node:
    admitter_type = Admitter

    def __init__(
        self,
        name: str,
        kind: DeviceKind,
        memory_bytes: int,
        hostings: Mapping[str, Hosting],
        composition: Composition,
        *,
        first_instance: int = 0,
        transfer: TransferModel | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.composition = composition
        self.device = device = Device(
            name,
            kind,
            memory_bytes,
            hostings,
            composition,
            first_instance=first_instance,
            transfer=transfer,
            prefixes=prefixes,
        )
        self.instances = device.instances
        self.outbox = device.outbox
        self.residency = Residency(device)
        self.admit = self.admitter_type(device, self.residency)
        self.turns = Turns(device)
        self.lives = Lifecycle(device, self.residency, self.admit)
        self.pools = Pools(device, self.residency, self.admit, self.lives)
        self.members = Membership(device, self.turns, self.pools)

    @property
    def up(self) -> bool:
        return self.device.up

    @property
    def turn(self) -> Turn | None:
        """Under way."""
        return self.turns.turn

    # What the cluster may see

    @property
    def in_use(self) -> bool:
        return bool(self.instances)

    @property
    def fullness(self) -> float:
        """CPUs are short of time, GPUs of memory: packing goes by that."""
        if self.kind is DeviceKind.GPU:
            return float(self.device.ledger.planned)
        return sum(instance.decode_s() for instance in self.instances.values())

    # Admission

    def check_join(self, instance_id: int, work: Work, now: float) -> Refusal | None:
        grant = self._consider_join(instance_id, self.admit.timing.unbroken(work, now), now)
        return grant if isinstance(grant, Refusal) else None

    def check_start(self, work: Work, now: float) -> Refusal | None:
        work = self.admit.timing.unbroken(work, now)
        grant = self.admit.start(work, self._free_at_s(now)) if self.device.up else Refusal.CLOSED
        return grant if isinstance(grant, Refusal) else None

    def join(self, instance_id: int, work: Work, now: float) -> Refusal | None:
        """Add the work to an instance that is there."""
        grant = self._consider_join(instance_id, work, now)
        if grant is Refusal.MEMORY and not work.is_best_effort:
            target = self.instances[instance_id]
            grant = self.pools.give_way(target, work, lambda: self._consider_join(instance_id, work, now))
        if isinstance(grant, Refusal):
            return grant
        self._accept(self.instances[instance_id], work, grant)
        return None

    def start(self, work: Work, now: float, *, reclaims: bool = False) -> int | Refusal:
        """Start an instance for the work; returns the instance's id. `reclaims`: idle ones may go for it."""
        grant = self.admit.start(work, self._free_at_s(now)) if self.device.up else Refusal.CLOSED
        if grant is Refusal.MEMORY and self.composition.reclaiming.may_reclaim(is_asked=reclaims):
            grant = self.lives.reclaim(work, self._free_at_s(now))
        if grant is Refusal.MEMORY and not work.is_best_effort:
            grant = self.pools.give_way(None, work, lambda: self.admit.start(work, self._free_at_s(now)))
        if isinstance(grant, Refusal):
            return grant
        instance = self.device.open_instance(work.model, work.phase)
        instance.add(work)
        self.lives.load(instance, grant)
        return instance.id

    def warm(self, model: str, now: float) -> int | Refusal:
        """Start an instance before anybody asks for it; it is idle from the start. Its KV pool comes with its work."""
        self.device.now_s = now
        hosting = self.device.hostings.get(model)
        if hosting is None or not self.device.up:
            return Refusal.HARDWARE if self.device.up else Refusal.CLOSED
        if not hosting.weights_in_place and hosting.weight_bytes > self.device.ledger.available:
            return Refusal.MEMORY
        instance = self.device.open_instance(model, Phase.ANY)
        self.lives.load(instance, KEEP)
        is_loading = instance.state is State.LOADING and instance.loaded_s != INFINITY
        self.pools.after_leaving(instance, max(now, instance.loaded_s) if is_loading else now)
        return instance.id

    def rehost(self, model: str, now: float) -> None:
        """The model's hosting was replaced: its instances go by the new one, and an idle one's time starts anew."""
        self.device.now_s = now
        for instance in [one for one in self.instances.values() if one.model == model]:
            instance.hosting = self.device.hostings[model]
            instance.refresh()
            if not instance.batch and instance.state is State.READY:
                self.pools.after_leaving(instance, now)

    def close_idle(self, count: int = 1) -> int:
        """Close up to `count` idle instances, the longest idle first; returns how many. For a host short of memory."""
        closed = self.lives.idle()[:count]
        for instance in closed:
            self.lives.close(instance)
        return len(closed)

    def victims_for(self, instance_id: int, work: Work, now: float) -> list[Victim]:
        """S9: neighbours whose going, each alone, would let the instance take the work; smallest batch first."""
        instance = self.instances.get(instance_id)
        if instance is None or not self.device.up:
            return []
        found = self.admit.victims(instance, work, self._free_at_s(now))
        return [Victim(one.id, tuple(work.record() for work in movable(one))) for one in found]

    def preempt(self, instance_id: int, reason: str) -> None:
        """Close an instance; its work comes back as Evicted notices."""
        instance = self.instances[instance_id]
        for work in instance.works():
            self.device.evict(instance, work, reason)
        self.lives.close(instance)

    def withdraw(self, instance_id: int, work: Work, now: float) -> None:
        """Take back one piece of work (an abort, or a move that the cluster decided)."""
        self.device.now_s = now
        instance = self.instances[instance_id]
        instance.remove(work)
        self.pools.after_leaving(instance, now)

    def prepared(self, instance_id: int, work: Work, now: float, *, is_there: bool) -> None:
        """Its grammar and its adapter are there, or there is no memory for them."""
        self.device.now_s = now
        self.members.prepared(self.instances[instance_id], work, now, is_there=is_there)

    def catch_up(self, instance_id: int, work: Work, record: RequestRecord, now: float, *, is_last: bool) -> None:
        """L4: a held work has more tokens. With the last of them it goes on here: in the next decode if little is left
        to compute, else when a prefill has computed that."""
        self.device.now_s = now
        self.members.catch_up(self.instances[instance_id], work, record, now, is_last=is_last)

    def fail(self) -> list[Work]:
        """The device is gone, with everything on it; returns the work that was there."""
        return self.device.fail()

    def _consider_join(self, instance_id: int, work: Work, now: float) -> Grant | Refusal:
        instance = self.instances.get(instance_id)
        if instance is None or not self.device.up:
            return Refusal.CLOSED
        return self.admit.join(instance, work, self._free_at_s(now))

    def _accept(self, instance: Instance, work: Work, grant: Grant) -> None:
        instance.epoch += 1
        instance.add(work)
        if grant.kv_tokens is not None:
            self.residency.resize(instance, grant.kv_tokens)
        self.device.update(instance)

    def _free_at_s(self, now: float) -> float:
        self.device.now_s = now
        return self.turns.free_at_s(now)

    # Turns

    def next_turn(self, now: float) -> Turn | None:
        """Whose turn it is (S2); None when the device is busy or nobody can run."""
        if self.turn is not None:
            return None
        return self._next(self.turns.choose, now)

    def _next(self, choose: Callable[[float], Turn | None], now: float) -> Turn | None:
        self.device.now_s = now
        while True:
            turn = choose(now)
            if turn is None:
                if (until_s := self.turns.wakes_s(now)) is not None:
                    self.outbox.append(SetTimer(until_s, -1, -1))
                return None
            chosen, prompts = turn.instance, turn.prompts
            if turn.decodes and chosen.riding and chosen.is_short():  # they were suspended when the pool was sized
                self.pools.make_room(chosen, now)
                continue
            if prompts and chosen.is_short(*[share.work.pending_tokens + 1 for share in prompts]):
                if self.pools.fit_in(chosen, prompts[0].work, now):
                    continue
                turn = self.turns.decode_of(chosen, now)
            break
        self.turns.begin(turn, now)
        return turn

    def interlude(self, now: float, is_layer_here: bool | None = None, leaving: Collection[int] = ()) -> Turn | None:
        """The turn under way has been computed for its slice: whose turn is let in, if anybody's, but for these
        instances. Or it has come to a layer of a model that reads its layers from the disk, which is there or not
        yet."""
        if is_layer_here is not None:
            return self._next(partial(self.turns.meanwhile, is_layer_here=is_layer_here), now)
        self.device.now_s = now
        turn = self.turns.interlude(now, leaving)
        if turn is not None:
            self.turns.begin(turn, now)
        return turn

    def turn_done(self, now: float, finished: Sequence[Work], computed: Mapping[int, int] | None = None) -> list[Work]:
        """The iteration has ended; `finished` got their last token in it. `computed`: how many tokens are, of the
        prompts that it was spent on; None = as many as was asked. Returns those whose prompt has its token."""
        self.device.now_s = now
        ended = self.turns.end(now)
        turn, instance, seconds = ended.turn, ended.turn.instance, now - ended.started_s
        instance.busy_s += seconds
        done, caught_up = advance(turn, seconds, now, self.admit.timing.pace_tokens(instance.model), computed)
        for work in caught_up:
            self.turns.caught_up(instance, work, now)
            self.outbox.append(CaughtUp(work.id, work.hold, work.produced, instance.id))
        self.outbox.extend([FirstToken(work, instance.id, work.grace_s) for work in done if work.produced == 1])
        if finished:
            self.members.finish(instance, finished, now)
        if instance.phase is Phase.PREFILL:
            for work in done:
                if work.id in instance.running:
                    self.members.hand_over(instance, work, now)
        if instance.loose_tokens > instance.kv_tokens:
            self.pools.make_room(instance, now)
        if instance.ops or instance.state is State.CLOSING:
            self.residency.pump(instance)
            self.lives.after_op(instance)
        if self.turns.throttle:
            until_s = self.turns.rest(instance, ended.started_s, now)
            if instance.batch:
                self.outbox.append(SetTimer(until_s, instance.id, -1))
        if turn.decodes and self.admit.timing.counts_growth and not instance.clock % LOOK_AROUND_TURNS:
            self.pools.look_around()
        return done

    # Memory

    def load_done(self, instance_id: int, now: float, duration_s: float) -> None:
        self.device.now_s = now
        self.lives.loaded(self.instances[instance_id], now, duration_s)

    def load_failed(self, instance_id: int, now: float) -> None:
        self.device.now_s = now
        self.lives.load_failed(self.instances[instance_id])

    def unload_done(self, instance_id: int, now: float) -> None:
        self.device.now_s = now
        self.residency.done(self.instances[instance_id], Part.WEIGHTS)
        self.lives.after_op(self.instances[instance_id])

    def resize_done(self, instance_id: int, now: float) -> None:
        self.device.now_s = now
        instance = self.instances[instance_id]
        self.residency.done(instance, Part.KV)
        instance.starved = False
        self.lives.after_op(instance)

    def timer(self, instance_id: int, epoch: int, now: float) -> None:
        """Keep-alive is over, unless the instance has had work since (S11)."""
        self.device.now_s = now
        instance = self.instances.get(instance_id)
        if instance is not None and instance.epoch == epoch and not instance.batch:
            self.lives.close(instance)
