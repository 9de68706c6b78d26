"""Whether a node can take a request: slots, memory (S5–S8) and time (`timing`), or a plain concurrency limit.

Reads the node's state and changes nothing. A Grant says how large the KV pool must become.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from dovetail.node.device import Device
from dovetail.node.instance import Instance, State
from dovetail.node.protocol import EMPTY, StartRoom
from dovetail.node.residency import Residency
from dovetail.node.timing import Timing
from dovetail.policy.consolidate import rank_victims
from dovetail.policy.headroom import INFINITY, Refusal
from dovetail.policy.memory import granted_tokens, recommended_tokens
from dovetail.policy.placement import Hosting, can_ever_serve
from dovetail.policy.work import Work


@dataclass(frozen=True, slots=True)
class Grant:
    kv_tokens: int | None = None  # new size of the KV pool; None leaves it


KEEP = Grant()
SHORT_FLOOR = 2  # usual requests that the smallest pool holds where requests are short
MAX_VICTIMS = 2  # named to whoever asks who could give way: each one costs a look at everybody
WAITING_PROMPTS = 2  # of best effort, on one instance: more of them wait where they may yet go to another node


class Admitter:
    def __init__(self, device: Device, residency: Residency) -> None:
        self.timing = Timing(device, residency)
        self._device = device
        self._instances = device.instances
        self._memory_demand = device.composition.memory
        self._reclaiming = device.composition.reclaiming
        self._loads = device.composition.loads
        self._sharing = device.composition.sharing
        self._lateness = device.composition.lateness
        self._lengths = device.lengths
        self._answered: tuple[int, int, float, Grant | Refusal] = (-1, -1, 0.0, KEEP)  # by `join`, to whom and when
        self._residency = residency

    def join(self, instance: Instance, work: Work, free_at_s: float, *, ignore_memory: bool = False) -> Grant | Refusal:
        if instance.state is State.CLOSING or instance.phase is not work.phase:
            return Refusal.CLOSED
        self._lengths.hear(work.model, work.mean_tokens)
        return self._join(instance, work, free_at_s, ignore_memory=ignore_memory)

    def _join(self, instance: Instance, work: Work, free_at_s: float, *, ignore_memory: bool) -> Grant | Refusal:
        grant: Grant | Refusal = KEEP
        if work.is_best_effort:
            return self._join_best_effort(instance, work)
        if self.timing.is_too_late(instance, work, free_at_s):
            grant = Refusal.FIRST_TOKEN_LATE
        elif not ignore_memory:
            grant = self._memory(instance, work)
        if not isinstance(grant, Refusal):
            grant = self._time(instance, work, free_at_s, grant) or grant
        self._answered = (instance.id, work.id, free_at_s, grant)
        return grant

    def start(self, work: Work, free_at_s: float) -> Grant | Refusal:
        hosting = self._device.hostings.get(work.model)
        if hosting is None:
            return Refusal.HARDWARE
        self._lengths.hear(work.model, work.mean_tokens)
        refusal = self._slots(hosting) or self._twin(work)
        if refusal is not None:
            return refusal
        return self._start(hosting, work, free_at_s)

    def _start(self, hosting: Hosting, work: Work, free_at_s: float) -> Grant | Refusal:
        if not can_ever_serve(hosting, work.known_tokens, work.ttft_s, work.tpot_s):
            return Refusal.HARDWARE
        if not hosting.weights_in_place and self._is_link_late(hosting, work, free_at_s):
            return Refusal.LINK
        if work.is_best_effort:
            return self._memory_for_start(hosting, work)
        grant = self._memory_for_start(hosting, work)
        if isinstance(grant, Refusal):
            return grant
        refusal = self._time(None, work, free_at_s, grant)
        if refusal is Refusal.DECODE_OVERCOMMITTED and not self._instances:
            return Refusal.HARDWARE  # alone it is too slow already, with what predictions are taken for longer
        return refusal or grant

    def _time(self, target: Instance | None, work: Work, free_at_s: float, grant: Grant) -> Refusal | None:
        refusal = self.timing.refuses(target, work, free_at_s, grant.kv_tokens)
        if refusal is Refusal.NEIGHBOUR_LATE and work.goes_first:
            work.goes_first = False  # here it goes by its due time, like anybody
            refusal = self.timing.refuses(target, work, free_at_s, grant.kv_tokens)
        return refusal

    def _join_best_effort(self, instance: Instance, work: Work) -> Grant | Refusal:
        """It takes turns that nobody else wants, so that only memory counts, and there it displaces nobody."""
        if len(instance.patient) >= WAITING_PROMPTS:
            return Refusal.CONCURRENCY
        return self._memory(instance, work)

    def victims(self, target: Instance, work: Work, free_at_s: float) -> list[Instance]:
        """S9: neighbours whose going, each alone, would let `target` take the work; smallest batch first."""
        if target.state is State.CLOSING or target.phase is not work.phase:
            return []
        neighbours = [one for one in self._instances.values() if one is not target and one.state is not State.CLOSING]
        ranked = rank_victims(neighbours, target.batch + 1)
        if not ranked:
            return []
        if self._answered[:3] != (target.id, work.id, free_at_s):  # whoever asks has been refused by `join` just now
            self.join(target, work, free_at_s)
        refusal = self._answered[3]
        found: Iterator[Instance]
        if refusal is Refusal.MEMORY:
            if isinstance(self.join(target, work, free_at_s, ignore_memory=True), Refusal):
                return []
            gap = self.memory_gap(target, work)
            found = (one for one in ranked if self._residency.planned_bytes(one) >= gap)
        elif refusal is Refusal.DECODE_OVERCOMMITTED:
            found = self.timing.making_way(target, work, free_at_s, ranked)
        else:
            return []
        return list(islice(found, MAX_VICTIMS))

    def _is_link_late(self, hosting: Hosting, work: Work, free_at_s: float) -> bool:
        """L6: one link serves the loads one after another; what is excused to a request, its user still waits for. Best
        effort orders none behind which somebody else's could come."""
        if work.is_best_effort:
            return any(one.state is State.LOADING for one in self._instances.values())
        wait_s = sum(one.hosting.load_s for one in self._instances.values() if one.state is State.LOADING)
        prefill_s = hosting.latency.prefill_s(work.known_tokens) * self._device.overestimate
        return self._loads.is_late(free_at_s + wait_s + prefill_s, work.due_s)

    def room_for_start(self) -> StartRoom:
        """What any start finds here, so that nobody need ask who would certainly be refused."""
        if self._reclaiming.may_reclaim(is_asked=False):
            return EMPTY  # idle instances go for it
        pace_s, strictest_s = 0.0, INFINITY
        for one in self._instances.values():
            if one.waited_for:
                grown_s = one.grown_s
                pace_s += self.timing.pace_s(one) if grown_s is None else grown_s
                if one.strictest_s < strictest_s:
                    strictest_s = one.strictest_s
        return StartRoom(self._weights_room() + self._idle_bytes() + self.yielded_bytes(), pace_s, strictest_s)

    def _idle_bytes(self) -> int:
        """Weights that give way to a start that asks for it."""
        if not self._reclaiming.asks(are_alike=True):
            return 0
        return sum([one.hosting.weight_bytes for one in self._instances.values() if one.is_idle])

    def yielded_bytes(self, target: Instance | None = None) -> int:
        """O8: what best effort frees if it gives way to somebody who comes to the target, or for whom an instance is
        started: those that only it uses go then."""
        return sum([self._yields(one, target) for one in self._instances.values() if one.best_effort])

    def _yields(self, instance: Instance, target: Instance | None) -> int:
        if instance is target:
            return 0  # that is counted as there
        hosting = instance.hosting
        if target is None and not instance.waited_for and hosting.keep_alive_s != INFINITY:
            return self._residency.planned_bytes(instance)
        kept = self.recommended(hosting, self.required(hosting, instance.model, instance.lengths_waited_for()))
        return max(self._residency.planned_kv_tokens(instance) - kept, 0) * hosting.kv_bytes_per_token

    # Slots and shares

    def _slots(self, hosting: Hosting) -> Refusal | None:
        residents = [one.hosting.slots for one in self._instances.values()]
        return None if self._sharing.has_slot(hosting.slots, residents) else Refusal.SLOTS

    def _twin(self, work: Work) -> Refusal | None:
        others = (one for one in self._instances.values() if one.state is not State.CLOSING)
        twins = sum(one.model == work.model and one.phase is work.phase for one in others)
        return None if self._sharing.may_add(twins) else Refusal.SLOTS

    # Memory

    def required(self, hosting: Hosting, model: str, lengths: list[tuple[int, int]]) -> int:
        need = max(self._memory_demand.tokens(self._lengths, model, lengths), self._floor_tokens())
        need += len(lengths) * (hosting.block_tokens - 1)  # each request's last block is partly empty
        return -(need // -hosting.block_tokens) * hosting.block_tokens

    @property
    def _are_short(self) -> bool:
        """Several usual requests fit into the smallest pool, and there is a usual one: models do not differ."""
        usual = self._memory_demand.short_requests * self._lengths.usual_tokens
        return self._lengths.are_alike and 0 < usual < self._memory_demand.floor_tokens

    def _floor_tokens(self) -> int:
        floor = self._memory_demand.floor_tokens
        return min(floor, int(SHORT_FLOOR * self._lengths.usual_tokens)) if self._are_short else floor

    def recommended(self, hosting: Hosting, required: int) -> int:
        tokens = recommended_tokens(required, self._memory_demand.watermark)
        return -(tokens // -hosting.block_tokens) * hosting.block_tokens

    def room(self, hosting: Hosting, kv_tokens: int, reserved_bytes: int = 0) -> int:
        """To how many tokens a KV pool of `kv_tokens` could grow now, with so many bytes left for something else."""
        room = kv_tokens + (self._device.ledger.available - reserved_bytes) // hosting.kv_bytes_per_token
        room -= room % hosting.block_tokens
        return room if hosting.max_kv_tokens is None else min(room, hosting.max_kv_tokens)

    def most_tokens(self, hosting: Hosting) -> int:
        """The KV pool of the model if it had the node, or its share of it, to itself."""
        weights = 0 if hosting.weights_in_place else hosting.weight_bytes
        tokens = max(self._capacity_bytes(hosting) - weights, 0) // hosting.kv_bytes_per_token
        tokens -= tokens % hosting.block_tokens
        return tokens if hosting.max_kv_tokens is None else min(tokens, hosting.max_kv_tokens)

    def _capacity_bytes(self, hosting: Hosting) -> int:
        """Of the device, that the model may have."""
        return self._device.ledger.capacity

    def is_fixed(self, instance: Instance) -> bool:
        """Its pool is not made smaller when requests leave."""
        return instance.hosting.weights_in_place

    def _bare(self, hosting: Hosting, work: Work) -> int:
        """What it needs for its next token: whole blocks, and one to spare."""
        return (-((work.known_tokens + 1) // -hosting.block_tokens) + 1) * hosting.block_tokens

    def _at_most(self, hosting: Hosting, work: Work, required: int) -> int:
        """Alone it gets what there is, rather than none for ever: its answer may be short."""
        takes_less = self._lateness.takes_less(is_capped=hosting.max_kv_tokens is not None)
        if not takes_less or required <= (most := self.most_tokens(hosting)):
            return required
        return max(most, self._bare(hosting, work))

    def _memory(self, instance: Instance, work: Work) -> Grant | Refusal:
        hosting = instance.hosting
        others = instance.lengths()
        required = self.required(hosting, work.model, [*others, (work.input_tokens, work.produced)])
        if not others:
            required = self._at_most(hosting, work, required)
        current = self._residency.planned_kv_tokens(instance)
        if required <= current:
            return KEEP
        room = self.room(hosting, current)
        granted = granted_tokens(required, self.recommended(hosting, required), room)
        return Refusal.MEMORY if granted is None else Grant(granted)

    def _memory_for_start(self, hosting: Hosting, work: Work) -> Grant | Refusal:
        weights = 0 if hosting.weights_in_place else hosting.weight_bytes
        if weights and weights > self._weights_room():
            return Refusal.MEMORY
        required = self._required_for_start(hosting, work)
        room = self.room(hosting, 0, weights)
        granted = granted_tokens(required, self.recommended(hosting, required), room)
        return Refusal.MEMORY if granted is None else Grant(granted)

    def _required_for_start(self, hosting: Hosting, work: Work) -> int:
        required = self.required(hosting, work.model, [(work.input_tokens, work.produced)])
        return self._at_most(hosting, work, required)

    def _weights_room(self) -> int:
        """What the weights of one more instance may take. With more of them too little of the device would be left for
        caches; one instance is never too many."""
        ledger, share = self._device.ledger, self._memory_demand.weights_share
        if share >= 1.0 or not self._instances:
            return ledger.available
        resident = sum([one.hosting.weight_bytes for one in self._instances.values()])
        room = int(share * ledger.capacity) - resident
        if self._are_short:
            room = max(room, ledger.capacity - resident - self._kept_bytes())
        return min(ledger.available, room)

    def _kept_bytes(self) -> int:
        """For caches: so many usual requests of each instance, and of one more like the heaviest of them."""
        tokens = int(self._memory_demand.short_requests * self._lengths.usual_tokens)
        sizes = [one.hosting.kv_bytes_per_token for one in self._instances.values()]
        return tokens * (sum(sizes) + max(sizes))

    def missing_bytes(self, hosting: Hosting, work: Work) -> int:
        """L7: what would have to come free for a start of the work's model; 0 = memory is not what it lacks."""
        ledger = self._device.ledger
        weights = 0 if hosting.weights_in_place else hosting.weight_bytes
        required = self._required_for_start(hosting, work)
        missing = weights + required * hosting.kv_bytes_per_token - ledger.available
        if weights:
            missing = max(missing, weights - self._weights_room())
        return max(missing, 1 if self._slots(hosting) is not None else 0)

    def memory_gap(self, instance: Instance, work: Work) -> int:
        lengths = [*instance.lengths_waited_for(), (work.input_tokens, work.produced)]
        required = self.required(instance.hosting, work.model, lengths)
        missing = required - self._residency.planned_kv_tokens(instance)
        return missing * instance.hosting.kv_bytes_per_token - self._device.ledger.available
