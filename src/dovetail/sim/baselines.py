"""Strategies with which nobody serves: those of the papers' compositions, and baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dovetail.policy.consolidate import MAX_INSTANCES, PlacedT
from dovetail.policy.displace import Move
from dovetail.policy.headroom import INFINITY
from dovetail.policy.latency import IN_PLACE_RESIZE, TransferModel
from dovetail.policy.memory import DemandByModel, Lengths, required_tokens
from dovetail.policy.placement import DeviceKind
from dovetail.policy.startup import STEP_S, Draws, NodeT, rank_by_start
from dovetail.policy.work import Phase

# Which instance of a model a request joins


@dataclass(frozen=True, slots=True)
class Spreading:
    """Without consolidation: the smallest batch first, wherever it is."""

    num_victims: int = 0

    def rank(self, instances: Sequence[PlacedT], turn: int) -> list[PlacedT]:
        return sorted(instances, key=lambda instance: instance.batch)[:MAX_INSTANCES]


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """ServerlessLLM: one after the other."""

    num_victims: int = 0

    def rank(self, instances: Sequence[PlacedT], turn: int) -> list[PlacedT]:
        first = turn % len(instances) if instances else 0
        return [*instances[first:], *instances[:first]]


# Where an instance starts


@dataclass(frozen=True, slots=True)
class Packing:
    """S11: nodes in use first, the fullest first."""

    def rank(self, nodes: Sequence[NodeT], start_s: Callable[[NodeT], float], draws: Draws) -> list[NodeT]:
        return rank_by_start(nodes, lambda node: 0.0)

    def window(self, seen: Sequence[NodeT], near: Callable[[], Sequence[NodeT]]) -> list[NodeT]:
        return list(seen)


@dataclass(frozen=True, slots=True)
class SpreadStart(Packing):
    """The emptiest node first."""

    def rank(self, nodes: Sequence[NodeT], start_s: Callable[[NodeT], float], draws: Draws) -> list[NodeT]:
        return sorted(nodes, key=lambda node: (node.facts.kind is DeviceKind.GPU, node.fullness))


@dataclass(frozen=True, slots=True)
class RandomStart(Packing):
    """The usual serverless scheduler: any node that takes it."""

    def rank(self, nodes: Sequence[NodeT], start_s: Callable[[NodeT], float], draws: Draws) -> list[NodeT]:
        return draws.shuffled(nodes)


@dataclass(frozen=True, slots=True)
class SoonestOnly:
    """ServerlessLLM's locality: a model waits for the node where it is soonest, and starts nowhere else."""

    def rank(self, nodes: Sequence[NodeT], start_s: Callable[[NodeT], float], draws: Draws) -> list[NodeT]:
        seconds = [start_s(node) for node in nodes]
        soonest_s = min(seconds, default=0.0) + STEP_S
        return [node for node in rank_by_start(nodes, start_s) if start_s(node) <= soonest_s]

    def window(self, seen: Sequence[NodeT], near: Callable[[], Sequence[NodeT]]) -> list[NodeT]:
        return list(dict.fromkeys([*near(), *seen]))


# Who makes way


@dataclass(frozen=True, slots=True)
class Staying:
    """Nobody makes way for a start."""

    def may_displace(self, moves: int, *, is_full: bool) -> bool:
        return False

    def may_go(self, moves: Iterable[int]) -> bool:
        return False

    def looks_elsewhere(self, *, is_full: bool) -> bool:
        return False

    def destination(self, move: Move) -> str | None:
        return None


@dataclass(frozen=True, slots=True)
class Evicting:
    """Shepherd*: chooses as L7 does, and evicts where L7 moves. A request that was evicted or moved for another evicts
    none in turn, and none is evicted twice: else two would chase each other for ever."""

    def may_displace(self, moves: int, *, is_full: bool) -> bool:
        return not moves

    def may_go(self, moves: Iterable[int]) -> bool:
        return not any(moves)

    def looks_elsewhere(self, *, is_full: bool) -> bool:
        return not is_full

    def destination(self, move: Move) -> str | None:
        return None


# Which instances are on one device together


@dataclass(frozen=True, slots=True)
class Unlimited:
    """As many instances as memory holds, of whichever models."""

    def is_taken(self, in_use: bool) -> bool:
        return False

    def may_add(self, twins: int) -> bool:
        return True

    def has_slot(self, slots: int, residents: Sequence[int]) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Slots(Unlimited):
    """At most the configured number of instances."""

    def has_slot(self, slots: int, residents: Sequence[int]) -> bool:
        return sum(1.0 / one for one in residents) + 1.0 / slots <= 1.0 + 1e-9


@dataclass(frozen=True, slots=True)
class Alone(Unlimited):
    """An instance has the device to itself."""

    def is_taken(self, in_use: bool) -> bool:
        return in_use

    def has_slot(self, slots: int, residents: Sequence[int]) -> bool:
        return not residents


@dataclass(frozen=True, slots=True)
class StaticShares(Unlimited):
    """So many instances split a node, each with a fixed share of its memory (`sim/static_shares.py`)."""

    num_shares: int = 1

    def is_taken(self, in_use: bool) -> bool:
        return in_use and self.num_shares == 1

    def has_slot(self, slots: int, residents: Sequence[int]) -> bool:
        return len(residents) < min(self.num_shares, slots, *residents)


# What becomes of late requests


@dataclass(frozen=True, slots=True)
class GivingUp:
    """S11: a request whose token is due while it has no place is given up."""

    def may_extend(self, *, is_strict: bool, produced: int) -> bool:
        return False

    def owes_place(self, produced: int) -> bool:
        return False

    def begins_early(self, num_waiting: int) -> bool:
        return False

    def takes_less(self, *, is_capped: bool) -> bool:
        return is_capped

    def overdue_s(self, now: float) -> float:
        return -INFINITY


@dataclass(frozen=True, slots=True)
class FinishingBegun(GivingUp):
    """S11, but for an answer that has begun: that is never broken off."""

    def may_extend(self, *, is_strict: bool, produced: int) -> bool:
        return produced > 0

    def owes_place(self, produced: int) -> bool:
        return produced > 0


# Prefill and decode


@dataclass(frozen=True, slots=True)
class Disaggregated:
    """On instances of their own."""

    def first(self, phase: Phase) -> Phase:
        return Phase.PREFILL if phase is Phase.ANY else phase


# Which nodes serve


@dataclass(frozen=True, slots=True)
class GpusOnly:
    def takes(self, kind: DeviceKind) -> bool:
        return kind is not DeviceKind.CPU


# Idle instances


@dataclass(frozen=True, slots=True)
class KeepIdle:
    """Until their keep-alive is over."""

    keep_alive_s: float = 1.0

    def asks(self, *, are_alike: bool) -> bool:
        return False

    def may_reclaim(self, *, is_asked: bool) -> bool:
        return is_asked


@dataclass(frozen=True, slots=True)
class ReclaimAlike(KeepIdle):
    """The first request that waits need not wait for that, as long as models answer at like length."""

    def asks(self, *, are_alike: bool) -> bool:
        return are_alike


# Memory


@dataclass(frozen=True, slots=True)
class DemandByMean(DemandByModel):
    """S5: Σ(I + max(O, Ō)), by the mean of all models."""

    floor_tokens: int = 4096

    def tokens(self, known: Lengths, model: str, lengths: list[tuple[int, int]]) -> int:
        return required_tokens(lengths, known.outputs.value, 0)


@dataclass(frozen=True, slots=True)
class Copying:
    """On GPUs a resize copies the pool."""

    def transfer(self, kind: DeviceKind) -> TransferModel:
        return IN_PLACE_RESIZE if kind is DeviceKind.CPU else TransferModel()

    def may_borrow(self, wanted_tokens: int, limit_tokens: int | None) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class IgnoreLoads:
    """S4: the loads before its own are excused to a request as a cold start."""

    def is_late(self, end_s: float, due_s: float) -> bool:
        return False
