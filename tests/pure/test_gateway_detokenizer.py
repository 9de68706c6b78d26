"""Streaming detokenisation against the tokenizers' own decoding of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from gateway_builders import byte_fallback_tokenizer, byte_level_tokenizer, word_piece_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dovetail.gateway.text.detokenizer import Vocabulary
from dovetail.gateway.text.token_table import TokenTable

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
WORD_PIECE = word_piece_tokenizer()
TEXT = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("👩‍👩‍👧‍👦🗼é日本語 \n")), max_size=40)


def stream(tokenizer: Tokenizer, tokens: Sequence[int], prompt: Sequence[int] = (), *, skip: bool = True) -> list[str]:
    detokenizer = Vocabulary(TokenTable.of(tokenizer)).detokenizer(prompt, skip_special_tokens=skip)
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.flush()]


@given(st.lists(st.integers(0, 262), max_size=60), st.booleans())
def test_any_tokens_of_a_byte_level_vocabulary_stream_to_the_whole_decoding(tokens: list[int], skip: bool) -> None:
    assert "".join(stream(BYTE_LEVEL, tokens, skip=skip)) == BYTE_LEVEL.decode(tokens, skip_special_tokens=skip)


@given(TEXT)
def test_no_piece_of_a_valid_text_has_half_a_character(text: str) -> None:
    pieces = stream(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(TEXT, TEXT)
def test_byte_fallback_text_streams_to_the_whole_decoding_behind_its_prompt(prompt: str, text: str) -> None:
    def encode(value: str) -> list[int]:
        return [BYTE_FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in value.encode()]

    before = [BYTE_FALLBACK.token_to_id("▁the"), *encode(prompt)]
    whole = BYTE_FALLBACK.decode([*before, *encode(text)])
    assert BYTE_FALLBACK.decode(before) + "".join(stream(BYTE_FALLBACK, encode(text), before)) == whole


def test_a_continuation_keeps_its_leading_space() -> None:
    the, cat = BYTE_FALLBACK.token_to_id("▁the"), BYTE_FALLBACK.token_to_id("▁cat")
    assert stream(BYTE_FALLBACK, [cat], [the])[0] == " cat"


@given(st.lists(st.integers(2, 8), min_size=1, max_size=40))
def test_other_decoders_stream_through_a_window_to_the_whole_decoding(tokens: list[int]) -> None:
    prompt = [WORD_PIECE.token_to_id("the")]
    whole = WORD_PIECE.decode([*prompt, *tokens])
    assert WORD_PIECE.decode(prompt) + "".join(stream(WORD_PIECE, tokens, prompt)) == whole


def test_invalid_bytes_are_answered_at_once_and_an_unfinished_character_at_the_end() -> None:
    euro = [BYTE_LEVEL.token_to_id(char) for char in ("â", "Ĥ", "¬")]  # e2 82 ac
    assert stream(BYTE_LEVEL, euro) == ["", "", "€", ""]
    assert stream(BYTE_LEVEL, [euro[1], *euro]) == ["\ufffd", "", "", "€", ""]
    assert stream(BYTE_LEVEL, euro[:2]) == ["", "", "\ufffd"]


def test_a_window_is_bounded_for_bytes_that_never_become_a_character() -> None:
    vocabulary = Vocabulary(TokenTable.of(BYTE_FALLBACK))
    vocabulary._decoder.kind = "other"  # the window must cope with any decoder
    detokenizer = vocabulary.detokenizer([])
    pieces = [detokenizer.feed(BYTE_FALLBACK.token_to_id("<0xFF>")) for _ in range(200)]
    assert "".join(pieces) + detokenizer.flush() == "\ufffd" * 200
    assert max(len(piece) for piece in pieces) <= 5


def test_rows_of_the_embedding_that_stand_for_nothing_give_no_text() -> None:
    assert "".join(stream(BYTE_LEVEL, [10_000])) == ""


@pytest.mark.parametrize(("token", "expected"), [("â", b"\xe2"), ("Ġ", b" "), ("<|end|>", b"<|end|>")])
def test_a_token_has_its_bytes(token: str, expected: bytes) -> None:
    vocabulary = Vocabulary(TokenTable.of(BYTE_LEVEL))
    assert vocabulary.token_bytes(BYTE_LEVEL.token_to_id(token)) == expected
    assert vocabulary.token_text(BYTE_LEVEL.token_to_id(token)) == expected.decode(errors="replace")
