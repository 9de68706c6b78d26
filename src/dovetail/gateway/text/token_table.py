"""What a tokenizer's tokens are, without the tokenizer: all that text from tokens takes, in a form that is read in no
time. The process that has read the tokenizer's file makes it; encoding stays there.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Final, Literal

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import Decoder

_UNSIGNED: Final[Literal["I"]] = "I"  # of `array`: four bytes wherever Python runs
_NOTHING = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}}


class TokenTable(msgspec.Struct, frozen=True, dict=True):
    """
    text      |first token|second|    …    |last|          UTF-8, in the order of their numbers
    starts    0           .      .              .  end     one more than there are tokens
    numbers   of each of them; empty = 0, 1, 2, …
    """

    kind: str  # of the tokenizer's model: BPE, Unigram, WordPiece, WordLevel
    vocab_size: int
    max_token_chars: int  # no token stands for more, so that a text of more than this times the context cannot fit
    decoder: str  # as JSON; empty = none, tokens stand with a space between them
    added: dict[int, str]  # tokens put into or beside the model's vocabulary
    special_ids: frozenset[int]
    text: bytes
    starts: bytes
    numbers: bytes

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenTable:
        count = tokenizer.get_vocab_size()
        numbers: Sequence[int] = range(count)
        tokens = [token for token in map(tokenizer.id_to_token, numbers) if token is not None]
        if len(tokens) < count:  # numbers with gaps
            numbers = sorted(set(tokenizer.get_vocab().values()))
            tokens = [tokenizer.id_to_token(number) or "" for number in numbers]
        encoded = [token.encode() for token in tokens]
        added = tokenizer.get_added_tokens_decoder()
        return cls(
            kind=type(tokenizer.model).__name__,
            vocab_size=count,
            max_token_chars=max(map(len, tokens), default=1) or 1,
            decoder=tokenizer.decoder.__getstate__().decode() if tokenizer.decoder is not None else "",
            added={number: token.content for number, token in added.items()},
            special_ids=frozenset(number for number, token in added.items() if token.special),
            text=b"".join(encoded),
            starts=array(_UNSIGNED, accumulate(map(len, encoded), initial=0)).tobytes(),
            numbers=b"" if isinstance(numbers, range) else array(_UNSIGNED, numbers).tobytes(),
        )

    @property
    def digest(self) -> bytes:
        """The same for those whose tokens mean the same."""
        return hashlib.sha256(b"".join((self.numbers, self.starts, self.text))).digest()

    def id_to_token(self, token_id: int) -> str | None:
        """None: a padding row of the embedding, which the model may pick."""
        place = token_id if self._numbers is None else bisect_left(self._numbers, token_id)
        if not 0 <= place < len(self._starts) - 1 or (self._numbers is not None and self._numbers[place] != token_id):
            return None
        return self.text[self._starts[place] : self._starts[place + 1]].decode()

    def token_to_id(self, token: str) -> int | None:
        """A search, as long as a tenth of a millisecond: for marks, not for texts."""
        wanted = token.encode(errors="replace")
        at = self.text.find(wanted)
        while wanted and at >= 0:
            place = bisect_left(self._starts, at)
            if self._starts[place] == at and self._starts[place + 1] == at + len(wanted):
                return place if self._numbers is None else self._numbers[place]
            at = self.text.find(wanted, at + 1)
        return None

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """As the tokenizer itself. Raises what `tokenizers` raises."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        found = (self.id_to_token(token) for token in tokens if token not in hidden)
        known = [token for token in found if token is not None]
        return " ".join(known) if self._decoder is None else self._decoder.decode(known)

    @cached_property
    def _starts(self) -> memoryview[int]:
        return memoryview(self.starts).cast(_UNSIGNED)

    @cached_property
    def _numbers(self) -> memoryview[int] | None:
        return memoryview(self.numbers).cast(_UNSIGNED) if self.numbers else None

    @cached_property
    def _decoder(self) -> Decoder | None:
        """In the interpreter of whoever asks: a few lines of JSON, not the vocabulary."""
        if not self.decoder:
            return None
        parts = _NOTHING | {"decoder": msgspec.Raw(self.decoder.encode())}
        decoder: Decoder = Tokenizer.from_buffer(msgspec.json.encode(parts)).decoder
        return decoder
