"""GGUF architectures that differ from Llama by norms, multipliers and partial rotations, as llama.cpp reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from dovetail.modelspec import MlaSpec, ModelSpec, MoeSpec, RopeSpec
from dovetail.store.gguf.rope import rope_from_metadata
from dovetail.store.gguf.shapes import ROPE_FACTORS, GgufModel, rotary_shape, windows
from dovetail.store.hf.families import NO_ROPE, REASONABLE

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
    """See `hf.families` for the residual multiplier."""
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


def _gpt_oss(model: GgufModel) -> ModelSpec:
    """Alpha and limit of its gates are not in the metadata, nor is it said that its YaRN rounds no dimension."""
    shape = rotary_shape(model)
    moe = MoeSpec(
        num_experts=model.integer("expert_count"),
        experts_per_token=model.integer("expert_used_count"),
        intermediate_size=model.integer("expert_feed_forward_length"),
        normalize_weights=True,
        biases=True,
        alpha=1.702,
        limit=7.0,
    )
    return ModelSpec(
        family="gpt_oss",
        **shape | {"rope": msgspec.structs.replace(shape["rope"], truncate=False)},
        norm_in_float32=True,
        attention_sinks=True,
        windows=windows(model, default_window=128, period=2),
        moe=moe,
    )


def _deepseek2(model: GgufModel) -> ModelSpec:
    """DeepSeek-V2-Lite and its kin. Files of before 2025 keep what makes keys and values of a latent in one matrix,
    which would have to be unpacked to be transposed."""
    if not model.has("blk.0.attn_k_b.weight"):
        raise model.all.unsupported("blk.0.attn_kv_b.weight", "an old form of this architecture; convert it again")
    if model.get("attention.q_lora_rank") is not None:
        raise model.all.unsupported(f"{model.architecture}.attention.q_lora_rank", model.get("attention.q_lora_rank"))
    if model.whole("expert_gating_func") not in (0, 1):  # unsaid, or a softmax
        raise model.all.unsupported(f"{model.architecture}.expert_gating_func", model.get("expert_gating_func"))
    if model.integer("expert_group_count", 1) != 1:
        raise model.all.unsupported(f"{model.architecture}.expert_group_count", model.get("expert_group_count"))
    rope, rank = model.integer("rope.dimension_count"), model.integer("attention.kv_lora_rank")
    query, value = model.integer("attention.key_length_mla"), model.integer("attention.value_length_mla")
    layers = model.integer("block_count")
    eps = model.number("attention.layer_norm_rms_epsilon", 1e-6)
    turning, growth = _deepseek_rope(model)
    return ModelSpec(
        family="deepseek_v2",
        vocab_size=model.vocab_size,
        hidden_size=model.integer("embedding_length"),
        num_layers=layers,
        num_heads=model.integer("attention.head_count"),
        num_kv_heads=1,
        head_dim=rank + rope,
        intermediate_size=model.integer("feed_forward_length"),
        context_length=model.integer("context_length"),
        norm_eps=eps,
        mla=MlaSpec(rank=rank, rope=rope, nope=query - rope, value=value, norm_eps=eps),
        rope=turning,
        attention_scale=query**-0.5 * growth * growth,
        tied_embeddings=not model.has("output.weight"),
        moe=_deepseek_experts(model),
        dense_layers=tuple(range(min(model.whole("leading_dense_block_count"), layers))),
    )


def _deepseek_experts(model: GgufModel) -> MoeSpec:
    inner = model.integer("expert_feed_forward_length")
    return MoeSpec(
        num_experts=model.integer("expert_count"),
        experts_per_token=model.integer("expert_used_count"),
        intermediate_size=inner,
        normalize_weights=bool(model.get("expert_weights_norm")),
        shared_size=inner * model.integer("expert_shared_count", 1),
        scale=model.number("expert_weights_scale", 1.0) or 1.0,
    )


def _deepseek_rope(model: GgufModel) -> tuple[RopeSpec, float]:
    """YaRN does not scale what turns, but sharpens all scores by the square of the second."""
    rope = rope_from_metadata(model.all, model.architecture, 10_000.0)
    if rope.kind != "yarn":
        return rope, 1.0
    growth = 1.0 + model.number("rope.scaling.yarn_log_multiplier", 0.0) * math.log(max(rope.factor, 1.0))
    return msgspec.structs.replace(rope, attention_factor=1.0), growth


FAMILIES: dict[str, Callable[[GgufModel], ModelSpec]] = {
    "phi3": _phi3,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "granite": _granite,
    "starcoder2": _starcoder2,
    "glm4": _glm4,
    "command-r": _command_r,
    "cohere2": _cohere2,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
}
