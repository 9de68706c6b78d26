"""Decisions that ask nodes, as generators: each waits for its answer where it asks, whether that comes at once or late.

Between a question and its answer the world goes on, so whoever asks looks again at what may have changed. A node that
does not answer in time is taken to refuse; what it may have accepted is withdrawn, what it may have let go is taken in
when the answer comes after all.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from typing import NamedTuple, TypeVar

from dovetail.cluster.handle import NodeHandle
from dovetail.node.protocol import Answer, Propose, Question, Refused, TookBack, Withdraw
from dovetail.policy.headroom import INFINITY, Refusal

Result = TypeVar("Result")

# A worker answers between two iterations. One that takes longer than this has somebody else asked meanwhile.
ANSWER_S = 1.0
# A node that owes answers is not asked again before, unless it speaks.
SILENT_S = 5.0
# Whoever asks for a request whose time is over waits this long at least.
LEAST_ANSWER_S = 0.05


class Ask(NamedTuple):
    node: NodeHandle
    question: Question
    until_s: float = INFINITY  # an answer after this is of no use


Asking = Generator[Ask, Answer, Result]
LOST = Refused(Refusal.CLOSED)  # stands for the answer of a node that is gone
SILENT = Refused(Refusal.SILENT)  # stands for an answer that did not come in time


class _Waiting(NamedTuple):
    decision: Asking[None]
    ask: Ask
    asked_s: float


class Decisions:
    """Those that wait for an answer."""

    def __init__(self, took_back: Callable[[NodeHandle, TookBack], None]) -> None:
        self.now_s = 0.0  # of the event that is being handled
        self.num_silent = 0  # answers that did not come in time
        self._took_back = took_back  # a node let a request go, and whoever asked for that waits no longer
        self._waiting: dict[int, _Waiting] = {}  # by number of the question
        self._expiries: list[tuple[float, int]] = []  # heap of (time, number); what is not in `_waiting` is stale
        self._given_up: dict[int, NodeHandle] = {}  # by number: questions that were not answered in time

    def __len__(self) -> int:
        return len(self._waiting)

    def is_proposed(self, node: NodeHandle, instance: int) -> bool:
        """Whether the node has yet to say if it takes a request on this instance."""
        asked = (one.ask for one in self._waiting.values() if one.ask.node is node)
        return any(isinstance(ask.question, Propose) and ask.question.instance == instance for ask in asked)

    def proposed_to(self, node: NodeHandle) -> list[int]:
        """Requests that the node was asked to take and of which it has not said yet whether it does."""
        asked = (one.ask for one in self._waiting.values() if one.ask.node is node)
        proposals = (ask.question for ask in asked if isinstance(ask.question, Propose))
        return [question.request.id for question in proposals if not question.hold]

    def begin(self, decision: Asking[None]) -> None:
        """Goes on until its end, or until an answer is not there yet."""
        try:
            ask = next(decision)
        except StopIteration:
            return
        self._go_on(decision, ask)

    def answered(self, number: int, answer: Answer) -> None:
        """One that comes twice, or after its node was given up, is passed over."""
        waiting = self._waiting.pop(number, None)
        node = self._given_up.pop(number, None)
        if self._given_up:
            self._forget_lost(number, node if waiting is None else waiting.ask.node)
        if waiting is not None:
            self._resume(waiting.decision, answer)
        elif node is not None and isinstance(answer, TookBack):
            self._took_back(node, answer)

    def _forget_lost(self, number: int, node: NodeHandle | None) -> None:
        """A node answers in the order in which it was asked: what it has not answered by now was lost on the way."""
        self._given_up = {asked: one for asked, one in self._given_up.items() if one is not node or asked > number}

    def lost(self, node: NodeHandle) -> None:
        """Nothing comes from there any more."""
        self._given_up = {number: one for number, one in self._given_up.items() if one is not node}
        for number, waiting in list(self._waiting.items()):
            if waiting.ask.node is node and self._waiting.pop(number, None) is not None:
                self._resume(waiting.decision, LOST)

    # Time

    def next_expiry_s(self) -> float | None:
        if not self._waiting:
            self._expiries.clear()
        while self._expiries and self._expiries[0][1] not in self._waiting:
            heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else None

    def expire(self) -> None:
        """Those who have waited too long go on without an answer."""
        while (expiry_s := self.next_expiry_s()) is not None and expiry_s <= self.now_s:
            self._give_up(heappop(self._expiries)[1])

    def _give_up(self, number: int) -> None:
        decision, ask, asked_s = self._waiting.pop(number)
        self._given_up[number] = ask.node
        self.num_silent += 1
        if self.now_s - asked_s >= ANSWER_S:
            ask.node.fell_silent(self.now_s)
        if isinstance(ask.question, Propose):  # it may accept yet: what it is told after that undoes it
            question = ask.question
            ask.node.order(Withdraw(question.request.id, question.hold or None), self.now_s)
        self._resume(decision, SILENT)

    def _resume(self, decision: Asking[None], answer: Answer) -> None:
        try:
            following = decision.send(answer)
        except StopIteration:
            return
        self._go_on(decision, following)

    def _go_on(self, decision: Asking[None], ask: Ask) -> None:
        while True:
            answer = ask.node.ask(ask.question, self.now_s)
            if isinstance(answer, int):
                self._wait(answer, decision, ask)
                return
            try:
                ask = decision.send(answer)
            except StopIteration:
                return

    def _wait(self, number: int, decision: Asking[None], ask: Ask) -> None:
        self._waiting[number] = _Waiting(decision, ask, self.now_s)
        expiry_s = max(min(self.now_s + ANSWER_S, ask.until_s), self.now_s + LEAST_ANSWER_S)
        heappush(self._expiries, (expiry_s, number))
