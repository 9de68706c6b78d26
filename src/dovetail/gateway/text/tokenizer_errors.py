"""Calls into the tokenizers library: whatever it raises over a model's file becomes an error of ours.

It has no error type of its own (a plain Exception), and a panic of its Rust code is not even an Exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dovetail.errors import EngineFailed


@contextmanager
def tokenizer_call(what: str = "") -> Iterator[None]:
    """`what`: before what it says."""
    before = f"{what}: " if what else ""
    try:
        yield
    except Exception as error:
        raise EngineFailed(f"{before}{_line(error)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise EngineFailed(f"{before}{_line(error)}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
