"""Requests without a place: when they ask again, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

CHANGED_S = 0.02  # a decision takes a fraction of a millisecond, an iteration many: they look this often


class Waiting(Protocol):
    """A request without a place."""

    id: int
    model: str
    input_tokens: int
    produced: int
    mean_tokens: float
    is_best_effort: bool
    goes_first: bool

    @property
    def due_s(self) -> float: ...


Key = tuple[bool, int, float, float, int]


def urgency(work: Waiting) -> Key:
    """The smallest asks first: whoever is waited for, one in the middle of a text, to whom a node may owe its place
    while newcomers keep away from it, one that goes first, then the one whose token is due first."""
    rank = 0 if work.produced else 1 if work.goes_first else 2
    return work.is_best_effort, rank, 0.0, work.due_s, work.id


class Queue(Protocol):
    """The order of one cluster's queue."""

    def called(self, model: str, now: float) -> None:
        """A request for the model has come."""

    def key(self, work: Any) -> Key:
        """The smallest asks first."""


class Places(Protocol):
    """What an order may go by."""

    now_s: float

    def num_open(self, model: str) -> int:
        """Instances of the model that take work."""

    def weights_tokens(self, model: str) -> float:
        """As much memory as the model's weights take holds the KV of so many tokens."""


class ByDeadline:
    def called(self, model: str, now: float) -> None:
        """That does not count."""

    def key(self, work: Any) -> Key:
        return urgency(work)


@dataclass(frozen=True, slots=True)
class Queueing:
    """By deadline, soon after something has changed."""

    change_s: float = CHANGED_S  # how soon after a change they ask; inf: at their regular time only

    def queue(self, places: Places, waiting: Mapping[str, int], likeness: Any) -> Queue:
        """`waiting`: requests by model; `likeness`: whether models answer at like length."""
        return ByDeadline()
