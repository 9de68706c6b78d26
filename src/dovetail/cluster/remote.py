"""A node in another process: what it last said of itself, and questions whose answers come later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from dovetail.cluster.asking import LOST, SILENT, SILENT_S
from dovetail.cluster.request import RequestState
from dovetail.messages import Ask, Command, Hello, ToWorker
from dovetail.node.protocol import (
    EMPTY,
    Answer,
    CatchUp,
    Check,
    Idle,
    NodeView,
    NoLonger,
    Notice,
    Offer,
    Offered,
    Order,
    Propose,
    Question,
    Refused,
    StartRoom,
    Warm,
)
from dovetail.policy.headroom import Refusal
from dovetail.policy.placement import NodeFacts


class RemoteNode:
    """A `cluster.handle.NodeHandle`."""

    def __init__(
        self,
        facts: NodeFacts,
        send: Callable[[ToWorker], None],
        works: Mapping[int, RequestState],
        numbers: Iterator[int],
    ) -> None:
        self.facts = facts
        self.name = facts.name
        self.up = False
        self.is_draining = False
        self.is_idle = False
        self.view: NodeView | None = None
        self.memory_bytes = 0
        self.silent_until_s = 0.0
        self._offers: dict[str, Offer] = {}
        self._send = send
        self._works = works
        self._numbers = numbers
        self._sending = -1  # number of the question that is on its way out
        self._early: Answer | None = None

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

    def ask(self, question: Question, now: float) -> Answer | int:
        if not self.up:
            return LOST
        if self.is_draining and isinstance(question, Propose | Check | Warm):
            return Refused(Refusal.CLOSED)
        if now < self.silent_until_s:
            return SILENT
        request = None
        if isinstance(question, Propose):
            if question.request.model not in self._offers:
                return Refused(Refusal.HARDWARE)
            work = self._works[question.request.id]
            assert work.choice is not None
            request = work.choice.body(is_isolated=work.is_isolated)
        self._sending = number = next(self._numbers)
        self._send(Ask(number, question, request))
        self._sending = -1
        early, self._early = self._early, None
        return number if early is None else early

    def order(self, order: Order, now: float) -> None:
        if not self.up:
            return
        tokens: tuple[int, ...] = ()
        if isinstance(order, CatchUp):
            choice = self._works[order.request.id].choice
            assert choice is not None
            tokens = tuple(choice.tokens[order.known : order.request.produced])
            assert len(tokens) == order.request.produced - order.known, "a node tells tokens before it counts them"
        self._send(Command(order, tokens))

    def fell_silent(self, now: float) -> None:
        self.silent_until_s = now + SILENT_S

    def spoke(self) -> bool:
        """Something came from there; whether it had been silent."""
        was_silent, self.silent_until_s = self.silent_until_s > 0.0, 0.0
        return was_silent

    # What becomes of it

    def joined(self, hello: Hello) -> None:
        """A worker is there, perhaps in place of another; what that one offered this one is expected to offer."""
        self.up, self.is_idle, self.view, self.silent_until_s = True, False, None, 0.0
        self.facts, self.memory_bytes = replace(self.facts, kind=hello.kind), hello.memory_bytes

    def lost(self) -> None:
        self.up, self.is_idle, self.view = False, False, None

    def answered(self, number: int, answer: Answer) -> bool:
        """False: whoever asked gets it from `ask`, because the wire was quicker than the question's sender."""
        if number != self._sending:
            return True
        self._early = answer
        return False

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
