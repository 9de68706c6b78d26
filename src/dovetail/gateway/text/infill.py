"""Fill in the middle: a prompt of what stands before and after the gap, by the marks that code models know."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.errors import InvalidRequest
from dovetail.gateway.text.token_table import TokenTable

# Marks before the text that precedes the gap, before the text that follows it, and where the answer goes.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")  # Codestral


def infill_prompt(table: TokenTable, before: Sequence[int], after: Sequence[int], model: str) -> list[int]:
    """`before` and `after` without special tokens."""
    for names in _MARKS:
        prefix, suffix, middle = (table.token_to_id(name) for name in names)
        if prefix is not None and suffix is not None and middle is not None:
            return [prefix, *before, suffix, *after, middle]
    suffix, prefix = (table.token_to_id(name) for name in _SUFFIX_FIRST)
    if suffix is not None and prefix is not None:
        return [suffix, *after, prefix, *before]
    raise InvalidRequest(
        f"suffix: the model '{model}' has no tokens for filling in the middle",
        param="suffix",
        code="unsupported_parameter",
    )
