"""Grammars that clients send, tried out before a worker sees them; what came of it is remembered, by text.

The trial is `grammar_check`'s, in a process of its own: started with the first grammar that needs one, bounded in time
and memory. A trial that takes longer than most has less right to a core than anything that serves.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress

import msgspec

from dovetail.confined import Bounds, Confined, Exceeded, Lane
from dovetail.errors import Overloaded
from dovetail.gateway.clients import current_client
from dovetail.gateway.text.grammar_check import GrammarCheck, Verdict, is_plain
from dovetail.grammars import TokenizerKey
from dovetail.types import Grammar, ModelCard

BOUNDS = Bounds(cpu_s=1.5, wall_s=20.0, memory_bytes=512 << 20, niceness=10, kept_bytes=256 << 20, quick_s=0.1)
_KEPT = 1024
_KEPT_CHARS = 4 << 20  # of all texts together
_MEASURED_KEPT_S = 60.0  # verdicts that depend on how busy the machine was
_MAX_WAITING = 64


class GrammarTrials:
    def __init__(self, bounds: Bounds = BOUNDS, measured_kept_s: float = _MEASURED_KEPT_S) -> None:
        self._confined = Confined("dovetail.gateway.text.grammar_check", bounds)
        self._lane = Lane(self._confined, _MAX_WAITING)
        self._measured_kept_s = measured_kept_s
        self._known: OrderedDict[GrammarCheck, asyncio.Task[Verdict]] = OrderedDict()
        self._known_chars = 0

    async def warm(self) -> None:
        """Returns when the process is there and has its libraries, so that no request pays for that."""
        with suppress(Exceeded):  # then the first request waits for them
            await self._lane.call(b"")

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return self._confined.pid

    async def problem(self, card: ModelCard, grammar: Grammar) -> str:
        """Why it cannot be followed; empty where nothing speaks against it. Raises Overloaded where that could not be
        found out now."""
        if is_plain(grammar):
            return ""
        check = GrammarCheck(TokenizerKey(card.tokenizer_file, card.spec.vocab_size, card.eos_token_ids), grammar)
        found = self._known.get(check)
        loop = asyncio.get_running_loop()
        if found is None or found.get_loop() is not loop:
            client = current_client.get()
            if self._lane.is_full(client):
                raise Overloaded("too many grammars wait to be compiled", code="grammars_waiting", retry_after_s=5)
            found = self._begin(check, client)
        self._known.move_to_end(check)
        return (await asyncio.shield(found)).problem

    def _begin(self, check: GrammarCheck, client: str) -> asyncio.Task[Verdict]:
        self._forget(check)
        found = self._known[check] = asyncio.create_task(self._try(check, client))
        found.add_done_callback(lambda task: self._tried(check, task))
        self._known_chars += len(check.grammar.text)
        while len(self._known) > _KEPT or self._known_chars > _KEPT_CHARS:
            self._forget(next(iter(self._known)))
        return found

    def _tried(self, check: GrammarCheck, task: asyncio.Task[Verdict]) -> None:
        """What no trial found out is not remembered, and what time decided only for a while."""
        if task.cancelled() or task.exception() is not None:
            self._forget_task(check, task)
        elif task.result().is_measured:
            task.get_loop().call_later(self._measured_kept_s, self._forget_task, check, task)

    def _forget_task(self, check: GrammarCheck, task: asyncio.Task[Verdict]) -> None:
        if self._known.get(check) is task:
            self._forget(check)

    def _forget(self, check: GrammarCheck) -> None:
        if self._known.pop(check, None) is not None:
            self._known_chars -= len(check.grammar.text)

    async def _try(self, check: GrammarCheck, client: str) -> Verdict:
        try:
            answer = await self._lane.call(msgspec.msgpack.encode(check), client)
        except Exceeded as error:
            if error.is_wall:
                raise Overloaded(
                    f"the grammar could not be checked now: {error.what}", code="grammar_check_timeout", retry_after_s=5
                ) from error
            return Verdict(error.what, is_measured=True)
        return msgspec.msgpack.decode(answer, type=Verdict)


grammar_trials = GrammarTrials()  # one for all models: what is known of a text, and the process, are shared
