"""What a node last said of itself: all that is known of one that is not asked."""

from __future__ import annotations

from dovetail.node.protocol import EMPTY, Idle, NodeView, NoLonger, Notice, Offer, Offered, StartRoom


class HeardNode:
    def __init__(self) -> None:
        self.is_idle = False
        self.view: NodeView | None = None
        self._offers: dict[str, Offer] = {}

    @property
    def in_use(self) -> bool:
        return self.view is not None and self.view.in_use

    @property
    def fullness(self) -> float:
        return self.view.fullness if self.view is not None else 0.0

    @property
    def room(self) -> StartRoom:
        return self.view.room if self.view is not None else EMPTY

    @property
    def link_free_s(self) -> float:
        return self.view.link_free_s if self.view is not None else 0.0

    def offer_of(self, model: str) -> Offer | None:
        return self._offers.get(model)

    def heard(self, notice: Notice) -> None:
        if isinstance(notice, NodeView):
            self.view = notice
        elif isinstance(notice, Idle):
            self.is_idle = notice.is_idle
        elif isinstance(notice, Offered):
            self._offers[notice.model] = notice.offer
        elif isinstance(notice, NoLonger):
            self.withdraw(notice.model)

    def withdraw(self, model: str) -> None:
        """It does not offer the model any more."""
        self._offers.pop(model, None)

    def begins_anew(self) -> None:
        """It was lost, or is another in its place: that one is expected to offer what this one did."""
        self.is_idle, self.view = False, None
