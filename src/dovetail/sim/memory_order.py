"""Requests without a place ask in the order of the memory that they would take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dovetail.policy.calls import CallRates
from dovetail.policy.lengths import Likeness
from dovetail.policy.queueing import Key, Places, Queueing, Waiting, urgency

SHARE_S = 10.0  # a request that comes within so long is expected to find the weights


@dataclass(frozen=True, slots=True)
class QueueingByMemory(Queueing):
    def queue(self, places: Places, waiting: Mapping[str, int], likeness: Likeness) -> MemoryOrder:
        return MemoryOrder(places, waiting, likeness)


class MemoryOrder:
    """A request takes its own context, and its share of weights that would have to be brought for it, which others of
    its model that wait or will come use as well. Where some models answer at greater length than others, memory does
    not say what a place costs: one may be taken for a second or for minutes. Then by deadline."""

    def __init__(self, places: Places, waiting: Mapping[str, int], likeness: Likeness) -> None:
        self._places = places
        self._calls = CallRates()
        self._likeness = likeness
        self._waiting = waiting  # by model: requests without a place

    def called(self, model: str, now: float) -> None:
        self._calls.called(model, now)

    def key(self, work: Waiting) -> Key:
        """One in the middle of a text first, by deadline; then the one that takes least."""
        if work.produced or not self._likeness.is_seen:
            return urgency(work)
        return work.is_best_effort, True, self._tokens(work), work.due_s, work.id

    def _tokens(self, work: Waiting) -> float:
        """What it would take, in tokens of its model."""
        own = work.input_tokens + work.mean_tokens
        if self._places.num_open(work.model):
            return own
        expected = SHARE_S * self._calls.per_s(work.model, self._places.now_s)
        sharing = max(self._waiting.get(work.model, 0) + expected, 1.0)
        return own + self._places.weights_tokens(work.model) / sharing
