"""How long it takes until a model is there, by where its weights are and what is loaded before it (L6).

A load takes q + n/b: what waits on the link before it, and its bytes over what that tier gives. Both are corrected by
every load that was seen; a model that was never loaded from there is judged by what others took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dovetail.policy.placement import DeviceKind, NodeLoad

STEP = 0.3  # how much a new load counts against what was known
ASSUMED = {"neighbour": 1.25e8, "remote": 1.25e8}  # bytes/s of a tier until something came from there: 1 Gbit/s
STEP_S = 0.1  # starts that differ by less are alike: packing decides
NodeT = TypeVar("NodeT", bound=NodeLoad)


class LoadTimes:
    """Of one device."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], float] = {}  # by model and tier
        self._bytes_per_s: dict[str, float] = {}  # by tier

    def observe(self, model: str, tier: str, num_bytes: int, seconds: float) -> None:
        key = model, tier
        self._seconds[key] = _learn(self._seconds.get(key), seconds)
        if num_bytes and seconds > 0.0:
            self._bytes_per_s[tier] = _learn(self._bytes_per_s.get(tier), num_bytes / seconds)

    def expected_s(self, model: str, tier: str, num_bytes: int) -> float:
        """0 where nothing was seen yet, but for what has to come from another machine."""
        known = self._seconds.get((model, tier))
        if known is not None:
            return known
        rate = self._bytes_per_s.get(tier, ASSUMED.get(tier, 0.0))
        return num_bytes / rate if rate else 0.0


def _learn(known: float | None, seen: float) -> float:
    return seen if known is None else known + STEP * (seen - known)


def start_s(link_free_s: float, load_s: float, now: float) -> float:
    """q + n/b."""
    return max(link_free_s - now, 0.0) + load_s


class Draws:
    """A row of pseudo-random numbers, the same in every run."""

    def __init__(self) -> None:
        self._last = 0

    def shuffled(self, items: Sequence[NodeT]) -> list[NodeT]:
        order = list(items)
        for last in range(len(order) - 1, 0, -1):
            self._last = (self._last * 6364136223846793005 + 1442695040888963407) % 2**64
            other = (self._last >> 33) % (last + 1)
            order[last], order[other] = order[other], order[last]
        return order


class StartRanking(Protocol):
    """Which nodes are asked to start an instance of a model, and in which order."""

    def rank(self, nodes: Sequence[NodeT], start_s: Callable[[NodeT], float], draws: Draws) -> list[NodeT]:
        """`start_s` until the model's weights would be on a node."""

    def window(self, seen: Sequence[NodeT], near: Callable[[], Sequence[NodeT]]) -> list[NodeT]:
        """Of a large cluster: those looked at, and those where the weights are there soonest, if that counts."""


@dataclass(frozen=True, slots=True)
class SoonestStart:
    """S11 with L6: CPU before GPU; within a kind where the model is there soonest, and of those as S11 packs."""

    def rank(self, nodes: Sequence[NodeT], start_s: Callable[[NodeT], float], draws: Draws) -> list[NodeT]:
        return rank_by_start(nodes, start_s)

    def window(self, seen: Sequence[NodeT], near: Callable[[], Sequence[NodeT]]) -> list[NodeT]:
        return list(dict.fromkeys([*near(), *seen]))


def rank_by_start(nodes: Iterable[NodeT], start_s: Callable[[NodeT], float]) -> list[NodeT]:
    return sorted(
        nodes,
        key=lambda node: (
            node.facts.kind is DeviceKind.GPU,
            int(start_s(node) / STEP_S),
            not node.in_use,
            -node.fullness,
        ),
    )


class Loads(Protocol):
    def is_late(self, end_s: float, due_s: float) -> bool:
        """A start whose first token would come then, after the loads before its own, is refused (L6)."""


@dataclass(frozen=True, slots=True)
class CountLoads:
    """What is excused to a request as a cold start, its user waits for all the same."""

    def is_late(self, end_s: float, due_s: float) -> bool:
        return end_s > due_s
