"""Tokenizer files that are read in pieces: the same to the byte as read in one, whatever is in them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel

from dovetail.gateway import tokenizer_file
from dovetail.gateway.tokenizer_file import read_tokenizer

TEXT = "<s>an anna, banana! <tool> ana<|end|> Äh <mask>\n" * 3
WORDS = ["an", "na", "ana", "nan", "anna", "ban"]
MERGES = [("a", "n"), ("n", "a"), ("an", "a"), ("na", "n"), ("an", "na"), ("b", "an")]


@pytest.fixture(autouse=True)
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_file, "_LARGE_BYTES", 0)


def make_bpe(**options: Any) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<s>", "<unk>", *alphabet, *WORDS, "<0x41>"])}
    tokenizer = Tokenizer(BPE(vocab, MERGES, **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def with_additions(tokenizer: Tokenizer) -> Tokenizer:
    """Special ones of the vocabulary and beyond it, and plain ones between them."""
    tokenizer.add_special_tokens(["<s>", AddedToken("<|end|>", rstrip=True)])
    tokenizer.add_tokens([AddedToken("<tool>", single_word=True), AddedToken("banana", normalized=True)])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(40)
    return tokenizer


TOKENIZERS = {
    "plain": make_bpe(),
    "additions": with_additions(make_bpe()),
    "unknown": with_additions(make_bpe(unk_token="<unk>", fuse_unk=True, byte_fallback=True)),
    "merges left out": make_bpe(ignore_merges=True),
    "dropout": make_bpe(dropout=0.0),
    "suffix": make_bpe(end_of_word_suffix="</w>"),
    "another kind": with_additions(Tokenizer(WordLevel({"<s>": 0, "an": 1}, unk_token="<s>"))),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_file_in_pieces_is_the_file_in_one(name: str) -> None:
    file = TOKENIZERS[name].to_str().encode()
    whole, (pieces, longest) = Tokenizer.from_buffer(file), read_tokenizer(file)
    assert longest == max(map(len, whole.get_vocab()))
    assert pieces.to_str() == whole.to_str()
    assert pieces.encode(TEXT).tokens == whole.encode(TEXT).tokens
    assert pieces.get_added_tokens_decoder().keys() == whole.get_added_tokens_decoder().keys()
    ids = whole.encode(TEXT).ids
    assert pieces.decode(ids, skip_special_tokens=False) == whole.decode(ids, skip_special_tokens=False)


def test_merges_as_texts_are_read_too() -> None:
    content = json.loads(TOKENIZERS["additions"].to_str())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    file = json.dumps(content).encode()
    assert read_tokenizer(file)[0].to_str() == Tokenizer.from_buffer(file).to_str()


@pytest.mark.parametrize("damage", ["cut", "merges", "pieces"])
def test_a_damaged_file_is_refused(damage: str) -> None:
    file = TOKENIZERS["plain"].to_str().encode()
    if damage == "cut":
        file = file[: len(file) // 2]
    elif damage == "merges":
        file = file.replace(b'["b"', b'["missing"', 1)
    else:
        file = b'{"version": "1.0"}'
    with pytest.raises(Exception, match=r"."):
        read_tokenizer(file)
