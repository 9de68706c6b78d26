"""Keeping a model's requests together: which instance takes a new request (S10), which neighbour gives way (S9)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Batch(Protocol):
    @property
    def batch(self) -> int: ...


class PlacedBatch(Batch, Protocol):
    @property
    def on_cpu(self) -> bool: ...


FIRST = 1 << 40  # beyond any batch: one number sorts sooner than a pair, and a popular model has many instances
BatchT = TypeVar("BatchT", bound=Batch)
PlacedT = TypeVar("PlacedT", bound=PlacedBatch)


def rank_instances(instances: Iterable[PlacedT], *, reactive: bool) -> list[PlacedT]:
    """S10, S11: CPU before GPU, then the largest batch first so that small ones drain. Without S10 the load is spread:
    the smallest batch first, wherever it is."""
    if not reactive:
        return sorted(instances, key=lambda instance: instance.batch)
    return sorted(instances, key=lambda instance: -instance.batch - FIRST if instance.on_cpu else -instance.batch)


def rank_victims(neighbours: Iterable[BatchT], batch: int) -> list[BatchT]:
    """S9: those with a smaller batch than the preemptor's (its new request included), the smallest first."""
    return sorted((one for one in neighbours if one.batch < batch), key=lambda one: one.batch)
