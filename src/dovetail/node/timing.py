"""Whether a node has the time for a request (S4): what its instances have to do, now and once contexts have grown.

Reads the device's state and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dovetail.node.device import Device
from dovetail.node.instance import Instance, State
from dovetail.node.outlook import cold_start_grace_s, demand_of
from dovetail.node.residency import Residency
from dovetail.policy.headroom import (
    INFINITY,
    Candidate,
    InstanceDemand,
    Prefill,
    Refusal,
    must_be_late,
    validate_closed,
)
from dovetail.policy.latency import prompt_s
from dovetail.policy.link import LinkClaim, have_room, longest_other_s
from dovetail.policy.members import prefill_turn_s
from dovetail.policy.parameters import Shadow
from dovetail.policy.parts import in_parts_s, least_s, lost_s, split_s
from dovetail.policy.placement import Hosting
from dovetail.policy.shadow import validate
from dovetail.policy.work import Phase, Work


class Timing:
    def __init__(self, device: Device, residency: Residency) -> None:
        self.counts_growth = (
            device.composition.admission.counts_growth and device.composition.admission.shadow is Shadow.PLAY
        )  # else it is the paper's
        self._device = device
        self._hostings = device.hostings
        self._overestimate = device.overestimate
        self._rule = device.rule
        self._instances = device.instances
        self._lengths = device.lengths
        self._parameters = device.composition.admission
        self._residency = residency

    def pace_tokens(self, model: str) -> float:
        """Over how many tokens the safety of a pace may be spent at once, see `Work.pace_from`."""
        return self._lengths.pace_tokens(model) if self._parameters.paced_from_first_token else INFINITY

    # Questions

    def unbroken(self, work: Work, now: float) -> Work:
        """One that runs elsewhere is moved only if its answer need not fall silent for too long."""
        if work.last_token_s is None or self._rule.max_silence_s == INFINITY:
            return work
        latest_s = work.last_token_s + self._rule.max_silence_s
        if not now < latest_s < work.due_s:
            return work
        bound = work.as_of(work.produced)
        bound.cached = work.cached
        bound.first_due_s -= work.due_s - latest_s
        return bound

    def is_too_late(self, target: Instance, work: Work, free_at_s: float) -> bool:
        """Its first token would be late even if nothing else ran here: known before anything else is looked at."""
        if work.cached or work.phase is Phase.DECODE or self._parameters.shadow is Shadow.CLOSED:
            return False
        ready_s, loaded_s = self._residency.ready_s(target, free_at_s)
        prefill_s = target.at_once_s(work, work.start)
        grace_s = self._grace_s(target, work, loaded_s)
        return max(free_at_s, ready_s) + prefill_s > work.due_s + grace_s

    def refuses(
        self,
        target: Instance | None,
        work: Work,
        free_at_s: float,
        kv_tokens: int | None = None,
    ) -> Refusal | None:
        """S4 with `target` (None: a new instance), whose pool is brought to so many tokens."""
        return self._refuses(target, work, free_at_s, kv_tokens, self._decodes(target, work), self._others(target))

    def making_way(
        self, target: Instance | None, work: Work, free_at_s: float, neighbours: Sequence[Instance]
    ) -> Iterator[Instance]:
        """Those of the neighbours without whom, each alone, the target would have the time."""
        decodes, others = self._decodes(target, work), self._others(target)
        for one in neighbours:
            left = [other for other in others if other is not one]
            if self._refuses(target, work, free_at_s, None, decodes, left) is None:
                yield one

    def _others(self, target: Instance | None) -> list[Instance]:
        """Those that read their layers from the disk hold nobody's turns but for a layer: `_layers_s`."""
        found = [one for one in self._instances.values() if one.waited_for and one is not target]
        return [one for one in found if one.hosting.layer_s is None]

    def _layers_s(self) -> float:
        """What an iteration of anybody waits for those that read their layers: one of one of them."""
        layers = [one.hosting.layer_s or 0.0 for one in self._instances.values() if one.waited_for]
        return max(layers, default=0.0) * self._overestimate

    def _refuses(
        self,
        target: Instance | None,
        work: Work,
        free_at_s: float,
        kv_tokens: int | None,
        decodes: tuple[float, float],
        others: list[Instance],
    ) -> Refusal | None:
        """Beside these others; `decodes` as of `_decodes`."""
        decode_s, grown_s = decodes
        hosting = self._hostings[work.model] if target is None else target.hosting
        if hosting.layer_s is not None:
            return self._refuses_layers(target, work, free_at_s, hosting.layer_s, decodes, others)
        if self._is_overcommitted(others, target, work.tpot_s, max(decode_s, grown_s)):
            return Refusal.DECODE_OVERCOMMITTED  # most refusals end here, before anything is played
        candidate, own = self._candidate(target, work, free_at_s, kv_tokens, decode_s, grown_s)
        is_played = self._parameters.shadow is not Shadow.CLOSED
        if is_played and must_be_late(candidate, own, free_at_s):
            return Refusal.FIRST_TOKEN_LATE  # before the neighbours are looked at
        demands = [self._demand(one, free_at_s) for one in others]
        demands.append(own)
        if not is_played:
            return validate_closed(demands, len(demands) - 1, candidate, free_at_s)
        return validate(demands, len(demands) - 1, candidate, free_at_s, self._rule, is_looked_at=True)

    def _refuses_layers(
        self,
        target: Instance | None,
        work: Work,
        free_at_s: float,
        layer_s: float,
        decodes: tuple[float, float],
        others: list[Instance],
    ) -> Refusal | None:
        """Of a model that reads its layers from the disk: the others go before each of them, and have to have time for
        one more. Its own pace is that of the disk, which it shares with those that read theirs (C4)."""
        strictest_s = work.tpot_s if target is None else min(work.tpot_s, target.strictest_s)
        others_s = sum(self.pace_s(one) for one in others) + layer_s * self._overestimate
        if others_s > min((one.strictest_s for one in others), default=INFINITY):
            return Refusal.DECODE_OVERCOMMITTED
        reading = [one for one in self._instances.values() if one.waited_for and one is not target]
        reading = [one for one in reading if one.hosting.layer_s is not None]
        claims = [LinkClaim(self.pace_s(one), one.strictest_s) for one in reading]
        claims.append(LinkClaim(max(decodes), strictest_s))
        if not have_room(claims):
            return Refusal.DECODE_OVERCOMMITTED
        candidate, own = self._candidate(target, work, free_at_s, None, *decodes)
        free_at_s += longest_other_s(claims, len(reading))
        return Refusal.FIRST_TOKEN_LATE if must_be_late(candidate, own, free_at_s) else None

    def _is_overcommitted(self, others: list[Instance], target: Instance | None, tpot_s: float, total_s: float) -> bool:
        """S4, case 3, as of when each instance's contexts were last looked at; the target takes `total_s`."""
        if target is not None:
            tpot_s = min(tpot_s, target.strictest_s)
        total_s += self._layers_s()
        for one in others:
            grown_s = one.grown_s
            total_s += self.pace_s(one) if grown_s is None else grown_s
            if one.strictest_s < tpot_s:
                tpot_s = one.strictest_s
        return total_s > tpot_s

    def pace_s(self, instance: Instance) -> float:
        """One iteration of the instance, now or when its contexts will have grown, whichever is longer."""
        if not self.counts_growth:
            return instance.decode_s()
        if instance.grown_s is None:
            decode_s = instance.decode_s()
            instance.grown_s = max(decode_s, self._grown_s(instance)) if decode_s else 0.0
        return instance.grown_s

    def _grown_s(self, instance: Instance) -> float:
        count, tokens = self._lengths.most_tokens(instance.model, instance.lengths_waited_for())
        return instance.hosting.latency.decode_s(count, tokens) * self._overestimate

    # What takes part

    def _candidate(
        self,
        target: Instance | None,
        work: Work,
        free_at_s: float,
        kv_tokens: int | None,
        decode_s: float,
        grown_s: float,
    ) -> tuple[Candidate, InstanceDemand]:
        """The work as the target sees it, and the target without it."""
        hosting = self._hostings[work.model] if target is None else target.hosting
        if target is None:
            own, grace_s = self._starting(hosting, work)
        else:
            own, grace_s = self._joined(target, work, free_at_s)
        resize_s = self._residency.resize_s(target, hosting, kv_tokens)
        if resize_s:
            own.ready_s = max(own.ready_s, free_at_s) + resize_s  # what is remembered of it is set anew with each look
        start, missing = work.start, work.uncomputed_tokens
        prefill_s = 0.0 if work.cached else prompt_s(hosting.latency, start, missing) * self._overestimate
        part_s = split = lost = 0.0
        if not work.cached and self._rule.part_s != INFINITY:
            part_s = least_s(hosting.latency, start, missing) * self._overestimate
            split = split_s(hosting.latency) * self._overestimate
            lost = lost_s(hosting.latency) * self._overestimate
            own.latency, own.overestimate = hosting.latency, self._overestimate
        in_parts = in_parts_s(prefill_s, self._rule.part_s, split, lost)
        urgent_s = prefill_turn_s(work, self._rule.turn_silence_s, in_parts) + grace_s
        is_judged = not (own.blocked and work.phase is Phase.DECODE)  # a handover that waits for weights is late anyway
        due_s = work.due_s + grace_s if is_judged else INFINITY
        safety_s = INFINITY if work.produced else work.safety_s(self.pace_tokens(work.model))
        turn_s = min(due_s, urgent_s)
        prefill = Prefill(due_s, turn_s, prefill_s, work.tpot_s, safety_s, part_s, split, lost, start, missing)
        return Candidate(prefill, decode_s, grown_s), own

    def _decodes(self, target: Instance | None, work: Work) -> tuple[float, float]:
        """One iteration of the target with the work, now and when contexts will have grown."""
        if work.phase is Phase.PREFILL:
            return 0.0, 0.0
        known = work.known_tokens
        latency = (self._hostings[work.model] if target is None else target.hosting).latency
        decode_s = latency.decode_s(1, known) * self._overestimate if target is None else target.decode_s(known, 1)
        if not self.counts_growth:
            return decode_s, 0.0
        lengths = [] if target is None else target.lengths_waited_for()
        lengths.append((work.input_tokens, work.produced))
        count, tokens = self._lengths.most_tokens(work.model, lengths)
        return decode_s, latency.decode_s(count, tokens) * self._overestimate

    def _demand(self, instance: Instance, free_at_s: float) -> InstanceDemand:
        ready_s, loaded_s = self._residency.ready_s(instance, free_at_s)
        demand = demand_of(instance, free_at_s, ready_s, loaded_s, self.pace_tokens(instance.model))
        demand.grown_s = self.pace_s(instance)
        return demand

    def _joined(self, target: Instance, work: Work, free_at_s: float) -> tuple[InstanceDemand, float]:
        """The demand of an instance that is there, and the grace that the work would get for its load."""
        ready_s, loaded_s = self._residency.ready_s(target, free_at_s)
        grace_s = self._grace_s(target, work, loaded_s)
        return demand_of(target, free_at_s, ready_s, loaded_s, self.pace_tokens(target.model)), grace_s

    @staticmethod
    def _grace_s(target: Instance, work: Work, loaded_s: float) -> float:
        waits = target.state is State.LOADING and work.produced == 0
        return cold_start_grace_s(work, target.asked_s(loaded_s), loaded_s) if waits else 0.0

    def _starting(self, hosting: Hosting, work: Work) -> tuple[InstanceDemand, float]:
        """The same of an instance that would be started now."""
        nothing = InstanceDemand(INFINITY, INFINITY, 0.0, 0.0, INFINITY, frees_bytes=hosting.weight_bytes)
        if hosting.weights_in_place:
            return nothing, 0.0
        loaded_s = self._residency.loaded_s(hosting)
        nothing.blocked, nothing.ready_s = True, loaded_s
        return nothing, cold_start_grace_s(work, self._device.now_s, loaded_s) if work.produced == 0 else 0.0
