"""A node in this process as the controller sees it: as it is, or as it last said of itself, with the faults that struck
what it says and hears.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dovetail.cluster.asking import LOST, SILENT, SILENT_S
from dovetail.cluster.heard import HeardNode
from dovetail.node.answers import offer_of
from dovetail.node.protocol import (
    Answer,
    Check,
    NodeView,
    Notice,
    Offer,
    Order,
    Propose,
    Question,
    Refused,
    StartRoom,
    Warm,
)
from dovetail.node.runtime import NodeRuntime
from dovetail.policy.headroom import Refusal
from dovetail.policy.placement import Hosting, NodeFacts
from dovetail.policy.work import RequestRecord


class Preparation(NamedTuple):
    """What a request waits for on its device: a grammar, an adapter."""

    seconds: float
    num_lacking: int  # times that there is no memory for it at first


class LocalNode:
    """A `cluster.handle.NodeHandle` of a node in this process."""

    def __init__(
        self,
        runtime: NodeRuntime,
        ask_late: Callable[[LocalNode, Question, float], int] | None = None,
        order_late: Callable[[LocalNode, Order, float], None] | None = None,
        propose: Callable[[LocalNode, Propose, float], Answer] | None = None,
    ) -> None:
        self.runtime = runtime
        self._order_late = order_late
        self._ask_late = ask_late  # of a node with faults: returns the number under which the answer comes, or does not
        self._propose = propose  # of one whose requests wait for what they need there
        self.facts = NodeFacts(runtime.name, runtime.kind)
        self.name = runtime.name
        self.is_draining = False
        self.lag_s = 0.0  # what the node says of itself is heard this late
        self.said_s = 0.0  # when the last of it is
        self.num_late = 0  # of what it has said, not heard yet: one that decides while it computes hears later still
        self.order_lag_s = 0.0  # questions and orders reach it this late
        self.heard_s = 0.0  # when the last of them does
        self.life = 0  # counts how often it was lost: what was on its way to it then is lost too
        self.is_cut = False  # nothing passes either way
        self.is_given_up = False  # and that was noticed
        self.is_away = False  # it has left
        self.has_no_notices = False  # what becomes of its tokens is not heard
        self.is_mute = False  # of what it is asked and answers, nothing arrives
        self.silent_until_s = 0.0
        self.last_records: dict[int, RequestRecord] = {}  # of one that was lost: how far its requests had come
        self._offers: dict[int, tuple[Hosting, Offer]] = {}  # by identity: many models share one
        self._hostings = runtime.node.device.hostings
        self._offered: tuple[Hosting | None, Offer | None] = (None, None)  # of the model that was last asked for

    @property
    def up(self) -> bool:
        return self.runtime.up and not self.is_given_up

    @property
    def in_use(self) -> bool:
        return self.runtime.node.in_use

    @property
    def fullness(self) -> float:
        return self.runtime.fullness

    @property
    def room(self) -> StartRoom:
        return self.runtime.known_room or self.runtime.room  # dozens are looked at in a decision

    @property
    def link_free_s(self) -> float:
        return self.runtime.node.device.link_free_s

    @property
    def is_idle(self) -> bool:
        return self.runtime.is_idle

    def offer_of(self, model: str) -> Offer | None:
        hosting = self._hostings.get(model)
        if hosting is self._offered[0]:  # dozens of nodes are looked at in a decision; None is not offered
            return self._offered[1]
        if hosting is None:
            return None
        known = self._offers.get(id(hosting))
        if known is None:
            known = self._offers[id(hosting)] = hosting, offer_of(self.runtime.node, hosting)
        self._offered = known
        return known[1]

    def ask(self, question: Question, now: float) -> Answer | int:
        if self.is_draining and isinstance(question, Propose | Check | Warm):
            return Refused(Refusal.CLOSED)
        if self.is_given_up:
            return LOST
        if now < self.silent_until_s:
            return SILENT
        late = self.is_mute or self.is_cut or self.is_late(now) or self.is_deaf(now)
        if self._ask_late is None or not late:
            return self.answer(question, now)
        return self._ask_late(self, question, now)

    def answer(self, question: Question, now: float) -> Answer:
        """Of the node, whenever that is heard."""
        if self._propose is not None and isinstance(question, Propose):
            return self._propose(self, question, now)
        return self.runtime.answer(question, now)

    def order(self, order: Order, now: float) -> None:
        if self.is_cut:
            return
        if self._order_late is not None and self.is_deaf(now):
            self._order_late(self, order, now)
        else:
            self.runtime.obey(order, now)

    def is_late(self, now: float) -> bool:
        """What it says now is heard later, in order."""
        return self.lag_s > 0.0 or self.said_s > now or self.num_late > 0

    def is_deaf(self, now: float) -> bool:
        """What is said to it now arrives later, in order."""
        return self.order_lag_s > 0.0 or self.heard_s > now

    def heard(self, notice: Notice) -> None:
        """The controller has it; nothing is known by it that was not known."""

    def withdraw(self, model: str) -> None:
        """No node offers the model any more."""

    def begins_anew(self) -> None:
        """It was lost, and what is known of it with it."""

    def news(self) -> NodeView | None:
        """What it has to say of itself since it last did."""
        return None

    def forget_underway(self) -> None:
        """It is gone, and what was on its way to it and from it."""
        self.life += 1
        self.heard_s = self.said_s = 0.0
        self.num_late = 0

    def fell_silent(self, now: float) -> None:
        self.silent_until_s = now + SILENT_S


class ViewedNode(LocalNode):
    """One of which is known what it last said of itself, as of a node in another process."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._heard = HeardNode()
        self.told_version = -1  # of the view

    @property
    def in_use(self) -> bool:
        return self._heard.in_use

    @property
    def fullness(self) -> float:
        return self._heard.fullness

    @property
    def room(self) -> StartRoom:
        return self._heard.room

    @property
    def link_free_s(self) -> float:
        return self._heard.link_free_s

    @property
    def is_idle(self) -> bool:
        return self._heard.is_idle

    def offer_of(self, model: str) -> Offer | None:
        return self._heard.offer_of(model)

    def heard(self, notice: Notice) -> None:
        self._heard.heard(notice)

    def withdraw(self, model: str) -> None:
        self._heard.withdraw(model)

    def begins_anew(self) -> None:
        self._heard.begins_anew()

    def news(self) -> NodeView | None:
        if self.told_version == self.runtime.version:
            return None
        self.told_version = self.runtime.version
        return self.runtime.view()
