"""Text from tokens, a token at a time: never half a character, never the whole text decoded again.

A continuation keeps its leading space: the pieces of an answer, put behind the decoded prompt, read as the decoding of
prompt and answer together. Knows what tokens are, nothing of requests.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from dovetail.gateway.text.token_table import TokenTable
from dovetail.gateway.text.tokenizer_errors import tokenizer_call

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
_REPLACEMENT = "\ufffd"
# A character has at most four bytes, so a window that still ends in U+FFFD after more tokens holds invalid bytes.
_MAX_HELD_TOKENS = 4
_CONTEXT_TOKENS = 5  # of the prompt, enough for any decoder to know that it is not at the start of the text


class Detokenizer(Protocol):
    """One choice's text. Pieces may be empty; `flush` gives what was held back when no token follows."""

    def feed(self, token: int) -> str: ...

    def flush(self) -> str: ...


class Vocabulary:
    """What single tokens stand for. One per model, shared by its requests.

    In byte-level and byte-fallback vocabularies, which is what language models have, the text is the concatenation of
    the tokens' bytes, and decoding is a table and an incremental UTF-8 decoder. Others go through `WindowDetokenizer`.
    """

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self.special_ids = table.special_ids
        self._decoder = _Decoder.of(table)
        self._bytes: dict[int, bytes] = {}

    @property
    def concatenates(self) -> bool:
        """The text of a continuation is the concatenation of `token_bytes`."""
        return self._decoder.kind != "other"

    def token_bytes(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._compute_bytes(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """For logprobs: half a character shows as U+FFFD, `token_bytes` has the truth."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def detokenizer(
        self, prompt: Sequence[int], *, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """`shown`: special tokens that are text all the same."""
        hidden = self.special_ids - shown if skip_special_tokens else frozenset()
        if self.concatenates:
            return ByteDetokenizer(self, hidden)
        return WindowDetokenizer(self._table, prompt[-_CONTEXT_TOKENS:], skip_special_tokens and not shown)

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self._table.id_to_token(token_id)
        if token is None:  # a padding row of the embedding: the model may pick it, it stands for nothing
            return b""
        if self._decoder.kind == "other":
            with tokenizer_call("the tokenizer failed"):
                return self._table.decode([token_id], skip_special_tokens=False).encode()
        return self._decoder.token_bytes(token)


class ByteDetokenizer:
    """Feeds the tokens' bytes to an incremental UTF-8 decoder, which holds an unfinished character back and answers
    bytes that cannot become one with U+FFFD at once."""

    def __init__(self, vocabulary: Vocabulary, hidden: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        if token in self._hidden:
            return ""
        return self._utf8.decode(self._vocabulary.token_bytes(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For any decoder: decodes a short window twice, with and without what is new, and gives the difference.

    tokens   |...... emitted, forgotten ......|--- context ---|------ new ------|
                                              0             split            len(window)
    """

    def __init__(self, table: TokenTable, context: Sequence[int], skip_special_tokens: bool) -> None:
        self._table = table
        self._skip_special_tokens = skip_special_tokens
        self._window = list(context)
        self._split = len(self._window)

    def feed(self, token: int) -> str:
        self._window.append(token)
        whole = self._decode(self._window)
        if whole.endswith(_REPLACEMENT) and len(self._window) - self._split <= _MAX_HELD_TOKENS:
            return ""
        return self._emit(whole)

    def flush(self) -> str:
        return self._emit(self._decode(self._window)) if len(self._window) > self._split else ""

    def _emit(self, whole: str) -> str:
        known = self._decode(self._window[: self._split])
        new = whole[len(known) :]
        if new:
            del self._window[: self._split]
        else:  # hidden tokens: the old context still anchors the next piece
            del self._window[self._split :]
        self._split = len(self._window)
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        with tokenizer_call("the tokenizer failed"):
            return self._table.decode(tokens, skip_special_tokens=self._skip_special_tokens)


class _Decoder:
    """The decoder of a tokenizer.json as far as single tokens go: "byte_level", "byte_fallback" or "other"."""

    def __init__(self, kind: str, replacements: tuple[tuple[str, str], ...] = ()) -> None:
        self.kind = kind
        self._replacements = replacements

    @classmethod
    def of(cls, table: TokenTable) -> _Decoder:
        state: dict[str, Any] = json.loads(table.decoder) if table.decoder else {}
        parts = state.get("decoders", [state])
        kinds = [part.get("type") for part in parts]
        if kinds == ["ByteLevel"]:
            return cls("byte_level")
        # The Strip that may follow takes the space before the first word of a text; a continuation is not at the start.
        if [kind for kind in kinds if kind not in ("Replace", "Strip")] == ["ByteFallback", "Fuse"]:
            replaced = [(p["pattern"].get("String"), p["content"]) for p in parts if p["type"] == "Replace"]
            if all(pattern for pattern, _ in replaced):
                return cls("byte_fallback", tuple(replaced))
        return cls("other")

    def token_bytes(self, token: str) -> bytes:
        if self.kind == "byte_level":
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # an added token, written as it is
                return token.encode()
        match = _BYTE_TOKEN.match(token)
        if match:
            return bytes([int(match.group(1), 16)])
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map of bytes to printable characters, inverted: printable Latin-1 stands for itself, the rest follows
    from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _byte_level_alphabet()
