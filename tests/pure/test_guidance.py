"""Grammars by llguidance's C interface, against its own Python classes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from dovetail import guidance
from dovetail.grammars import CompileError, TokenizerKey, compiled, grammar_text, load_tokenizer
from dovetail.types import Grammar

EOS = 0
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
FALLBACK = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}
GRAMMARS = (
    Grammar("json_object"),
    Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}'),
    Grammar("regex", "[a-c]+(d|ef)?"),
    Grammar("lark", 'start: "yes" | "no" /[0-9]+/'),
)


def write_tokenizer(file: Path, *, num_more: int = 0, decoder: Any = None, has_fallback: bool = False) -> TokenizerKey:
    """Of single printable characters, some pairs, and as many more words; as GPT-2 writes bytes, or as Llama 2 does."""
    words = [chr(code) for code in range(33, 127)] + ['{"', '":', "ab", "no"]
    words += [f"w{number}" for number in range(num_more)]
    first = ["<end>", "\u2581", *(f"<0x{byte:02X}>" for byte in range(256))] if has_fallback else ["<end>", "Ġ"]
    vocab = {word: index for index, word in enumerate([*first, *words])}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    text = {
        "version": "1.0",
        "added_tokens": [{"id": EOS, "content": "<end>", "special": True, **plain}],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"} if has_fallback else None,
        "pre_tokenizer": None if has_fallback else BYTES,
        "decoder": decoder or (FALLBACK if has_fallback else BYTES),
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": has_fallback},
    }
    file.write_text(json.dumps(text))
    return TokenizerKey(str(file), len(vocab), (EOS,))


@pytest.fixture(params=[False, True], ids=["bytes", "fallback"])
def key(request: pytest.FixtureRequest, tmp_path: Path) -> TokenizerKey:
    return write_tokenizer(tmp_path / "tokenizer.json", has_fallback=request.param)


def allowed(matcher: Any, key: TokenizerKey) -> set[int]:
    mask = np.zeros((key.vocab_size + 31) // 32, dtype=np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little", count=key.vocab_size)).tolist())


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_a_text_may_go_on_as_the_python_classes_say_or_be_spelt_otherwise(key: TokenizerKey, grammar: Grammar) -> None:
    tokenizer = load_tokenizer(key)
    assert isinstance(tokenizer, guidance.Tokenizer)
    ours = compiled(tokenizer, grammar)
    theirs = LLMatcher(LLTokenizer(key.file, n_vocab=key.vocab_size, eos_token=[EOS]), grammar_text(grammar))
    draw = np.random.default_rng(5)
    for _ in range(40):
        found, expected = allowed(ours, key), allowed(theirs, key)
        assert expected <= found
        assert found == expected or len(expected) == 1  # forced text: its own spelling alone
        token = int(draw.choice(sorted(expected)))
        assert ours.consume_token(token)
        assert theirs.consume_token(token)
        assert (ours.is_stopped(), ours.is_error()) == (theirs.is_stopped(), theirs.is_error())
        if ours.is_stopped():
            break


def test_a_copy_goes_its_own_way(key: TokenizerKey) -> None:
    first = compiled(load_tokenizer(key), Grammar("regex", "ab"))
    second = first.deep_copy()
    before = allowed(second, key)
    assert first.consume_tokens(sorted(before)[:1])
    assert allowed(second, key) == before != allowed(first, key)


def test_what_is_no_grammar_says_why(key: TokenizerKey) -> None:
    tokenizer = load_tokenizer(key)
    for grammar in (
        Grammar("json_schema", '{"type": "nope"}'),
        Grammar("lark", 'start: "\0"'),
        Grammar("lark", "\ud800"),
    ):
        with pytest.raises(CompileError):
            compiled(tokenizer, grammar)


def test_a_token_that_the_grammar_forbids_is_an_error(key: TokenizerKey) -> None:
    matcher = compiled(load_tokenizer(key), Grammar("regex", "a"))
    assert not matcher.consume_token(5)
    assert matcher.is_error()
    assert matcher.get_error()


def test_tokenizers_that_the_c_interface_does_not_know_are_read_by_the_python_class(tmp_path: Path) -> None:
    key = write_tokenizer(tmp_path / "tokenizer.json", decoder={"type": "Fuse"})
    with pytest.raises(guidance.Unsupported):
        guidance.Tokenizer(key.file, key.vocab_size, key.eos_token_ids)
    with pytest.raises(CompileError):  # nor does that one, and it says so
        load_tokenizer(key)


def test_other_threads_run_while_a_tokenizer_is_read(tmp_path: Path) -> None:
    key = write_tokenizer(tmp_path / "tokenizer.json", num_more=60_000)
    ticks, is_over = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not is_over.is_set():
            time.sleep(0.0001)
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks
    load_tokenizer(key)
    seen = ticks - before
    is_over.set()
    thread.join()
    assert seen > 20  # while the interpreter is held: one or two, before and after


def test_every_end_of_a_text_may_end_it(key: TokenizerKey) -> None:
    several = TokenizerKey(key.file, key.vocab_size, (EOS, key.vocab_size - 1))
    matcher = compiled(load_tokenizer(several), Grammar("regex", "(xy|x)"))
    assert matcher.consume_token(max(allowed(matcher, several)))
    assert set(several.eos_token_ids) <= allowed(matcher, several)
    assert all(matcher.deep_copy().consume_token(end) for end in several.eos_token_ids)
