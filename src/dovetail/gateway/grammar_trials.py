"""Grammars that clients send, tried out before a worker sees them; what came of it is remembered, by text.

The trial is `grammar_check`'s, in a process of its own: started with the first grammar that needs one, bounded in time
and memory, and with less right to a core than anything that serves.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

import msgspec

from dovetail.confined import Bounds, Confined, Exceeded, Lane
from dovetail.errors import Overloaded
from dovetail.gateway.clients import current_client
from dovetail.gateway.grammar_check import Check, is_plain
from dovetail.grammars import TokenizerKey
from dovetail.types import Grammar, ModelCard

BOUNDS = Bounds(cpu_s=1.5, wall_s=20.0, memory_bytes=512 << 20, niceness=10, kept_bytes=256 << 20)
_KEPT = 1024
_KEPT_CHARS = 4 << 20  # of all texts together
_MAX_WAITING = 64


class GrammarTrials:
    def __init__(self, bounds: Bounds = BOUNDS) -> None:
        self._lane = Lane(Confined("dovetail.gateway.grammar_check", bounds), _MAX_WAITING)
        self._known: OrderedDict[Check, asyncio.Task[str]] = OrderedDict()
        self._known_chars = 0

    async def problem(self, card: ModelCard, grammar: Grammar) -> str:
        """Why it cannot be followed; empty where nothing speaks against it."""
        if is_plain(grammar):
            return ""
        check = Check(TokenizerKey(card.tokenizer_file, card.spec.vocab_size, card.eos_token_ids), grammar)
        found = self._known.get(check)
        loop = asyncio.get_running_loop()
        if found is None or found.get_loop() is not loop:
            client = current_client.get()
            if self._lane.is_full(client):
                raise Overloaded("too many grammars wait to be compiled", code="grammars_waiting", retry_after_s=5)
            found = self._begin(check, client)
        self._known.move_to_end(check)
        return await asyncio.shield(found)

    def _begin(self, check: Check, client: str) -> asyncio.Task[str]:
        self._forget(check)
        found = self._known[check] = asyncio.create_task(self._try(check, client))
        self._known_chars += len(check.grammar.text)
        while len(self._known) > _KEPT or self._known_chars > _KEPT_CHARS:
            self._forget(next(iter(self._known)))
        return found

    def _forget(self, check: Check) -> None:
        if self._known.pop(check, None) is not None:
            self._known_chars -= len(check.grammar.text)

    async def _try(self, check: Check, client: str) -> str:
        try:
            return (await self._lane.call(msgspec.msgpack.encode(check), client)).decode(errors="replace")
        except Exceeded as error:
            return error.what


grammar_trials = GrammarTrials()  # one for all models: what is known of a text, and the process, are shared
