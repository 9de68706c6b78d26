"""Options of a request body that have no field: harmless ones are ignored, all others are a 400 that says so.

An option that changes the answer and is ignored is worse than an error: the caller believes that it took effect.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from dovetail.errors import InvalidRequest

# Who asks, what for, and hints that only save time: the answer is the same without them.
HARMLESS = frozenset(
    {
        "user", "metadata", "store", "safety_identifier", "request_id", "prediction",
        "prompt_cache_key", "prompt_cache_retention", "cache_prompt", "slot_id", "id_slot", "keep_alive",
        "guided_decoding_backend", "spaces_between_special_tokens", "mm_processor_kwargs",
    }
)  # fmt: skip

# Known elsewhere and not here -> the values with which they change nothing, and what to do instead.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_beam_search": ((), "sample with n or best_of"),
    "length_penalty": ((1, 1.0), "it belongs to beam search"),
    "early_stopping": ((), "it belongs to beam search"),
    "functions": ((), "use tools"),
    "function_call": (("none",), "use tool_choice"),
    "audio": ((), "models here speak text"),
    "modalities": ((["text"],), "models here speak text"),
    "web_search_options": ((), "give a search function in tools"),
    "verbosity": (("medium",), "say it in a message"),
    "chat_template": ((), "templates come with the model"),
    "logits_processors": (([],), "use logit_bias, bad_words or structured_outputs"),
    "logits_processor_pattern": ((), "use logit_bias, bad_words or structured_outputs"),
    "guided_whitespace_pattern": ((), "write it into structured_outputs.grammar"),
    "structural_tag": ((), "use structured_outputs.grammar"),
    "kv_transfer_params": ((), "blocks are moved by the server itself"),
    "vllm_xargs": (({},), "it has no meaning here"),
    "mirostat": ((0,), "use temperature, top_k, top_p or min_p"),
    "typical_p": ((1, 1.0), "use temperature, top_k, top_p or min_p"),
    "dry_multiplier": ((0, 0.0), "use repetition_penalty or frequency_penalty"),
    "prompt_embeds": ((), "send text or token ids"),
}


def check_options(extra: Mapping[str, Any], known: Collection[str]) -> None:
    """`extra`: what the body has beyond its `known` fields."""
    for name, value in extra.items():
        if name in HARMLESS or value is None:
            continue
        if name not in UNSUPPORTED:
            raise InvalidRequest(f"unknown option '{name[:100]}'{_near(name, known)}", param=name[:100])
        neutral, instead = UNSUPPORTED[name]
        if value is not False and value not in neutral:
            raise InvalidRequest(f"{name} is not supported: {instead}", param=name, code="unsupported_parameter")


def _near(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"; did you mean '{near[0]}'?" if near else ""
