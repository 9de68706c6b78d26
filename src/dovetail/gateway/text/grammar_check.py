"""Whether a grammar can be compiled and followed, tried out in a confined process: `python -m` of this module.

llguidance has no limit that holds for every grammar (the multiples of a large prime compile for minutes), so that time
and memory of a process are the limit.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from functools import lru_cache
from typing import Any

import msgspec

from dovetail.confined import serve
from dovetail.grammars import CompileError, TokenizerKey, compiled, in_words, load_tokenizer
from dovetail.types import Grammar

STEPS = 24  # tokens of a random text
MAX_STEP_S = 0.1  # for the tokens that may follow: others' tokens wait for it


class GrammarCheck(msgspec.Struct, frozen=True):
    tokenizer: TokenizerKey
    grammar: Grammar


class Verdict(msgspec.Struct, frozen=True):
    problem: str = ""  # why the grammar cannot be followed; empty where nothing speaks against it
    is_measured: bool = False  # by time, which a busy machine lengthens: another trial may find otherwise


def prepare(request: bytes) -> None:
    """Read the tokenizer: that is no work of the grammar's. An empty request asks for the imports alone."""
    if not request:
        import llguidance  # noqa: F401
        import numpy  # noqa: F401

        return
    with suppress(CompileError):  # which the trial reports
        _tokenizer(msgspec.msgpack.decode(request, type=GrammarCheck).tokenizer)


def check_grammar(request: bytes) -> bytes:
    verdict = _verdict(msgspec.msgpack.decode(request, type=GrammarCheck)) if request else Verdict()
    return msgspec.msgpack.encode(verdict)


def _verdict(check: GrammarCheck) -> Verdict:
    try:
        matcher = compiled(_tokenizer(check.tokenizer), check.grammar)
    except CompileError as error:
        return Verdict(str(error))
    slowest, steps = _walk(matcher, check.tokenizer.vocab_size)
    problem = str(matcher.get_error()) if matcher.is_error() else ""
    if problem and (not steps or "NoExtension" not in problem):  # a dead end after some tokens is that text's own
        return Verdict(in_words(problem))
    if slowest > MAX_STEP_S:
        return Verdict(f"it takes {slowest:.2f} s of processor time to find what may follow", is_measured=True)
    return Verdict()


def _walk(matcher: Any, vocab_size: int) -> tuple[float, int]:
    """A text that the grammar allows, its tokens taken here and there: the longest step, and how many there were."""
    import numpy as np

    mask = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
    slowest = 0.0
    for step in range(STEPS):
        started = time.process_time()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        slowest = max(slowest, time.process_time() - started)
        if matcher.is_error() or slowest > MAX_STEP_S:
            return slowest, step
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab_size))
        if not len(allowed):
            break
        matcher.consume_token(int(allowed[step * 7919 % len(allowed)]))
        if matcher.is_stopped():
            break
    return slowest, STEPS


@lru_cache(maxsize=4)
def _tokenizer(key: TokenizerKey) -> Any:
    return load_tokenizer(key)


# Schemas that need no trial: what is left of JSON schema without whatever makes automata (patterns, formats, bounds,
# multiples), in sizes that compile in milliseconds.
_PLAIN_KEYS = {
    "type",
    "properties",
    "required",
    "items",
    "enum",
    "const",
    "additionalProperties",
    "description",
    "title",
    "anyOf",
}
_PLAIN_TYPES = {"object", "array", "string", "integer", "number", "boolean", "null"}
_MAX_PLAIN_CHARS = 4096
_MAX_OPTIONAL = 16  # of one object: any of them may be left out


def is_plain(grammar: Grammar) -> bool:
    """Known to compile at once."""
    if grammar.kind == "json_object":
        return True
    if grammar.kind != "json_schema" or len(grammar.text) > _MAX_PLAIN_CHARS:
        return False
    try:
        return _is_plain_schema(json.loads(grammar.text), 0)
    except (ValueError, RecursionError):
        return False


def _is_plain_schema(schema: Any, depth: int) -> bool:
    if not isinstance(schema, dict) or depth > 8 or not set(schema) <= _PLAIN_KEYS:
        return False
    kind, additional = schema.get("type", "object"), schema.get("additionalProperties", True)
    if not isinstance(kind, str) or kind not in _PLAIN_TYPES or not isinstance(additional, bool):
        return False
    properties, required, options = schema.get("properties", {}), schema.get("required", []), schema.get("anyOf", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or not isinstance(options, list):
        return False
    if len(properties.keys() - set(filter(lambda name: isinstance(name, str), required))) > _MAX_OPTIONAL:
        return False
    if not all(isinstance(name, str) and name in properties for name in required) or not _are_words(schema):
        return False
    inner = [*properties.values(), *options, *([schema["items"]] if "items" in schema else [])]
    return all(_is_plain_schema(one, depth + 1) for one in inner)


def _are_words(schema: dict[str, Any]) -> bool:
    values = [*schema["enum"]] if isinstance(schema.get("enum"), list) and schema["enum"] else []
    if "enum" in schema and not values:
        return False
    values += [schema["const"]] if "const" in schema else []
    return all(isinstance(value, str | int | bool) or value is None for value in values)


if __name__ == "__main__":
    serve(check_grammar, prepare)
