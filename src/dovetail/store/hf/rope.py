"""The rotary settings of a `config.json`, in the spelling of transformers 4 and of transformers 5, as a RopeSpec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from dovetail.modelspec import RopeSpec
from dovetail.store.keys import Keys


def rope_from_config(keys: Keys, head_dim: int | None = None) -> RopeSpec:
    """`rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5). With `head_dim`, of a
    family whose heads may turn in part only."""
    values = keys.mapping("rope_scaling") or keys.mapping("rope_parameters")
    if any(isinstance(value, dict) for value in values.values()):
        raise keys.unsupported("rope_parameters", "one per layer type")
    theta = 10_000.0 if keys.get("rope_theta") is None else keys.number("rope_theta")
    outer = {name: keys.get(name) for name in ("partial_rotary_factor",) if keys.get(name) is not None}
    merged = {"rope_theta": theta} | outer | values
    if head_dim is None:
        return parse_rope(merged, keys)
    share = Keys({"partial_rotary_factor": 1.0} | merged, f"{keys.origin}: rope").positive("partial_rotary_factor")
    dims = int(head_dim * share)
    if share > 1.0 or dims < 2 or dims % 2:
        raise keys.unsupported("partial_rotary_factor", share)
    rope = parse_rope(merged | {"partial_rotary_factor": None}, keys)
    return rope if dims == head_dim else msgspec.structs.replace(rope, rotary_dims=dims)


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
    if kind == "longrope":
        return _parse_longrope(rope, theta, context, keys)
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


def _parse_longrope(rope: Keys, theta: float, context: int, keys: Keys) -> RopeSpec:
    """transformers changes from the short to the long factors when a sequence outgrows the original context, and makes
    its keys anew. Keys that many requests share have one rotation: the one of the context that is served."""
    longest = keys.integer("max_position_embeddings")
    factor = rope.positive("factor") if rope.get("factor") is not None else longest / context
    usual = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 and context > 1 else 1.0
    key = "long_factor" if longest > context else "short_factor"
    factors = rope.sequence(key)
    if not factors or not all(isinstance(each, int | float) and each > 0 for each in factors):
        raise rope.damaged(key, "a list of numbers above 0")
    return RopeSpec(
        theta=theta,
        kind="longrope",
        factors=tuple(float(each) for each in factors),
        attention_factor=usual if rope.get("attention_factor") is None else rope.number("attention_factor"),
    )


def _yarn_attention_factor(rope: Keys, factor: float) -> float | None:
    """None leaves the usual rule to the engine; DeepSeek's two extra keys only count when both are there."""
    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if not (rope.get("mscale") and rope.get("mscale_all_dim")):
        return None
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    return (growth * rope.number("mscale") + 1.0) / (growth * rope.number("mscale_all_dim") + 1.0)
