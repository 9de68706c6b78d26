"""Compiles the grammars of requests before these take part in anything, in a thread that gives way to all others.

The gateway has tried each grammar out and refused what takes long; what is left may still take longer than a token.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from dovetail.confined import thread_gives_way
from dovetail.engine.grammar_library import GrammarLibrary
from dovetail.grammars import TokenizerKey
from dovetail.messages import Ask
from dovetail.node.protocol import Propose
from dovetail.types import ModelCard, Request

NICENESS = 10


class Held(NamedTuple):
    request: Request
    at: float
    key: TokenizerKey


class GrammarThread:
    """`hold` keeps a request back until its grammar is compiled; then it is in `ready`, and `wake` was called."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.library = GrammarLibrary()
        self.ready: queue.Queue[str] = queue.Queue()
        self._wake = wake
        self._held: dict[str, Held] = {}  # by request; of the worker's own thread
        self._orders: queue.Queue[Held] = queue.Queue()
        self._thread: threading.Thread | None = None

    def hold(self, request: Request, at: float, card: ModelCard) -> bool:
        """False: there is nothing to wait for."""
        grammar = request.sampling.grammar
        key = TokenizerKey(card.tokenizer_file, card.spec.vocab_size, card.eos_token_ids)
        if grammar is None or (key, grammar) in self.library:
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="grammars")
            self._thread.start()
        self._held[request.id] = Held(request, at, key)
        self._orders.put(self._held[request.id])
        return True

    def take(self) -> Held | None:
        """The next one that need not wait any more; None if it was held twice and has been taken."""
        return self._held.pop(self.ready.get_nowait(), None)

    def _run(self) -> None:
        thread_gives_way(NICENESS)
        while True:
            held = self._orders.get()
            grammar = held.request.sampling.grammar
            assert grammar is not None
            if held.request.id in self._held and (held.key, grammar) not in self.library:
                self.library.compile(held.key, grammar)
            self.ready.put(held.request.id)
            self._wake()


class HeldAsks:
    """Proposals that wait for a grammar. One that was withdrawn meanwhile is answered all the same: by that its sender
    knows that it may ask again."""

    def __init__(self, grammars: GrammarThread) -> None:
        self._grammars = grammars
        self._held: dict[str, list[Ask]] = {}  # by request
        self._withdrawn: set[int] = set()  # by number of the question

    def hold(self, message: Ask, card: ModelCard) -> bool:
        """False: it need not wait."""
        request = message.request
        if request is None or not self._grammars.hold(request, 0.0, card):
            return False
        self._held.setdefault(request.id, []).append(message)
        return True

    def withdraw(self, request: int) -> None:
        """Nobody wants these any more."""
        for message in (one for held in self._held.values() for one in held):
            if isinstance(message.question, Propose) and message.question.request.id == request:
                self._withdrawn.add(message.number)

    def clear(self) -> None:
        """Whoever asked is gone."""
        self._held.clear()
        self._withdrawn.clear()

    def take(self) -> list[tuple[Ask, bool]]:
        """Those that need not wait any more, and whether they are still wanted."""
        held = self._grammars.take()
        found = [] if held is None else self._held.pop(held.request.id, [])
        answers = [(message, message.number not in self._withdrawn) for message in found]
        self._withdrawn.difference_update(message.number for message in found)
        return answers
