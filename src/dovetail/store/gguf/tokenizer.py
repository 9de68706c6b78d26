"""Builds a `tokenizers.Tokenizer` from the vocabulary in a GGUF file's metadata, so that the rest needs only a
tokenizer.json. Two kinds: byte-level BPE (`gpt2`) and SentencePiece BPE with byte fallback (`llama`).
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dovetail.errors import DamagedCheckpoint, UnsupportedModel
from dovetail.store.format.tokenizer_files import TokenFields
from dovetail.store.keys import Keys

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type

# Control tokens that end a turn, whatever the file calls its end token; llama.cpp has the same list.
_END_OF_TURN = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>"}
_END_OF_HARMONY = {"<|return|>", "<|call|>"}  # of gpt-oss, whose <|end|> ends a thought and not the turn

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _ENDINGS
    + r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _ENDINGS
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _ByteLevel(NamedTuple):
    """How text is cut before byte-level merging; None is GPT-2's own expression."""

    split: str | None = None
    single_digits: bool = False
    whole_words_first: bool = False  # a piece that is a token is taken whole, whatever the merges say
    nfc: bool = False
    adds_bos: bool = False  # where the file does not say


_LLAMA3 = _ByteLevel(_LLAMA3_SPLIT, whole_words_first=True, adds_bos=True)
_QWEN2 = _ByteLevel(_QWEN2_SPLIT, nfc=True)
_PRE_TOKENIZERS = {
    "default": _ByteLevel(),
    "gpt-2": _ByteLevel(),
    "smollm": _ByteLevel(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _ByteLevel(_O200K_SPLIT),  # gpt-oss
    "tekken": _ByteLevel(_TEKKEN_SPLIT, whole_words_first=True, adds_bos=True),
}


class Vocabulary:
    """The tokenizer's part of the metadata, checked."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.kind = keys.get("tokenizer.ggml.model")
        self.tokens: list[str] = keys.get("tokenizer.ggml.tokens") or []
        if not self.tokens:
            raise DamagedCheckpoint(f"{keys.origin}: tokenizer.ggml.tokens is missing")
        self.types: list[int] = keys.get("tokenizer.ggml.token_type") or [_NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise keys.damaged("tokenizer.ggml.token_type", f"{len(self.tokens)} entries")
        for name in ("bos", "eos", "eot", "eom", "unknown"):
            self.special(name)

    def special(self, name: str) -> int | None:
        """Token id kept under `tokenizer.ggml.<name>_token_id`."""
        key = f"tokenizer.ggml.{name}_token_id"
        token = self.keys.get(key)
        if token is None:
            return None
        if not isinstance(token, int) or not 0 <= token < len(self.tokens):
            raise self.keys.damaged(key, f"an id below {len(self.tokens)}")
        return token

    def text(self, name: str) -> str | None:
        token = self.special(name)
        return None if token is None else self.tokens[token]

    def flag(self, key: str, default: bool) -> bool:
        value = self.keys.get(f"tokenizer.ggml.{key}")
        return default if value is None else bool(value)

    @property
    def adds_bos(self) -> bool:
        by_kind = self.kind == "llama" or _pre_tokenizer(self).adds_bos
        return self.text("bos") is not None and self.flag("add_bos_token", by_kind)


def build_tokenizer(vocabulary: Vocabulary, architecture: str) -> Tokenizer:
    if vocabulary.kind == "gpt2":
        tokenizer = _byte_level(vocabulary)
    elif vocabulary.kind == "llama":
        tokenizer = _sentence_piece(vocabulary, is_gemma=architecture.startswith("gemma"))
    else:
        raise vocabulary.keys.unsupported("tokenizer.ggml.model", vocabulary.kind)
    _add_special_tokens(tokenizer, vocabulary)
    template = _template(vocabulary)
    if template is not None:
        tokenizer.post_processor = template
    return tokenizer


def token_fields(vocabulary: Vocabulary) -> TokenFields:
    ends = [vocabulary.special(name) for name in ("eos", "eot", "eom")]
    controls = {
        text: token
        for token, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == _CONTROL
    }
    is_harmony = controls.keys() >= _END_OF_HARMONY
    ending = _END_OF_HARMONY | _END_OF_TURN - {"<|end|>"} if is_harmony else _END_OF_TURN
    named = [token for text, token in controls.items() if text in ending]
    template = vocabulary.keys.get("tokenizer.chat_template")
    return TokenFields(
        chat_template=template if isinstance(template, str) else None,
        bos_token=vocabulary.text("bos"),
        eos_token=vocabulary.text("eos"),
        eos_token_ids=tuple(dict.fromkeys(token for token in [*ends, *named] if token is not None)),
        add_bos=vocabulary.adds_bos,
    )


def _pre_tokenizer(vocabulary: Vocabulary) -> _ByteLevel:
    name = vocabulary.keys.get("tokenizer.ggml.pre") or "default"
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise UnsupportedModel(
            f"{vocabulary.keys.origin}: tokenizer.ggml.pre {name!r} is not supported (known: {known})"
        )
    return _PRE_TOKENIZERS[name]


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    rules = _pre_tokenizer(vocabulary)
    vocab = {token: index for index, token in enumerate(vocabulary.tokens)}
    merges = _merges_in_file(vocabulary, vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rules.whole_words_first))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rules.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rules.split is not None:
        steps.append(pre_tokenizers.Split(Regex(rules.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if rules.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(vocabulary: Vocabulary, *, is_gemma: bool) -> Tokenizer:
    tokens = vocabulary.tokens
    if is_gemma:  # its files spell a run of spaces as spaces, and its scores are not the order of the merges
        tokens = ["▁" * len(token) if token and not token.strip(" ") else token for token in tokens]
        scores = [-float(index) for index in range(len(tokens))]
    else:
        scores = vocabulary.keys.get("tokenizer.ggml.scores") or []
        if len(scores) != len(tokens):
            raise vocabulary.keys.damaged("tokenizer.ggml.scores", f"{len(tokens)} entries")
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _merges_from_scores(tokens, vocabulary.types, scores, vocab)
    unknown = tokens[vocabulary.special("unknown") or 0]
    bpe = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    tokenizer = Tokenizer(bpe)
    prefix = vocabulary.flag("add_space_prefix", default=not is_gemma)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_in_file(vocabulary: Vocabulary, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for merge in vocabulary.keys.get("tokenizer.ggml.merges") or []:
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise DamagedCheckpoint(f"{vocabulary.keys.origin}: tokenizer.ggml.merges: {merge!r} names unknown tokens")
        merges.append((left, right))
    return merges


def _merges_from_scores(
    tokens: list[str], types: list[int], scores: list[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: any two tokens whose concatenation is a token merge, best score first. Among
    equals the longer left half comes first, as in transformers' conversion."""
    found: list[tuple[float, str, str]] = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind != _NORMAL:
            continue
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in halves if left in vocab and right in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found.extend((score, left, right) for left, right in known)
    found.sort(key=lambda item: (item[0], len(item[1]), len(item[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Control tokens never come from plain text and are hidden in decoded text; user-defined ones are only atomic."""
    typed = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text, kind in typed if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [
            AddedToken(text, normalized=False, special=False)
            for text, kind in typed
            if kind == _USER_DEFINED and tokenizer.token_to_id(text) is not None
        ]
    )


def _template(vocabulary: Vocabulary) -> processors.TemplateProcessing | None:
    bos = vocabulary.text("bos") if vocabulary.adds_bos else None
    eos = vocabulary.text("eos") if vocabulary.flag("add_eos_token", default=False) else None
    if bos is None and eos is None:
        return None
    special = [
        (text, token)
        for text, token in ((bos, vocabulary.special("bos")), (eos, vocabulary.special("eos")))
        if text is not None and token is not None
    ]
    single = [text for text in (bos, "$A", eos) if text is not None]
    return processors.TemplateProcessing(single=single, special_tokens=special)
