"""llguidance by its C interface, whose calls leave the interpreter to other threads. The class of its Python package
holds it while a tokenizer is read: 0.4 s for 49,152 tokens, in which a worker would produce no token.

Text that a grammar forces may be spelt in any tokens here; the Python class allows the tokenizer's own only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

_INIT_BYTES = 1024  # for an LlgConstraintInit, to which later versions may add fields
_ERROR_BYTES = 1024
_GUIDANCE = b"guidance"
_KNOWN = "1.9."  # versions whose structures these are


class Unsupported(Exception):
    """This tokenizer, or this build of llguidance, is one for the Python class."""


class _TokenizerInit(ctypes.Structure):
    """LlgTokenizerInitV2: the library reads `struct_size` bytes of it, so that later versions may be longer."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", ctypes.c_void_p),
        ("token_bytes", ctypes.c_void_p),
        ("tokenizer_json", ctypes.c_char_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", ctypes.c_void_p),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", ctypes.c_void_p),
        ("slices", ctypes.c_void_p),
        ("tok_eos_extra", ctypes.c_void_p),
        ("tok_eos_extra_count", ctypes.c_uint32),
    )


class _ConstraintInit(ctypes.Structure):
    """The head of LlgConstraintInit; what follows are limits, which have their defaults."""

    _fields_ = (
        ("tokenizer", ctypes.c_void_p),
        ("log_buffer_level", ctypes.c_uint32),
        ("log_stderr_level", ctypes.c_uint32),
    )


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llg_new_tokenizer_v2": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]),
    "llg_free_tokenizer": (None, [ctypes.c_void_p]),
    "llg_constraint_init_set_defaults": (None, [ctypes.c_void_p, ctypes.c_void_p]),
    "llg_new_matcher": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p]),
    "llg_clone_matcher": (ctypes.c_void_p, [ctypes.c_void_p]),
    "llg_free_matcher": (None, [ctypes.c_void_p]),
    "llg_matcher_get_mask_byte_size": (ctypes.c_size_t, [ctypes.c_void_p]),
    "llg_matcher_compute_mask_into": (ctypes.c_int32, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]),
    "llg_matcher_consume_token": (ctypes.c_int32, [ctypes.c_void_p, ctypes.c_uint32]),
    "llg_matcher_consume_tokens": (ctypes.c_int32, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]),
    "llg_matcher_is_stopped": (ctypes.c_bool, [ctypes.c_void_p]),
    "llg_matcher_is_error": (ctypes.c_bool, [ctypes.c_void_p]),
    "llg_matcher_get_error": (ctypes.c_char_p, [ctypes.c_void_p]),
}


@cache
def _library() -> ctypes.CDLL:
    from llguidance import _lib

    if not version("llguidance").startswith(_KNOWN):
        raise Unsupported(f"llguidance {version('llguidance')} may have other structures")
    try:
        library = ctypes.CDLL(_lib.__file__)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise Unsupported(str(error)) from error
    return library


class Tokenizer:
    """The tokens of one model. Raises Unsupported for what the C interface cannot read."""

    def __init__(self, file: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._handle: int | None = None
        self._library = _library()
        if not eos_token_ids:
            raise Unsupported("the end of a text has to be known")
        self.eos_token_ids = tuple(eos_token_ids)
        first, *further = eos_token_ids
        extra = (ctypes.c_uint32 * len(further))(*further)
        init = _TokenizerInit(ctypes.sizeof(_TokenizerInit), vocab_size, first)
        init.tokenizer_json = Path(file).read_bytes()
        init.use_approximate_greedy_tokenize_fn = True
        if further:
            init.tok_eos_extra, init.tok_eos_extra_count = ctypes.addressof(extra), len(further)
        problem = ctypes.create_string_buffer(_ERROR_BYTES)
        self._handle = self._library.llg_new_tokenizer_v2(ctypes.byref(init), problem, _ERROR_BYTES)
        if not self._handle:
            raise Unsupported(problem.value.decode(errors="replace"))
        if Matcher(self, "start: /a/").num_mask_bytes != (vocab_size + 31) // 32 * 4:
            raise Unsupported("the tokenizer has more tokens than the model")

    def new_matcher(self, text: str) -> int:
        """The handle of a matcher, the caller's to free."""
        data = text.encode()
        if b"\0" in data:
            raise ValueError("a grammar has no zero bytes")
        room = ctypes.create_string_buffer(_INIT_BYTES)
        self._library.llg_constraint_init_set_defaults(room, self._handle)
        _ConstraintInit.from_buffer(room).log_stderr_level = 0
        return int(self._library.llg_new_matcher(room, _GUIDANCE, data))

    def __del__(self) -> None:
        if self._handle:
            self._library.llg_free_tokenizer(self._handle)


class Matcher:
    """A text of a grammar, with what may follow; methods as of `llguidance.LLMatcher`. One thread at a time."""

    def __init__(self, tokenizer: Tokenizer, text: str = "", *, handle: int | None = None) -> None:
        self._handle: int | None = None
        self._library = _library()
        self._tokenizer = tokenizer  # to be freed after this
        self._handle = tokenizer.new_matcher(text) if handle is None else handle

    @property
    def num_mask_bytes(self) -> int:
        return int(self._library.llg_matcher_get_mask_byte_size(self._handle))

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        self._library.llg_matcher_compute_mask_into(self._handle, pointer, num_bytes)

    def consume_token(self, token: int) -> bool:
        if token in self._tokenizer.eos_token_ids and self.is_stopped():
            return True
        return bool(self._library.llg_matcher_consume_token(self._handle, token) == 0)

    def consume_tokens(self, tokens: Sequence[int]) -> bool:
        array = (ctypes.c_uint32 * len(tokens))(*tokens)
        return bool(self._library.llg_matcher_consume_tokens(self._handle, array, len(tokens)) == 0)

    def is_stopped(self) -> bool:
        return bool(self._library.llg_matcher_is_stopped(self._handle))

    def is_error(self) -> bool:
        return bool(self._library.llg_matcher_is_error(self._handle))

    def get_error(self) -> str:
        return (self._library.llg_matcher_get_error(self._handle) or b"").decode(errors="replace")

    def deep_copy(self) -> Matcher:
        return Matcher(self._tokenizer, handle=int(self._library.llg_clone_matcher(self._handle)))

    def __del__(self) -> None:
        if self._handle:
            self._library.llg_free_matcher(self._handle)
