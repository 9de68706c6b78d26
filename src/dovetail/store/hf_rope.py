"""The rotary settings of a `config.json`, in the spelling of transformers 4 and of transformers 5, as a RopeSpec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dovetail.modelspec import RopeSpec
from dovetail.store.keys import Keys


def rope_from_config(keys: Keys) -> RopeSpec:
    """`rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5)."""
    values = keys.mapping("rope_scaling") or keys.mapping("rope_parameters")
    if any(isinstance(value, dict) for value in values.values()):
        raise keys.unsupported("rope_parameters", "one per layer type")
    theta = 10_000.0 if keys.get("rope_theta") is None else keys.number("rope_theta")
    outer = {name: keys.get(name) for name in ("partial_rotary_factor",) if keys.get(name) is not None}
    return parse_rope({"rope_theta": theta} | outer | values, keys)


def parse_rope(values: Mapping[str, Any], keys: Keys) -> RopeSpec:
    rope = Keys({key: value for key, value in values.items() if value is not None}, f"{keys.origin}: rope")
    rope.require("partial_rotary_factor", 1.0)
    kind = values.get("rope_type") or values.get("type") or "default"
    theta = rope.positive("rope_theta")
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, kind="linear", factor=rope.positive("factor"))
    context = _original_context(rope, keys)
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            kind="llama3",
            factor=rope.positive("factor"),
            original_context=context,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    if kind == "yarn":
        return _parse_yarn(rope, theta, context, keys)
    raise rope.unsupported("rope_type", kind)


def _original_context(rope: Keys, keys: Keys) -> int:
    """Of the rotary settings, else of the config, else the context itself."""
    name = "original_max_position_embeddings"
    if rope.get(name) is not None:
        return rope.integer(name)
    return keys.integer(name if keys.get(name) is not None else "max_position_embeddings")


def _parse_yarn(rope: Keys, theta: float, context: int, keys: Keys) -> RopeSpec:
    given = rope.get("factor") is not None
    factor = rope.positive("factor") if given else keys.integer("max_position_embeddings") / context
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=context,
        beta_fast=rope.number("beta_fast") if rope.get("beta_fast") else 32.0,
        beta_slow=rope.number("beta_slow") if rope.get("beta_slow") else 1.0,
        attention_factor=_yarn_attention_factor(rope, factor),
        truncate=rope.get("truncate") is not False,
    )


def _yarn_attention_factor(rope: Keys, factor: float) -> float | None:
    """None leaves the usual rule to the engine; DeepSeek's two extra keys only count when both are there."""
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return None
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    return (growth * rope.number("mscale") + 1.0) / (growth * rope.number("mscale_all_dim") + 1.0)
