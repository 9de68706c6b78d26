"""Compiles the grammars of requests before these take part in anything, in a thread that gives way to all others.

The gateway has tried each grammar out and refused what takes long; what is left may still take longer than a token.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from dovetail.engine.grammar_library import GrammarLibrary
from dovetail.grammars import TokenizerKey
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
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while True:
            held = self._orders.get()
            grammar = held.request.sampling.grammar
            assert grammar is not None
            if held.request.id in self._held and (held.key, grammar) not in self.library:
                self.library.compile(held.key, grammar)
            self.ready.put(held.request.id)
            self._wake()
