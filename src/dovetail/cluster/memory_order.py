"""Who without a place asks first, by the memory that it would take (`WaitOrder.MEMORY`)."""

from __future__ import annotations

from collections import Counter

from dovetail.cluster.placer import Placer
from dovetail.cluster.request import RequestState
from dovetail.cluster.waiting import urgency
from dovetail.policy.calls import CallRates
from dovetail.policy.lengths import Likeness

SHARE_S = 10.0  # whoever comes within so long is expected to find the weights


class MemoryOrder:
    """A request takes its own context, and its share of weights that would have to be brought for it, which others of
    its model who wait or will come use as well. Where some models answer at greater length than others, memory does not
    say what a place costs: one may be taken for a second or for minutes. Then by deadline."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer
        self._calls = CallRates()
        self._likeness = Likeness()
        self.waiting: Counter[str] = Counter()  # by model: requests without a place

    def called(self, model: str, now: float) -> None:
        self._calls.called(model, now)

    def ended(self, model: str, tokens: int) -> None:
        """An answer of the model."""
        self._likeness.add(model, tokens)

    @property
    def are_alike(self) -> bool:
        """One place is as good as another to whoever gets it."""
        return self._likeness.is_seen

    def of(self, work: RequestState) -> tuple[bool, float, float, int]:
        """The smallest asks first: who is in the middle of a text, by deadline; then who takes least."""
        if work.produced or not self.are_alike:
            return urgency(work)
        return True, self._tokens(work), work.due_s, work.id

    def _tokens(self, work: RequestState) -> float:
        """What it would take, in tokens of its model."""
        own = work.input_tokens + work.mean_tokens
        if self._placer.num_open(work.model):
            return own
        expected = SHARE_S * self._calls.per_s(work.model, self._placer.now_s)
        sharing = max(self.waiting[work.model] + expected, 1.0)
        return own + self._placer.weights_tokens(work.model) / sharing
