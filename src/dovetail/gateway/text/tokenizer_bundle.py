"""Text and tokens of a model: its tokenizer and vocabulary, made once for all models that have the same tokenizer file.

The tokenizer is in a process of its own, see `tokenizer_child`; what tokens stand for is here. Reading a file takes a
tenth of a second and more, which is most of a cold start; fine-tunes of one base share theirs.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from dovetail.gateway.text.detokenizer import Vocabulary
from dovetail.gateway.text.fair_executor import SHORT_SIZE
from dovetail.gateway.text.token_table import TokenTable
from dovetail.gateway.text.tokenizer_child import (
    LONG,
    QUICK,
    SHORT,
    DecodeTokens,
    EncodePair,
    EncodeTexts,
    TokenizerAnswer,
    TokenizerOrder,
)
from dovetail.gateway.text.tokenizer_process import TokenizerLost, TokenizerProcess

QUICK_SIZE = 4096  # characters, or tokens: a few milliseconds
_TEXT_SIZE = 32  # of an empty text
_CHANCES = 2  # processes that a call may end before it is refused


def text_size(texts: Sequence[str]) -> int:
    return sum(map(len, texts)) + _TEXT_SIZE * (len(texts) - 1)


class TokenizerBundle:
    def __init__(self, path: Path, file: bytes, digest: str) -> None:
        """`file`: what `path` has, of that digest. Blocks while it is read. Raises ValueError, TokenizerLost."""
        self._path = path
        self._digest = digest
        self._lock = threading.Lock()  # of the process
        self._process = TokenizerProcess(file)
        self.vocabulary = Vocabulary(self.table)

    @property
    def table(self) -> TokenTable:
        return self._process.table

    @property
    def pid(self) -> int:
        return self._process.pid

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Raises ValueError for what `tokenizers` says against them, TokenizerLost."""
        answer = await self._call(EncodeTexts(list(texts), add_special_tokens), text_size(texts))
        return answer.tokens

    async def encode_pair(self, first: str, second: str) -> list[int]:
        return (await self._call(EncodePair(first, second), len(first) + len(second))).tokens[0]

    async def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Short ones by the table, which takes less than to ask for it."""
        if len(tokens) <= QUICK_SIZE:
            return self.table.decode(tokens, skip_special_tokens=skip_special_tokens)
        return (await self._call(DecodeTokens(list(tokens), skip_special_tokens), len(tokens))).text

    async def _call(self, order: TokenizerOrder, size: int) -> TokenizerAnswer:
        kind = QUICK if size <= QUICK_SIZE else SHORT if size <= SHORT_SIZE else LONG
        chances = _CHANCES
        while True:
            process = self._process
            try:
                answer = await process.call(order, kind)
            except TokenizerLost as lost:
                chances -= lost.is_suspect
                if not chances or lost.took_long:
                    raise
                await asyncio.to_thread(self._replace, process)
                continue
            if answer.problem:
                raise ValueError(answer.problem)
            return answer

    def _replace(self, lost: TokenizerProcess) -> None:
        """Raises OSError, ValueError, TokenizerLost."""
        with self._lock:
            if self._process is lost:
                self._process = TokenizerProcess(_read(self._path, self._digest)[0])


# By digest; gone with the last model that uses it.
_known: WeakValueDictionary[str, TokenizerBundle] = WeakValueDictionary()
_locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()  # likewise, while somebody opens it


def open_tokenizer(path: Path, wanted_digest: str = "") -> TokenizerBundle:
    """Called from several threads. Raises OSError, ValueError, TokenizerLost."""
    file, digest = _read(path, wanted_digest)
    lock = threading.Lock()
    with _locks.setdefault(digest, lock):  # who comes second waits for the first rather than do the same
        bundle = _known.get(digest)
        if bundle is None:
            bundle = _known[digest] = TokenizerBundle(path, file, digest)
        return bundle


def _read(path: Path, wanted_digest: str) -> tuple[bytes, str]:
    if not path.is_file():  # opening a FIFO would wait for a writer
        raise ValueError(f"{path}: {'not a regular file' if path.exists() else 'missing'}")
    file = path.read_bytes()
    digest = hashlib.sha256(file).hexdigest()
    if wanted_digest and digest != wanted_digest:
        raise ValueError("its checksum does not match: the file was altered or is damaged")
    return file, digest
