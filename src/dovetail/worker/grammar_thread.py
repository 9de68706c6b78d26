"""Compiles the grammars of requests before their first turn, in threads that give way to all others when it takes long.

The gateway has tried each grammar out and refused what takes long; what is left may still take longer than a token.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from dovetail.confined import giving_way_later
from dovetail.engine.grammar_library import GrammarLibrary
from dovetail.grammars import TokenizerKey
from dovetail.types import Grammar, ModelCard, Request

NICENESS = 10
QUICK_S = 0.1  # of processor time, before that


class CompileOrder(NamedTuple):
    grammar: Grammar
    key: TokenizerKey


class GrammarThread:
    """`awaits` keeps a request from its first turn until its grammar is compiled; then `wake` was called, and `take`
    names the request."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.library = GrammarLibrary()
        self._wake = wake
        self._awaited: dict[CompileOrder, set[int]] = {}  # requests; of the worker's own thread
        self._orders: queue.Queue[CompileOrder] = queue.Queue()
        self._ready: queue.Queue[CompileOrder] = queue.Queue()
        self._thread: threading.Thread | None = None

    def awaits(self, id: int, request: Request, card: ModelCard) -> bool:
        """False: there is nothing to wait for."""
        grammar = request.sampling.grammar
        key = TokenizerKey(card.tokenizer_file, card.spec.vocab_size, card.eos_token_ids)
        if grammar is None or (key, grammar) in self.library:
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="grammars")
            self._thread.start()
        order = CompileOrder(grammar, key)
        if order not in self._awaited:
            self._orders.put(order)
        self._awaited.setdefault(order, set()).add(id)
        return True

    def take(self) -> set[int]:
        """Requests that need not wait any more."""
        return self._awaited.pop(self._ready.get_nowait(), set())

    def _run(self) -> None:
        while True:
            order = self._orders.get()
            if (order.key, order.grammar) not in self.library:
                giving_way_later(partial(self.library.compile, order.key, order.grammar), QUICK_S, NICENESS)
            self._ready.put(order)
            self._wake()
