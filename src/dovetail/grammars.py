"""Grammars of llguidance for the tokens of one model: how both are made, in the gateway's trial and in the engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from dovetail import guidance
from dovetail.types import Grammar

logger = logging.getLogger("dovetail.grammars")


class TokenizerKey(msgspec.Struct, frozen=True):
    file: str  # tokenizer.json
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()


class CompileError(Exception):
    """One line that says why."""


def load_tokenizer(key: TokenizerKey) -> Any:
    """Other threads run meanwhile, unless the tokenizer is of a rare kind. Raises CompileError."""
    from llguidance import LLTokenizer

    with _rust():
        try:
            return guidance.Tokenizer(key.file, key.vocab_size, key.eos_token_ids)
        except guidance.Unsupported as error:
            logger.warning("%s is read by llguidance's Python class, which stops other threads: %s", key.file, error)
        return LLTokenizer(key.file, n_vocab=key.vocab_size, eos_token=list(key.eos_token_ids) or None)


def compiled(tokenizer: Any, grammar: Grammar) -> Any:
    """A matcher at the start of its text. Other threads run meanwhile. Raises CompileError."""
    from llguidance import LLMatcher

    with _rust():
        text = grammar_text(grammar)
        if isinstance(tokenizer, guidance.Tokenizer):
            matcher: Any = guidance.Matcher(tokenizer, text)
        else:
            matcher = LLMatcher(tokenizer, text, log_level=0)
    if matcher.is_error():
        raise CompileError(in_words(matcher.get_error()))
    return matcher


def grammar_text(grammar: Grammar) -> str:
    """llguidance's own form of a grammar."""
    from llguidance import LLMatcher

    compact: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    with _rust():
        if grammar.kind == "json_object":
            return str(LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=compact))
        if grammar.kind == "json_schema":
            return str(LLMatcher.grammar_from_json_schema(grammar.text, overrides=compact))
        if grammar.kind == "regex":
            return str(LLMatcher.grammar_from_regex(grammar.text))
        return str(LLMatcher.grammar_from_lark(grammar.text))


@contextmanager
def _rust() -> Iterator[None]:
    try:
        yield
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(_first_line(str(error))) from error
    except BaseException as error:  # what a panic becomes is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise CompileError(_first_line(str(error))) from error


def in_words(problem: str) -> str:
    """llguidance names a dead end by its internal reason."""
    if "NoExtension" in problem:
        return "no text fits it: it contradicts itself, or refers to itself without an end"
    return _first_line(problem)


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:500] if text.strip() else "cannot be compiled"
