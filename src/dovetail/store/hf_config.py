"""Turns the `config.json` of a Hugging Face folder into a ModelSpec. Reads no weights.

A key that would change the result in a way the engine does not implement is refused by name: a model that runs but
answers differently from its reference is worse than one that does not run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from dovetail.errors import UnsupportedModel
from dovetail.modelspec import ModelSpec, MoeSpec
from dovetail.store.hf_defaults import DEFAULTS, SHARED_DEFAULTS
from dovetail.store.hf_rope import parse_rope, rope_from_config
from dovetail.store.keys import MANY, Keys, checked_spec

Activation = Literal["silu", "gelu_tanh", "gelu", "relu"]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}


def spec_from_config(config: Mapping[str, Any], origin: str = "config.json") -> ModelSpec:
    """The shape of the model that this config describes, or an error that names the key at fault."""
    model_type = str(config.get("model_type"))
    if config.get("quantization_config") is not None:
        method = Keys(config, origin).mapping("quantization_config").get("quant_method", "unknown method")
        raise UnsupportedModel(f"{origin}: quantization_config ({method}) is not supported; use unquantised weights")
    if model_type == "gemma3" and isinstance(config.get("text_config"), dict):
        # The multimodal wrapper; its language model alone is served.
        outer = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config, model_type = config["text_config"] | outer, "gemma3_text"
    if model_type not in _BUILDERS:
        known = ", ".join(sorted(_BUILDERS))
        raise UnsupportedModel(f"{origin}: model_type {model_type!r} is not supported (known: {known})")
    merged = SHARED_DEFAULTS | DEFAULTS[model_type] | dict(config)
    keys = Keys(merged, origin)
    keys.require("use_bidirectional_attention", False)
    return checked_spec(_BUILDERS[model_type](keys), origin)


def _shape(keys: Keys) -> dict[str, Any]:
    """What every rotary family has."""
    heads, hidden = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    kv_heads = heads if keys.get("num_key_value_heads") is None else keys.integer("num_key_value_heads")
    if heads % kv_heads != 0:
        raise keys.damaged("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    head_dim = hidden // heads if keys.get("head_dim") is None else keys.integer("head_dim")
    if head_dim % 2 != 0:
        raise UnsupportedModel(f"{keys.origin}: head_dim = {head_dim} is odd; rotary positions need pairs")
    return {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": hidden,
        "num_layers": _num_layers(keys),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": keys.integer("intermediate_size"),
        "context_length": keys.integer("max_position_embeddings"),
        "norm_eps": keys.number("rms_norm_eps"),
        "tied_embeddings": keys.flag("tie_word_embeddings"),
    }


def _llama(keys: Keys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    return ModelSpec(
        family="llama",
        **_shape(keys),
        activation=_activation(keys, "hidden_act"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
        rope=rope_from_config(keys),
    )


def _mistral(keys: Keys) -> ModelSpec:
    return ModelSpec(
        family="mistral",
        **_shape(keys),
        activation=_activation(keys, "hidden_act"),
        rope=rope_from_config(keys),
        windows=_same_window(keys),
    )


def _mixtral(keys: Keys) -> ModelSpec:
    moe = MoeSpec(
        num_experts=_num_experts(keys),
        experts_per_token=keys.integer("num_experts_per_tok"),
        intermediate_size=keys.integer("intermediate_size"),
        normalize_weights=True,
    )
    return ModelSpec(
        family="mixtral",
        **_shape(keys),
        activation=_activation(keys, "hidden_act"),
        rope=rope_from_config(keys),
        windows=_same_window(keys),
        moe=_checked_moe(keys, moe),
    )


def _qwen2(keys: Keys) -> ModelSpec:
    return ModelSpec(
        family="qwen2",
        **_shape(keys),
        activation=_activation(keys, "hidden_act"),
        qkv_bias=True,
        rope=rope_from_config(keys),
        windows=_qwen_windows(keys),
    )


def _qwen3(keys: Keys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    return ModelSpec(
        family="qwen3",
        **_shape(keys),
        activation=_activation(keys, "hidden_act"),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        rope=rope_from_config(keys),
        windows=_qwen_windows(keys),
    )


def _qwen3_moe(keys: Keys) -> ModelSpec:
    bias = keys.flag("attention_bias")
    moe = MoeSpec(
        num_experts=_num_experts(keys),
        experts_per_token=keys.integer("num_experts_per_tok"),
        intermediate_size=keys.integer("moe_intermediate_size"),
        normalize_weights=keys.flag("norm_topk_prob"),
    )
    step, plain = keys.integer("decoder_sparse_step"), keys.sequence("mlp_only_layers")
    layers = range(_num_layers(keys))
    return ModelSpec(
        family="qwen3_moe",
        **_shape(keys),
        activation=_activation(keys, "hidden_act"),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        rope=rope_from_config(keys),
        windows=_same_window(keys) if keys.flag("use_sliding_window") else (),
        moe=_checked_moe(keys, moe),
        dense_layers=tuple(layer for layer in layers if layer in plain or (layer + 1) % step != 0),
    )


def _gemma(keys: Keys) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    shape = _shape(keys)
    bias = keys.flag("attention_bias")
    return {
        **shape,
        "norm_in_float32": True,
        "activation": _activation(keys, "hidden_activation"),
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
        windows=_pattern_windows(keys, period=2),
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
        windows=_pattern_windows(keys, keys.integer(pattern)),
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
        num_layers=_num_layers(keys),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=keys.integer("ffn_dim"),
        context_length=keys.integer("max_position_embeddings"),
        norm="layer",
        norm_eps=1e-5,  # torch's LayerNorm default; the config has no key for it
        activation=_activation(keys, "activation_function"),
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
}


def _activation(keys: Keys, key: str) -> Activation:
    name = keys.get(key)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise keys.unsupported(key, name)
    return ACTIVATIONS[name]


def _num_layers(keys: Keys) -> int:
    return keys.integer("num_hidden_layers", at_most=MANY)


def _num_experts(keys: Keys) -> int:
    """Files of before and after transformers 5 disagree on the name; the one in the file wins over the default."""
    key = "num_local_experts" if keys.get("num_local_experts") is not None else "num_experts"
    return keys.integer(key, at_most=MANY)


def _checked_moe(keys: Keys, moe: MoeSpec) -> MoeSpec:
    if moe.experts_per_token > moe.num_experts:
        raise keys.damaged("num_experts_per_tok", f"at most {moe.num_experts}")
    return moe


def _same_window(keys: Keys) -> tuple[int, ...]:
    if keys.get("sliding_window") is None:
        return ()
    return (keys.integer("sliding_window"),) * _num_layers(keys)


def _qwen_windows(keys: Keys) -> tuple[int, ...]:
    if not keys.flag("use_sliding_window") or keys.get("sliding_window") is None:
        return ()
    layers = range(_num_layers(keys))
    first = 0 if keys.get("max_window_layers") == 0 else keys.integer("max_window_layers")  # 0: every layer has one
    types = keys.sequence("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in layers
    ]
    return _windows_of_types(keys, types)


def _pattern_windows(keys: Keys, period: int) -> tuple[int, ...]:
    """Every `period`-th layer sees everything, the others a window."""
    layers = range(_num_layers(keys))
    types = keys.sequence("layer_types") or [
        "sliding_attention" if (layer + 1) % period else "full_attention" for layer in layers
    ]
    return _windows_of_types(keys, types)


def _windows_of_types(keys: Keys, types: list[str]) -> tuple[int, ...]:
    if len(types) != _num_layers(keys):
        raise keys.damaged("layer_types", f"{_num_layers(keys)} entries")
    unknown = [kind for kind in types if kind not in ("sliding_attention", "full_attention")]
    if unknown:
        raise keys.unsupported("layer_types", unknown[0])
    window = keys.integer("sliding_window") if "sliding_attention" in types else 0
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
