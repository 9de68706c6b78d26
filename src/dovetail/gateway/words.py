"""Text and tokens of a model: tokenizer and vocabulary, made once for all models that have the same tokenizer file.

Reading one takes a tenth of a second and more, which is most of a cold start; fine-tunes of one base share theirs.
"""

from __future__ import annotations

import hashlib
import threading
from weakref import WeakValueDictionary

from dovetail.gateway.detokenizer import Vocabulary
from dovetail.gateway.tokenizer_file import read_tokenizer


class Words:
    def __init__(self, file: bytes) -> None:
        """Raises ValueError."""
        # No token stands for more characters, so that a text of more than this times the context cannot fit.
        tokenizer, self.max_token_chars = read_tokenizer(file)
        # Files of trained models may carry both; a server must see every token and add none.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer)


_known: WeakValueDictionary[bytes, Words] = WeakValueDictionary()  # by digest; gone with the last model that uses it
_lock = threading.Lock()


def words_of(file: bytes, wanted_digest: str = "") -> Words:
    """Called from several threads. Raises ValueError."""
    digest = hashlib.sha256(file).digest()
    if wanted_digest and digest.hex() != wanted_digest:
        raise ValueError("its checksum does not match: the file was altered or is damaged")
    with _lock:  # who comes second waits for the first rather than do the same
        words = _known.get(digest)
        if words is None:
            words = _known[digest] = Words(file)
        return words
