"""GGUF architectures that differ from Llama by norms, multipliers and partial rotations, as llama.cpp reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from dovetail.modelspec import ModelSpec, RopeSpec
from dovetail.store.gguf_rope import rope_from_metadata
from dovetail.store.gguf_shapes import ROPE_FACTORS, GgufModel, rotary_shape, windows
from dovetail.store.hf_families import NO_ROPE, REASONABLE

_SMOLLM3_PERIOD = 4  # llama.cpp knows no other


def _phi3(model: GgufModel) -> ModelSpec:
    shape = rotary_shape(model, turns_in_part=True)
    window = model.integer("attention.sliding_window", 0) if model.get("attention.sliding_window") else 0
    shape["qkv_bias"] = model.has("blk.0.attn_qkv.bias")
    return ModelSpec(
        family="phi3",
        **shape | {"rope": _longrope(model, shape["rope"], shape["context_length"])},
        windows=(window,) * shape["num_layers"] if window else (),
    )


def _longrope(model: GgufModel, rope: RopeSpec, context: int) -> RopeSpec:
    """The long factors where the context is longer than the original one, as for HF folders."""
    _, long, short = ROPE_FACTORS
    if long not in model.rope_factors or short not in model.rope_factors:
        return rope
    original = model.integer("rope.scaling.original_context_length", context)
    factor = context / original
    usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return msgspec.structs.replace(
        rope,
        kind="longrope",
        factors=tuple(model.rope_factors[long if context > original else short]),
        attention_factor=model.number("rope.scaling.attn_factor", usual),
    )


def _smollm3(model: GgufModel) -> ModelSpec:
    shape = rotary_shape(model)
    still = tuple(layer for layer in range(shape["num_layers"]) if (layer + 1) % _SMOLLM3_PERIOD == 0)
    return ModelSpec(family="smollm3", **shape, rope_local=NO_ROPE if still else None, rope_local_layers=still)


def _olmo2(model: GgufModel) -> ModelSpec:
    """OLMo 3 is filed under the same name, with windows."""
    pattern = model.get("attention.sliding_window_pattern")
    reach: dict[str, Any] = {}
    if model.get("attention.sliding_window") is not None:
        reach["windows"] = windows(model, default_window=4096, period=4 if pattern is None else pattern)
        local = rope_from_metadata(model.all, model.architecture, 10_000.0, local=True)
        theta = model.number("rope.freq_base", 10_000.0)
        reach["rope_local"] = msgspec.structs.replace(local, theta=model.number("rope.freq_base_swa", theta))
    return ModelSpec(
        family="olmo3" if reach else "olmo2",
        **rotary_shape(model),
        norm_in_float32=True,
        qk_norm=True,
        qk_norm_whole=True,
        pre_norm=False,
        sandwich_norm=True,
        **reach,
    )


def _granite(model: GgufModel) -> ModelSpec:
    """See `hf_families` for the residual multiplier."""
    shape, residual = rotary_shape(model), model.number("residual_scale", 1.0) or 1.0
    if not REASONABLE[0] <= residual <= REASONABLE[1]:
        raise model.all.damaged(f"{model.architecture}.residual_scale", "a number near 1")
    attention = model.number("attention.scale", 0.0)
    if model.get("rope.scaling.finetuned") is False:  # how a model without positions is written down
        shape["rope"] = NO_ROPE
    return ModelSpec(
        family="granite",
        **shape | {"norm_eps": shape["norm_eps"] / residual**2},
        embed_scale=(model.number("embedding_scale", 1.0) or 1.0) / residual,
        attention_scale=attention or None,
        logit_scale=1.0 / (model.number("logit_scale", 1.0) or 1.0),
    )


def _starcoder2(model: GgufModel) -> ModelSpec:
    return ModelSpec(
        family="starcoder2",
        **_layer_norms(model),
        activation="gelu_tanh",
        gated_mlp=False,
    )


def _glm4(model: GgufModel) -> ModelSpec:
    shape = rotary_shape(model, turns_in_part=True)
    shape["qkv_bias"] = shape["qkv_bias"] or model.has("blk.0.attn_qkv.bias")
    return ModelSpec(family="glm4", **shape, sandwich_norm=True, pairs_side_by_side=True)


def _command_r(model: GgufModel) -> ModelSpec:
    if model.has("blk.0.attn_q_norm.weight"):
        raise model.all.unsupported("blk.0.attn_q_norm.weight", "a norm of its own for each head")
    return ModelSpec(family="cohere", **_cohere(model))


def _cohere2(model: GgufModel) -> ModelSpec:
    shape = _cohere(model)
    return ModelSpec(
        family="cohere2",
        **shape | {"rope": NO_ROPE},
        rope_local=shape["rope"],
        windows=windows(model, default_window=4096, period=4),
    )


def _cohere(model: GgufModel) -> dict[str, Any]:
    return {
        **_layer_norms(model),
        "norm_bias": False,
        "parallel_block": True,
        "pairs_side_by_side": True,
        "logit_scale": model.number("logit_scale", 1.0) or 1.0,
    }


def _layer_norms(model: GgufModel) -> dict[str, Any]:
    return {
        **rotary_shape(model),
        "norm": "layer",
        "norm_eps": model.number("attention.layer_norm_epsilon", 1e-5),
    }


FAMILIES: dict[str, Callable[[GgufModel], ModelSpec]] = {
    "phi3": _phi3,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "granite": _granite,
    "starcoder2": _starcoder2,
    "glm4": _glm4,
    "command-r": _command_r,
    "cohere2": _cohere2,
}
