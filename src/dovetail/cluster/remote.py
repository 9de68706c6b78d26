"""A node in another process: what it last said of itself, and questions whose answers come later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from dovetail.cluster.asking import LOST, SILENT, SILENT_S
from dovetail.cluster.heard import HeardNode
from dovetail.cluster.request import RequestState
from dovetail.messages import Ask, Command, Hello, ToWorker
from dovetail.node.protocol import Answer, CatchUp, Check, Order, Propose, Question, Refused, Warm
from dovetail.policy.headroom import Refusal
from dovetail.policy.placement import NodeFacts


class RemoteNode(HeardNode):
    """A `cluster.handle.NodeHandle`."""

    def __init__(
        self,
        facts: NodeFacts,
        send: Callable[[ToWorker], None],
        works: Mapping[int, RequestState],
        numbers: Iterator[int],
    ) -> None:
        super().__init__()
        self.facts = facts
        self.name = facts.name
        self.up = False
        self.is_draining = False
        self.memory_bytes = 0
        self.silent_until_s = 0.0
        self._send = send
        self._works = works
        self._numbers = numbers
        self._sending = -1  # number of the question that is on its way out
        self._early: Answer | None = None

    def ask(self, question: Question, now: float) -> Answer | int:
        if not self.up:
            return LOST
        if self.is_draining and isinstance(question, Propose | Check | Warm):
            return Refused(Refusal.CLOSED)
        if now < self.silent_until_s:
            return SILENT
        request = None
        if isinstance(question, Propose):
            if self.offer_of(question.request.model) is None:
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
        self.begins_anew()
        self.up, self.silent_until_s = True, 0.0
        self.facts, self.memory_bytes = replace(self.facts, kind=hello.kind), hello.memory_bytes

    def lost(self) -> None:
        self.begins_anew()
        self.up = False

    def answered(self, number: int, answer: Answer) -> bool:
        """False: whoever asked gets it from `ask`, because the wire was quicker than the question's sender."""
        if number != self._sending:
            return True
        self._early = answer
        return False
