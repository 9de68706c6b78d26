"""A node as the controller sees it, in this process or in another: what it last said of itself, and a way to ask it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from dovetail.node.protocol import Answer, Offer, Order, Question, StartRoom
from dovetail.policy.placement import NodeFacts
from dovetail.policy.work import Phase


class NodeHandle(Protocol):
    """Every answer is the node's own; the properties may be a little old."""

    is_draining: bool  # it takes nothing new

    @property
    def name(self) -> str: ...

    @property
    def facts(self) -> NodeFacts: ...

    @property
    def up(self) -> bool: ...

    @property
    def in_use(self) -> bool: ...

    @property
    def fullness(self) -> float: ...

    @property
    def room(self) -> StartRoom:
        """For one more instance."""

    @property
    def link_free_s(self) -> float:
        """When the loads that were ordered there should be done."""

    @property
    def is_idle(self) -> bool:
        """Nothing can run there."""

    def offer_of(self, model: str) -> Offer | None:
        """None = the node does not offer the model. One that is down is expected to offer what it did."""

    def ask(self, question: Question, now: float) -> Answer | int:
        """The answer, or the number under which it will come."""

    def order(self, order: Order, now: float) -> None: ...

    def fell_silent(self, now: float) -> None:
        """A question was not answered in time. Until it speaks again, or for a while, it answers SILENT by itself."""


@dataclass(slots=True, eq=False)
class KnownInstance:
    """What the controller believes about an instance."""

    node: NodeHandle
    id: int
    model: str
    phase: Phase
    batch: int  # requests that are not best effort
    on_cpu: bool
    best_effort: int = 0  # and these

    def count(self, more: int, *, is_best_effort: bool) -> None:
        if is_best_effort:
            self.best_effort += more
        else:
            self.batch += more

    @property
    def fills_gaps(self) -> bool:
        """It would be gone but for best effort."""
        return self.best_effort > 0 and not self.batch


def room_for(nodes: Iterable[NodeHandle], model: str) -> int | None:
    """Tokens that one request of the model may have on the largest node; None if nobody offers it."""
    offers = (node.offer_of(model) for node in nodes)
    return max((offer.room_tokens for offer in offers if offer is not None), default=None)
