"""Keeping a model's requests together: which instance takes a new request (S10), which neighbour gives way (S9)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class HasBatch(Protocol):
    @property
    def batch(self) -> int: ...


class PlacedBatch(HasBatch, Protocol):
    @property
    def on_cpu(self) -> bool: ...


MAX_INSTANCES = 3  # of a model that are asked to take a request, so that a decision's time does not grow with them
FIRST = 1 << 40  # beyond any batch: one number sorts sooner than a pair, and a popular model has many instances
BatchT = TypeVar("BatchT", bound=HasBatch)
PlacedT = TypeVar("PlacedT", bound=PlacedBatch)


class InstanceOrder(Protocol):
    @property
    def num_victims(self) -> int:
        """Neighbours considered for giving way to one request (S9)."""

    def rank(self, instances: Sequence[PlacedT], turn: int) -> list[PlacedT]:
        """Those of a model that are asked to take a request, in order; `turn` counts the requests that chose."""


@dataclass(frozen=True, slots=True)
class Consolidating:
    """S10, S11: CPU before GPU, then the largest batch first so that small ones drain."""

    num_victims: int = 2

    def rank(self, instances: Sequence[PlacedT], turn: int) -> list[PlacedT]:
        return _in_order(instances)[:MAX_INSTANCES]


class ConsolidatingOnBoth(Consolidating):
    """The same, and a GPU that has the model is always among those asked: where several CPUs have it and no time, each
    newcomer would start another instance beside the GPU's."""

    def rank(self, instances: Sequence[PlacedT], turn: int) -> list[PlacedT]:
        order = _in_order(instances)
        asked = order[:MAX_INSTANCES]
        if asked and asked[-1].on_cpu:
            asked[-1] = next((one for one in order[MAX_INSTANCES:] if not one.on_cpu), asked[-1])
        return asked


def _in_order(instances: Sequence[PlacedT]) -> list[PlacedT]:
    return sorted(instances, key=lambda one: -one.batch - FIRST if one.on_cpu else -one.batch)


def rank_victims(neighbours: Iterable[BatchT], batch: int) -> list[BatchT]:
    """S9: those with a smaller batch than the preemptor's (its new request included), the smallest first."""
    return sorted((one for one in neighbours if one.batch < batch), key=lambda one: one.batch)
