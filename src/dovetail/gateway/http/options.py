"""Options of a request body that have no field: harmless ones are ignored, all others are a 400 that says so. What a
caller may have expected something of is named in the answer's `warnings` and in the log.

An option that changes the answer and is ignored is worse than an error: the caller believes that it took effect.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from dovetail.errors import InvalidRequest
from dovetail.gateway.http.sampling import neutral_values

# Who asks, what for, and hints that only save time: the answer is the same without them.
HARMLESS = frozenset(
    {
        "user", "metadata", "store", "safety_identifier", "request_id", "prediction",
        "prompt_cache_key", "prompt_cache_retention", "cache_prompt", "slot_id", "id_slot", "keep_alive",
        "guided_decoding_backend", "spaces_between_special_tokens", "mm_processor_kwargs",
    }
)  # fmt: skip

# What gateways and user interfaces send along, of routing, caches of other servers, and how an answer is shown.
IGNORED = frozenset(
    {
        "cache_control", "client_metadata", "context_management", "include_usage", "plugins", "preset", "provider",
        "route", "session_id", "trace", "transforms", "usage", "verbosity",
    }
)  # fmt: skip

# Known elsewhere and not here -> the values with which they change nothing, and what to do instead.
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "early_stopping": ((), "a beam search ends when nothing better can come"),
    "functions": ((), "use tools"),
    "function_call": (("none",), "use tool_choice"),
    "audio": ((), "models here speak text"),
    "modalities": ((["text"],), "models here speak text"),
    "web_search_options": ((), "give a search function in tools"),
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


# With beam search, which ranks texts by the model's own probabilities when they are whole -> neutral values.
_NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    **neutral_values(), "stream": (), "stop": ([],), "logit_bias": ({},),
    "allowed_token_ids": (), "bad_words": ([],), "logprob_token_ids": ([],), "guided_json": (), "guided_regex": (),
    "guided_grammar": (), "guided_choice": (), "structured_outputs": (), "response_format": (),
    "tools": ([],), "thinking_token_budget": (),
}  # fmt: skip
MAX_BEAMS = 32


def check_beams(body: Any) -> None:
    """What is asked for beside a beam search can be had with one."""
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1):
            raise InvalidRequest("length_penalty needs use_beam_search to be true", param="length_penalty")
        return
    for name, neutral in _NOT_WITH_BEAMS.items():
        value = getattr(body, name, None)
        if value is not None and value is not False and value not in neutral:
            raise InvalidRequest(f"{name} and use_beam_search exclude each other", param=name)
    if body.num_choices > MAX_BEAMS:
        raise InvalidRequest(f"a beam search has at most {MAX_BEAMS} beams", param="n")


def check_options(extra: Mapping[str, Any], known: Collection[str]) -> None:
    """`extra`: what the body has beyond its `known` fields."""
    for name, value in extra.items():
        if name in HARMLESS or name in IGNORED or value is None:
            continue
        if name not in UNSUPPORTED:
            raise InvalidRequest(f"unknown option '{name[:100]}'{_near(name, known)}", param=name[:100])
        neutral, instead = UNSUPPORTED[name]
        if value is not False and value not in neutral:
            raise InvalidRequest(f"{name} is not supported: {instead}", param=name, code="unsupported_parameter")


def check_known(extra: Mapping[str, Any], known: Collection[str]) -> None:
    """For APIs whose clients grow options from week to week: what is not known is left out, unless it looks like a
    known one misspelt."""
    for name, value in extra.items():
        near = _near(name, known, 0.9) if value is not None else ""
        if near:
            raise InvalidRequest(f"unknown option '{name[:100]}'{near}", param=name[:100])


def ignored_options(extra: Mapping[str, Any]) -> tuple[str, ...]:
    """What the answer says of those that change nothing."""
    return tuple(
        f"{name} changes nothing here and was ignored" for name in sorted(IGNORED & extra.keys()) if extra[name]
    )


def _near(name: str, known: Collection[str], cutoff: float = 0.8) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean '{near[0]}'?" if near else ""
