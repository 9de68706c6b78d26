"""Who without a place asks first, by the memory that it would take (`WaitOrder.MEMORY`)."""

from __future__ import annotations

from collections import Counter

from dovetail.cluster.placer import Placer
from dovetail.cluster.waiting import urgency
from dovetail.node.work import Work
from dovetail.policy.calls import CallRates
from dovetail.policy.lengths import AnswerLengths
from dovetail.policy.memory import OutputMean

SHARE_S = 10.0  # whoever comes within so long is expected to find the weights
UNEVEN = 2.5  # times the mean of all: a model whose answers are longer than that in the mean
SEVERAL = 5  # requests of a model that got places while no answer of it has ended


class MemoryOrder:
    """A request takes its own context, and its share of weights that would have to be brought for it, which others of
    its model who wait or will come use as well. Where answers of some model are many times as long as others, or may
    be, nobody knows beforehand what they take: then by deadline."""

    def __init__(self, placer: Placer, lengths: AnswerLengths, outputs: OutputMean) -> None:
        self._placer = placer
        self._lengths = lengths
        self._outputs = outputs
        self._calls = CallRates()
        self._begun: Counter[str] = Counter()  # by model of which no answer has ended: requests that got a place
        self._unproven: set[str] = set()  # models with several of these
        self.waiting: Counter[str] = Counter()  # by model: requests without a place

    def called(self, model: str, now: float) -> None:
        self._calls.called(model, now)

    def placed(self, model: str) -> None:
        if not self._lengths.is_known(model):
            self._begun[model] += 1
            if self._begun[model] >= SEVERAL:
                self._unproven.add(model)

    def ended(self, model: str) -> None:
        """An answer of the model."""
        self._begun.pop(model, None)
        self._unproven.discard(model)

    def of(self, work: Work) -> tuple[bool, float, float, int]:
        """The smallest asks first: who is in the middle of a text, by deadline; then who takes least."""
        if work.produced or self._unproven or self._lengths.longest > UNEVEN * self._outputs.value:
            return urgency(work)
        return True, self._tokens(work), work.due_s, work.id

    def _tokens(self, work: Work) -> float:
        """What it would take, in tokens of its model."""
        own = work.input_tokens + work.mean_tokens
        if self._placer.num_open(work.model):
            return own
        expected = SHARE_S * self._calls.per_s(work.model, self._placer.now_s)
        sharing = max(self.waiting[work.model] + expected, 1.0)
        return own + self._placer.weights_tokens(work.model) / sharing
