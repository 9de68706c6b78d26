"""A tokenizer file, read in pieces: `tokenizers` keeps the interpreter to itself from its first byte to its last, which
beside other clients is too long for a vocabulary of fifty thousand tokens. What comes of it is the same to the byte.
"""

from __future__ import annotations

import time
from itertools import groupby
from typing import Any, Literal, TypeVar

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

_LARGE_BYTES = 256 * 1024  # smaller ones are read in a few hundredths of a second
# Between two pieces: who answers others lets the interpreter go at every read and write of a socket, and would wait for
# the next piece at each of them.
_PAUSE_S = 0.01


Piece = TypeVar("Piece")


class _Bpe(msgspec.Struct, forbid_unknown_fields=True):
    """The model of most files. Files before 2024 have merges as texts, and are read in one piece."""

    type: Literal["BPE"]
    vocab: msgspec.Raw
    merges: msgspec.Raw
    dropout: float | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False

    def build(self, vocab: dict[str, int], merges: list[tuple[str, str]]) -> BPE:
        options = {name: getattr(self, name) for name in self.__struct_fields__[3:]}
        return BPE(vocab, merges, **{name: value for name, value in options.items() if value is not None})


class _Added(msgspec.Struct, forbid_unknown_fields=True):
    id: int  # follows from the order
    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool

    def build(self) -> AddedToken:
        flags: dict[str, Any] = {name: getattr(self, name) for name in self.__struct_fields__[2:]}
        return AddedToken(self.content, **flags)


def read_tokenizer(file: bytes) -> tuple[Tokenizer, int]:
    """And how many characters its longest token has. Raises ValueError, or what `tokenizers` raises."""
    if len(file) <= _LARGE_BYTES:
        return _in_one_piece(file)
    try:
        parts = msgspec.json.decode(file, type=dict[str, msgspec.Raw])
        model = msgspec.json.decode(parts["model"], type=_Bpe)
        vocab = _piece(model.vocab, dict[str, int])
        merges = _piece(model.merges, list[tuple[str, str]])
        added = msgspec.json.decode(parts["added_tokens"], type=list[_Added])
    except (msgspec.MsgspecError, KeyError):  # of another kind, or no tokenizer at all, of which that has more to say
        return _in_one_piece(file)
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    tokenizer = Tokenizer.from_buffer(msgspec.json.encode(parts | {"model": empty, "added_tokens": []}))
    tokenizer.model = model.build(vocab, merges)
    time.sleep(_PAUSE_S)
    for is_special, tokens in groupby(added, key=lambda one: one.special):
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        add([one.build() for one in tokens])
    return tokenizer, max(map(len, (*vocab, *(one.content for one in added))), default=1)


def _piece(raw: msgspec.Raw, kind: type[Piece]) -> Piece:
    found = msgspec.json.decode(raw, type=kind)
    time.sleep(_PAUSE_S)
    return found


def _in_one_piece(file: bytes) -> tuple[Tokenizer, int]:
    tokenizer = Tokenizer.from_buffer(file)
    return tokenizer, _longest(tokenizer)


def _longest(tokenizer: Tokenizer) -> int:
    """One token after the other: `get_vocab` keeps the interpreter to itself for as long as it takes to copy all."""
    count, found = tokenizer.get_vocab_size(), 0
    longest = 1
    for token in map(tokenizer.id_to_token, range(count)):
        if token is not None:
            found += 1
            longest = max(longest, len(token))
    return longest if found == count else max(longest, *map(len, tokenizer.get_vocab()))  # numbers with gaps
