"""Decisions that ask nodes, as generators: each waits for its answer where it asks, whether that comes at once or late.

Between a question and its answer the world goes on, so whoever asks looks again at what may have changed.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, TypeVar

from dovetail.cluster.handle import NodeHandle
from dovetail.node.protocol import Answer, Question, Refused
from dovetail.policy.headroom import Refusal

Result = TypeVar("Result")


class Ask(NamedTuple):
    node: NodeHandle
    question: Question


Asking = Generator[Ask, Answer, Result]
LOST = Refused(Refusal.CLOSED)  # stands for the answer of a node that is gone


class Decisions:
    """Those that wait for an answer."""

    def __init__(self) -> None:
        self.now_s = 0.0  # of the event that is being handled
        self._waiting: dict[int, tuple[Asking[None], Ask]] = {}  # by number of the question

    def __len__(self) -> int:
        return len(self._waiting)

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
        if waiting is not None:
            self._resume(*waiting, answer)

    def lost(self, node: NodeHandle) -> None:
        """Nothing comes from there any more."""
        for number, (decision, ask) in list(self._waiting.items()):
            if ask.node is node:
                del self._waiting[number]
                self._resume(decision, ask, LOST)

    def _resume(self, decision: Asking[None], ask: Ask, answer: Answer) -> None:
        try:
            following = decision.send(answer)
        except StopIteration:
            return
        self._go_on(decision, following)

    def _go_on(self, decision: Asking[None], ask: Ask) -> None:
        while True:
            answer = ask.node.ask(ask.question, self.now_s)
            if isinstance(answer, int):
                self._waiting[answer] = decision, ask
                return
            try:
                ask = decision.send(answer)
            except StopIteration:
                return
