"""Turns the `config.json` of a Hugging Face folder into a ModelSpec. Reads no weights.

A key that would change the result in a way the engine does not implement is refused by name: a model that runs but
answers differently from its reference is worse than one that does not run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from dovetail.errors import UnsupportedModel
from dovetail.modelspec import ModelSpec, MoeSpec
from dovetail.store.hf.defaults import DEFAULTS, SHARED_DEFAULTS
from dovetail.store.hf.encoders import ENCODERS
from dovetail.store.hf.families import FAMILIES
from dovetail.store.hf.rope import parse_rope, rope_from_config
from dovetail.store.hf.shapes import (
    activation,
    checked_moe,
    num_experts,
    num_layers,
    pattern_windows,
    qwen_windows,
    rotary_shape,
    same_window,
)
from dovetail.store.hf.sparse import FAMILIES as SPARSE_FAMILIES
from dovetail.store.keys import Keys, checked_spec
from dovetail.store.kin import nearest


def spec_from_config(config: Mapping[str, Any], origin: str = "config.json") -> ModelSpec:
    """The shape of the model that this config describes, or an error that names the key at fault."""
    model_type = str(config.get("model_type"))
    method = Keys(config, origin).mapping("quantization_config").get("quant_method", "unknown method")
    if config.get("quantization_config") is not None and (model_type, method) != ("gpt_oss", "mxfp4"):
        raise UnsupportedModel(f"{origin}: quantization_config ({method}) is not supported; use unquantised weights")
    if model_type == "gemma3" and isinstance(config.get("text_config"), dict):
        # The multimodal wrapper; its language model alone is served.
        outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config, model_type = config["text_config"] | outer, "gemma3_text"
    if model_type not in _BUILDERS:
        known, kin = ", ".join(sorted(_BUILDERS)), nearest(model_type, _BUILDERS)
        raise UnsupportedModel(
            f"{origin}: model_type {model_type!r} is not supported; the nearest that is: {kin!r} (known: {known})"
        )
    merged = SHARED_DEFAULTS | DEFAULTS[model_type] | dict(config)
    keys = Keys(merged, origin)
    keys.require("use_bidirectional_attention", False)
    return checked_spec(_BUILDERS[model_type](keys), origin)


def _llama(keys: Keys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    return ModelSpec(
        family="llama",
        **rotary_shape(keys),
        activation=activation(keys, "hidden_act"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        rope=rope_from_config(keys),
    )


def _mistral(keys: Keys) -> ModelSpec:
    return ModelSpec(
        family="mistral",
        **rotary_shape(keys),
        activation=activation(keys, "hidden_act"),
        rope=rope_from_config(keys),
        windows=same_window(keys),
    )


def _mixtral(keys: Keys) -> ModelSpec:
    moe = MoeSpec(
        num_experts=num_experts(keys),
        experts_per_token=keys.integer("num_experts_per_tok"),
        intermediate_size=keys.integer("intermediate_size"),
        normalize_weights=True,
    )
    return ModelSpec(
        family="mixtral",
        **rotary_shape(keys),
        activation=activation(keys, "hidden_act"),
        rope=rope_from_config(keys),
        windows=same_window(keys),
        moe=checked_moe(keys, moe),
    )


def _qwen2(keys: Keys) -> ModelSpec:
    return ModelSpec(
        family="qwen2",
        **rotary_shape(keys),
        activation=activation(keys, "hidden_act"),
        qkv_bias=True,
        rope=rope_from_config(keys),
        windows=qwen_windows(keys),
    )


def _qwen3(keys: Keys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    return ModelSpec(
        family="qwen3",
        **rotary_shape(keys),
        activation=activation(keys, "hidden_act"),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        rope=rope_from_config(keys),
        windows=qwen_windows(keys),
    )


def _qwen3_moe(keys: Keys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    moe = MoeSpec(
        num_experts=num_experts(keys),
        experts_per_token=keys.integer("num_experts_per_tok"),
        intermediate_size=keys.integer("moe_intermediate_size"),
        normalize_weights=keys.flag("norm_topk_prob"),
    )
    step, plain = keys.integer("decoder_sparse_step"), keys.sequence("mlp_only_layers")
    layers = range(num_layers(keys))
    return ModelSpec(
        family="qwen3_moe",
        **rotary_shape(keys),
        activation=activation(keys, "hidden_act"),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        rope=rope_from_config(keys),
        windows=same_window(keys) if keys.flag("use_sliding_window") else (),
        moe=checked_moe(keys, moe),
        dense_layers=tuple(layer for layer in layers if layer in plain or (layer + 1) % step != 0),
    )


def _gemma(keys: Keys) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    shape = rotary_shape(keys)
    bias = keys.flag("attention_bias")
    return {
        **shape,
        "norm_in_float32": True,
        "activation": activation(keys, "hidden_activation"),
        "qkv_bias": bias,
        "out_bias": bias,
        "sandwich_norm": True,
        "embed_scale": math.sqrt(shape["hidden_size"]),
        "attention_scale": keys.positive("query_pre_attn_scalar") ** -0.5,
        "final_softcap": keys.optional_number("final_logit_softcapping"),
    }


def _gemma2(keys: Keys) -> ModelSpec:
    return ModelSpec(
        family="gemma2",
        **_gemma(keys),
        attention_softcap=keys.optional_number("attn_logit_softcapping"),
        rope=rope_from_config(keys),
        windows=pattern_windows(keys, period=2),
    )


def _gemma3(keys: Keys) -> ModelSpec:
    keys.require("attn_logit_softcapping", None)  # transformers reads it and never applies it
    parameters = Keys(keys.mapping("rope_parameters"), f"{keys.origin}: rope_parameters")
    full = parameters.mapping("full_attention") or keys.mapping("rope_scaling")
    local = parameters.mapping("sliding_attention")
    pattern = "_sliding_window_pattern" if keys.get("_sliding_window_pattern") else "sliding_window_pattern"
    return ModelSpec(
        family="gemma3",
        **_gemma(keys),
        qk_norm=True,
        rope=parse_rope({"rope_theta": keys.get("rope_theta")} | full, keys),
        rope_local=parse_rope({"rope_theta": keys.get("rope_local_base_freq")} | local, keys),
        windows=pattern_windows(keys, keys.integer(pattern)),
    )


def _opt(keys: Keys) -> ModelSpec:
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    keys.require("word_embed_proj_dim", hidden)
    keys.require("do_layer_norm_before", True)
    keys.require("_remove_final_layer_norm", False)
    keys.require("layer_norm_elementwise_affine", True)
    bias = keys.flag("enable_bias")
    return ModelSpec(
        family="opt",
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers(keys),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=keys.integer("ffn_dim"),
        context_length=keys.integer("max_position_embeddings"),
        norm="layer",
        norm_eps=1e-5,  # torch's LayerNorm default; the config has no key for it
        activation=activation(keys, "activation_function"),
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        position_offset=2,
        tied_embeddings=keys.flag("tie_word_embeddings"),
    )


_BUILDERS: dict[str, Callable[[Keys], ModelSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "opt": _opt,
    **FAMILIES,
    **SPARSE_FAMILIES,
    **ENCODERS,
}
