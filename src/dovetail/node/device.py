"""The state of one device: its instances with their requests, its memory and link, the turn under way, and what it has
learnt of lengths.

The parts of `node.Node` hold this and nothing of each other's; they change it in response to events.
"""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.node.awaiting import Awaiting
from dovetail.node.events import Said
from dovetail.node.instance import Instance, State
from dovetail.node.lengths import LengthStats
from dovetail.node.ports import NoPrefixes, Prefixes
from dovetail.node.protocol import Evicted
from dovetail.node.underway import Underway
from dovetail.policy.compositions import Composition
from dovetail.policy.headroom import INFINITY
from dovetail.policy.latency import TransferModel
from dovetail.policy.memory import Ledger
from dovetail.policy.parameters import TurnOrder
from dovetail.policy.placement import DeviceKind, Hosting
from dovetail.policy.turn_rule import TurnRule
from dovetail.policy.work import Phase, Work

TURN_SILENCE = 0.75  # of the longest silence: from then on an answer has its turn, so that there is time for it


class TurnState:
    """Whose turn it is and was."""

    def __init__(self, rule: TurnRule) -> None:
        self.underway: Underway | None = None
        self.active: list[Instance] = []  # can run and have work, in order of id
        self.almost: list[Instance] = []  # have work and could run but for a resize that is under way
        self.joined: list[Instance] = []  # an answer was handed over to their running batch and has had nothing there
        self.awaiting = Awaiting(rule.max_silence_s, splits=rule.splits_decodes)
        self.parted_s = 0.0  # when the last part of a prompt was computed
        self.wakes_s: float | None = None  # until when it was last said that nothing is begun
        self.rest_until_s: dict[int, float] = {}  # by instance: a static share of the device is used up until then
        self.owed_s = 0.0  # to best effort, of the share that it has in any case

    @property
    def with_work(self) -> list[Instance]:
        """Those that take turns now or in a moment."""
        return [*self.active, *self.almost]

    def clear(self) -> None:
        for kept in (self.active, self.almost, self.joined, self.rest_until_s, self.awaiting):
            kept.clear()
        self.underway = None
        self.owed_s = 0.0


class Device:
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
        self.hostings = hostings  # by model
        admission = composition.admission
        self.overestimate = admission.cpu_overestimate if kind is DeviceKind.CPU else admission.gpu_overestimate
        self.rule = turn_rule(kind, composition)
        self.transfer = transfer or composition.resizing.transfer(kind)
        self._prefixes = prefixes or NoPrefixes()
        self.up = True
        self.now_s = 0.0  # of the event that is being handled
        self.instances: dict[int, Instance] = {}
        self.ledger = Ledger(memory_bytes)
        self.link_free_s = 0.0  # when the loads that were ordered should be done: one link, one after another
        self.lengths = LengthStats()
        self.turns = TurnState(self.rule)
        self.outbox: list[Said] = []  # commands and notices, until the runtime passes them on
        self._next_instance = first_instance

    def open_instance(self, model: str, phase: Phase) -> Instance:
        instance = Instance(self._next_instance, model, self.hostings[model], self.overestimate, phase, self.rule)
        self._next_instance += 1
        self.instances[instance.id] = instance
        return instance

    def cached_tokens(self, instance_id: int | None, work: Work) -> int:
        """Of the work, in the prefix cache of the instance; a new one (None) has nothing."""
        return 0 if instance_id is None else self._prefixes.cached_tokens(instance_id, work)

    def update(self, instance: Instance) -> None:
        """After anything that decides whether it can run."""
        active, almost = self.turns.active, self.turns.almost
        wanted = instance.has_turns and instance.can_run
        if wanted != (instance in active):
            if wanted:
                active.append(instance)
                active.sort(key=lambda one: one.id)
            else:
                active.remove(instance)
        resizes = instance.has_turns and instance.state is State.READY and instance.op_running
        if resizes != (instance in almost):
            if resizes:
                almost.append(instance)
            else:
                almost.remove(instance)

    def evict(self, instance: Instance, work: Work, reason: str) -> None:
        """The work has to go elsewhere."""
        instance.remove(work)
        work.moves += 1
        self.outbox.append(Evicted(work.record(), instance.id, reason, work.hold))
        self.update(instance)

    def forget(self, instance: Instance) -> None:
        """It is closed and holds nothing."""
        del self.instances[instance.id]
        self.turns.rest_until_s.pop(instance.id, None)
        if instance in self.turns.joined:
            self.turns.joined.remove(instance)

    def fail(self) -> list[Work]:
        """The device is gone, with everything on it; returns the work that was there."""
        lost = [work for instance in self.instances.values() for work in instance.works()]
        for instance in self.instances.values():
            for work in instance.works():
                instance.remove(work)
        self.instances.clear()
        self.turns.clear()
        self.ledger.clear()
        self.outbox.clear()
        self.up = False
        return lost


def turn_rule(kind: DeviceKind, composition: Composition) -> TurnRule:
    turns = composition.turns
    silence_s = composition.admission.slo_scale * turns.max_silence_s  # held like other SLOs
    splits = (
        turns.split_decodes and turns.smooth_answers and composition.lateness.may_extend(is_strict=False, produced=0)
    )
    return TurnRule(
        turns.slack_s if turns.turn_order is TurnOrder.DRAIN else None,
        silence_s,
        TURN_SILENCE * silence_s,
        turns.guard_decodes,
        turns.part_s,
        turns.pack_prompts,
        turns.mix_decodes and kind is not DeviceKind.CPU,
        turns.smooth_answers,
        splits,
        turns.max_stall if splits and kind is DeviceKind.CPU else INFINITY,
        turns.best_effort_s,
        turns.ride,
        turns.reserve,
    )
