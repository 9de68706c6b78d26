"""What the controller says: where work went and why, and what it wants to be called for. Plain records."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dovetail.node.work import Work


class How(StrEnum):
    """By which step of placement a request got its place."""

    JOIN = "join"  # an instance that was there
    PREEMPT = "preempt"  # an instance that was there, after a neighbour gave way (S9)
    START = "start"  # a new instance
    PAUSE = "pause"  # a new instance, after an instance far ahead of its deadlines was swapped out


@dataclass(frozen=True, slots=True)
class Placed:
    work: Work
    node: str
    instance: int
    how: How


@dataclass(frozen=True, slots=True)
class Queued:
    """No place now; call `retry` at this time."""

    work: Work
    retry_at_s: float
    refusals: dict[str, int]  # how often each reason was given


@dataclass(frozen=True, slots=True)
class Dropped:
    """Its token was due while it was still without a place, or nothing can ever serve it."""

    work: Work
    reason: str


@dataclass(frozen=True, slots=True)
class Moving:
    """It is between places: call `retry` at this time (its KV blocks travel until then)."""

    work: Work
    retry_at_s: float
    reason: str


Decision = Placed | Queued | Dropped | Moving
