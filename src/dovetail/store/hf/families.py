"""Readers of `config.json` for the families that differ from Llama by norms, multipliers and partial rotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.modelspec import ModelSpec, RopeSpec
from dovetail.store.hf.rope import parse_rope, rope_from_config
from dovetail.store.hf.shapes import (
    activation,
    num_layers,
    pattern_windows,
    rotary_shape,
    same_window,
)  # fmt: skip
from dovetail.store.keys import Keys

NO_ROPE = RopeSpec(kind="none")
REASONABLE = (1e-6, 1e6)  # multipliers whose square is a number too


def _phi3(keys: Keys) -> ModelSpec:
    """Phi-3, Phi-3.5 and Phi-4, but for the ones with experts or images."""
    keys.require("attention_bias", False)
    scaling = keys.mapping("rope_scaling") or keys.mapping("rope_parameters")
    kind = scaling.get("rope_type") or scaling.get("type")
    renamed = {"rope_parameters": scaling | {"rope_type": "longrope", "type": None}, "rope_scaling": None}
    keys = keys.with_changes(renamed) if kind in ("su", "yarn") else keys  # as its first files called it
    shape = rotary_shape(keys)
    return ModelSpec(
        family="phi3",
        **shape,
        activation=activation(keys, "hidden_act"),
        rope=rope_from_config(keys, shape["head_dim"]),
        windows=same_window(keys),
    )


def _smollm3(keys: Keys) -> ModelSpec:
    keys.require("use_sliding_window", False)
    layers, bias = num_layers(keys), keys.flag("attention_bias")
    period = keys.integer("no_rope_layer_interval")
    turns = keys.sequence("no_rope_layers") or [(layer + 1) % period != 0 for layer in range(layers)]  # 1: it does
    if len(turns) != layers:
        raise keys.damaged("no_rope_layers", f"{layers} entries")
    still = tuple(layer for layer in range(layers) if not turns[layer])
    return ModelSpec(
        family="smollm3",
        **rotary_shape(keys),
        activation=activation(keys, "hidden_act"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        rope=rope_from_config(keys),
        rope_local=NO_ROPE if still else None,
        rope_local_layers=still,
    )


def _olmo2(keys: Keys) -> ModelSpec:
    return ModelSpec(family="olmo2", **_olmo(keys), rope=rope_from_config(keys))


def _olmo3(keys: Keys) -> ModelSpec:
    """Layers with a window turn unscaled."""
    parameters = Keys(keys.mapping("rope_parameters"), f"{keys.origin}: rope_parameters")
    theta = {"rope_theta": keys.get("rope_theta")}
    full = parameters.mapping("full_attention") or keys.mapping("rope_scaling")
    return ModelSpec(
        family="olmo3",
        **_olmo(keys),
        rope=parse_rope(theta | full, keys),
        rope_local=parse_rope(theta | parameters.mapping("sliding_attention"), keys),
        windows=pattern_windows(keys, period=4),
    )


def _olmo(keys: Keys) -> dict[str, Any]:
    """Norms behind attention and the MLP instead of before, and over the whole of q and k."""
    bias = keys.flag("attention_bias")
    return {
        **rotary_shape(keys),
        "norm_in_float32": True,
        "activation": activation(keys, "hidden_act"),
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": True,
        "qk_norm_whole": True,
        "pre_norm": False,
        "sandwich_norm": True,
    }


def _granite(keys: Keys) -> ModelSpec:
    return ModelSpec(family="granite", **_multiplied(keys), mlp_bias=keys.flag("mlp_bias"), rope=rope_from_config(keys))


def _granite_hybrid(keys: Keys) -> ModelSpec:
    """Granite 4, where every layer has attention and a plain MLP (the one that its siblings with experts share)."""
    keys.require("num_local_experts", 0)
    mixers = [kind for kind in _layer_kinds(keys) if kind not in ("attention", "full_attention")]
    if mixers:
        raise keys.unsupported("layer_types", mixers[0])
    turns = keys.get("position_embedding_type") == "rope"
    shape = _multiplied(keys.with_changes({"intermediate_size": keys.get("shared_intermediate_size")}))
    return ModelSpec(family="granite_hybrid", **shape, rope=rope_from_config(keys) if turns else NO_ROPE)


def _layer_kinds(keys: Keys) -> list[Any]:
    given = keys.sequence("layer_types") or keys.sequence("layers_block_type")
    return given or ["mamba"] * num_layers(keys)  # which is what silence means


def _multiplied(keys: Keys) -> dict[str, Any]:
    """What attention and the MLP give is multiplied before it is added. The residual stream divided by that number has
    it added as it is; RMS norms see no difference but in their epsilon, which is divided by its square."""
    shape = rotary_shape(keys)
    bias, residual = keys.flag("attention_bias"), keys.positive("residual_multiplier")
    if not REASONABLE[0] <= residual <= REASONABLE[1]:
        raise keys.damaged("residual_multiplier", "a number near 1")
    return {
        **shape,
        "norm_eps": shape["norm_eps"] / residual**2,
        "activation": activation(keys, "hidden_act"),
        "qkv_bias": bias,
        "out_bias": bias,
        "embed_scale": keys.positive("embedding_multiplier") / residual,
        "attention_scale": keys.positive("attention_multiplier"),
        "logit_scale": 1.0 / keys.positive("logits_scaling"),
    }


def _starcoder2(keys: Keys) -> ModelSpec:
    bias = keys.flag("use_bias")
    return ModelSpec(
        family="starcoder2",
        **rotary_shape(keys) | {"norm_eps": keys.number("norm_epsilon")},
        norm="layer",
        activation=activation(keys, "hidden_act"),
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        rope=rope_from_config(keys),
        windows=same_window(keys),
    )


def _glm(keys: Keys) -> ModelSpec:
    return ModelSpec(family="glm", **_glm_shape(keys))


def _glm4(keys: Keys) -> ModelSpec:
    return ModelSpec(family="glm4", **_glm_shape(keys), sandwich_norm=True)


def _glm_shape(keys: Keys) -> dict[str, Any]:
    shape = rotary_shape(keys)
    return {
        **shape,
        "activation": activation(keys, "hidden_act"),
        "qkv_bias": keys.flag("attention_bias"),
        "rope": rope_from_config(keys, shape["head_dim"]),
        "pairs_side_by_side": True,
    }


def _cohere(keys: Keys) -> ModelSpec:
    keys.require("use_qk_norm", False)
    return ModelSpec(family="cohere", **_cohere_shape(keys), rope=rope_from_config(keys))


def _cohere2(keys: Keys) -> ModelSpec:
    """Only layers with a window turn."""
    pattern = "_sliding_window_pattern" if keys.get("_sliding_window_pattern") else "sliding_window_pattern"
    return ModelSpec(
        family="cohere2",
        **_cohere_shape(keys),
        rope=NO_ROPE,
        rope_local=rope_from_config(keys),
        windows=pattern_windows(keys, keys.integer(pattern)),
    )


def _cohere_shape(keys: Keys) -> dict[str, Any]:
    bias = keys.flag("attention_bias")
    return {
        **rotary_shape(keys) | {"norm_eps": keys.number("layer_norm_eps")},
        "norm": "layer",
        "norm_bias": False,
        "activation": activation(keys, "hidden_act"),
        "qkv_bias": bias,
        "out_bias": bias,
        "parallel_block": True,
        "pairs_side_by_side": True,
        "logit_scale": keys.positive("logit_scale"),
    }


FAMILIES: dict[str, Callable[[Keys], ModelSpec]] = {
    "phi3": _phi3,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "granite": _granite,
    "granitemoehybrid": _granite_hybrid,
    "starcoder2": _starcoder2,
    "glm": _glm,
    "glm4": _glm4,
    "cohere": _cohere,
    "cohere2": _cohere2,
}
