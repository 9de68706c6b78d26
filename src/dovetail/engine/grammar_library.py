"""Compiled grammars of all models of a process, by tokenizer and text. What does not compile is remembered too.

A choice gets a copy of its grammar, which takes microseconds; compiling takes up to seconds and is done by whoever asks
first, in any thread, with the interpreter unlocked.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from dovetail.errors import Unprocessable
from dovetail.grammars import CompileError, TokenizerKey, compiled, load_tokenizer
from dovetail.types import Grammar

_KEPT = 64
_KEPT_TOKENIZERS = 16


class GrammarLibrary:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compiled: OrderedDict[tuple[TokenizerKey, Grammar], Any] = OrderedDict()  # an LLMatcher, or an error
        self._tokenizers: OrderedDict[TokenizerKey, Any] = OrderedDict()

    def __contains__(self, item: tuple[TokenizerKey, Grammar]) -> bool:
        return item in self._compiled

    def matcher(self, key: TokenizerKey, grammar: Grammar) -> Any:
        """An LLMatcher of its own, at the start of its text. Raises Unprocessable."""
        with self._lock:
            found = self._compiled.get((key, grammar))
            if found is not None:
                self._compiled.move_to_end((key, grammar))
        if found is None:
            found = self.compile(key, grammar)
        if isinstance(found, CompileError):
            raise Unprocessable(f"{grammar.kind}: {found}")
        return found.deep_copy()

    def compile(self, key: TokenizerKey, grammar: Grammar) -> Any:
        try:
            found = compiled(self._tokenizer(key), grammar)
        except CompileError as error:
            found = error
        self._keep(key, grammar, found)
        return found

    def refuse(self, key: TokenizerKey, grammar: Grammar, reason: str) -> None:
        self._keep(key, grammar, CompileError(reason))

    def _keep(self, key: TokenizerKey, grammar: Grammar, found: Any) -> None:
        with self._lock:
            self._compiled[key, grammar] = found
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)

    def _tokenizer(self, key: TokenizerKey) -> Any:
        with self._lock:  # who comes second waits for the first rather than do the same
            if key not in self._tokenizers:
                self._tokenizers[key] = load_tokenizer(key)
                if len(self._tokenizers) > _KEPT_TOKENIZERS:
                    self._tokenizers.popitem(last=False)
            return self._tokenizers[key]
