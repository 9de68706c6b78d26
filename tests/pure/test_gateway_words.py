"""The words of a model: what is known of its tokens without copying them all at once."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dovetail.gateway.words import Words, words_of


def tokenizer_file(vocab: dict[str, int], *added: str) -> bytes:
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="?"))
    tokenizer.add_special_tokens(list(added))
    return bytes(tokenizer.to_str(), "utf-8")


@pytest.mark.parametrize(
    ("vocab", "added"),
    [
        ({"?": 0, "word": 1, "longest one": 2}, ()),
        ({"?": 0, "word": 1}, ("<|longest|>",)),
        ({"?": 0, "longest one": 700}, ()),
        ({"?": 0, "longest one": 700}, ("<|end|>",)),
    ],
    ids=["plain", "added", "numbers with gaps", "gaps and added"],
)
def test_the_longest_token_is_known_whatever_its_number(vocab: dict[str, int], added: tuple[str, ...]) -> None:
    assert Words(tokenizer_file(vocab, *added)).max_token_chars == 11


def test_a_tokenizer_of_nothing_has_tokens_of_one_character() -> None:
    empty = json.loads(tokenizer_file({"?": 0}))
    empty["model"]["vocab"] = {}
    assert Words(json.dumps(empty).encode()).max_token_chars == 1


def test_models_with_the_same_file_share_their_words_and_altered_ones_are_refused() -> None:
    file = tokenizer_file({"?": 0, "word": 1})
    first = words_of(file)
    assert words_of(bytes(file)) is first
    with pytest.raises(ValueError, match="checksum"):
        words_of(file, "00" * 32)
