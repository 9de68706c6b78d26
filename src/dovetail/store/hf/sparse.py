"""Readers of `config.json` for families of experts that differ from Llama in attention too: gpt-oss and DeepSeek-V2."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dovetail.modelspec import MlaSpec, ModelSpec, MoeSpec
from dovetail.store.hf.rope import rope_from_config
from dovetail.store.hf.shapes import (
    activation,
    checked_moe,
    num_experts,
    num_layers,
    pattern_windows,
    rotary_shape,
)  # fmt: skip
from dovetail.store.keys import MANY, Keys

_GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_GPT_OSS_ROPE = {"rope_parameters": _GPT_OSS_YARN | {"original_max_position_embeddings": 4096}}


def _gpt_oss(keys: Keys) -> ModelSpec:
    """The weights of the best experts are a softmax over their scores alone: the same as those of all, made to sum to
    1."""
    if not (keys.mapping("rope_scaling") or keys.mapping("rope_parameters")):
        keys = keys.with_changes(_GPT_OSS_ROPE)  # which is what silence means
    bias = keys.flag("attention_bias")
    moe = MoeSpec(
        num_experts=num_experts(keys),
        experts_per_token=keys.integer("num_experts_per_tok"),
        intermediate_size=keys.integer("intermediate_size"),
        normalize_weights=True,
        biases=True,
        alpha=keys.positive("swiglu_alpha"),
        limit=keys.positive("swiglu_limit"),
    )
    return ModelSpec(
        family="gpt_oss",
        **rotary_shape(keys),
        norm_in_float32=True,
        activation=activation(keys, "hidden_act"),
        qkv_bias=bias,
        out_bias=bias,
        attention_sinks=True,
        rope=rope_from_config(keys),
        windows=pattern_windows(keys, period=2),
        moe=checked_moe(keys, moe),
    )


def _deepseek_v2(keys: Keys) -> ModelSpec:
    """DeepSeek-V2-Lite and its kin; the large one makes its queries of a latent too."""
    for key, wanted in (("q_lora_rank", None), ("attention_bias", False), ("mlp_bias", False)):
        keys.require(key, wanted)
    keys.require("scoring_func", "softmax")
    keys.require("moe_layer_freq", 1)
    mla = MlaSpec(
        rank=keys.integer("kv_lora_rank"),
        rope=keys.integer("qk_rope_head_dim"),
        nope=keys.integer("qk_nope_head_dim"),
        value=keys.integer("v_head_dim"),
    )
    own = {"num_kv_heads": 1, "head_dim": mla.rank + mla.rope}
    dense = min(keys.whole("first_k_dense_replace"), num_layers(keys))
    return ModelSpec(
        family="deepseek_v2",
        **rotary_shape(keys.with_changes({"head_dim": 2})) | own,
        activation=activation(keys, "hidden_act"),
        mla=mla,
        rope=rope_from_config(keys.with_changes({"head_dim": mla.rope})),
        attention_scale=_scale(keys, mla),
        moe=checked_moe(keys, _deepseek_experts(keys)),
        dense_layers=tuple(range(dense)),
    )


def _deepseek_experts(keys: Keys) -> MoeSpec:
    """Weights that sum to 1 are not multiplied by the author, but are by others: refused unless it is the same."""
    inner, normalize = keys.integer("moe_intermediate_size"), keys.flag("norm_topk_prob")
    if normalize:
        keys.require("routed_scaling_factor", 1.0)
    return MoeSpec(
        num_experts=keys.integer("n_routed_experts", at_most=MANY),
        experts_per_token=keys.integer("num_experts_per_tok"),
        intermediate_size=inner,
        normalize_weights=normalize,
        shared_size=inner * keys.integer("n_shared_experts", at_most=MANY),
        scale=keys.positive("routed_scaling_factor"),
        **_groups(keys),
    )


def _groups(keys: Keys) -> dict[str, Any]:
    method = keys.get("topk_method")
    if method == "greedy":
        return {}
    if method != "group_limited_greedy":
        raise keys.unsupported("topk_method", method)
    return {"groups": keys.integer("n_group"), "groups_per_token": keys.integer("topk_group")}


def _scale(keys: Keys, mla: MlaSpec) -> float:
    """YaRN sharpens the scores by more than its rotation, where `mscale_all_dim` says so."""
    plain = float((mla.nope + mla.rope) ** -0.5)
    values = keys.mapping("rope_scaling") or keys.mapping("rope_parameters")
    rope = Keys(values, f"{keys.origin}: rope")
    if not rope.get("mscale_all_dim") or (values.get("rope_type") or values.get("type") or "default") == "default":
        return plain
    factor = rope.positive("factor")
    growth = 0.1 * rope.number("mscale_all_dim") * math.log(factor) + 1.0 if factor > 1 else 1.0
    return plain * growth * growth


FAMILIES: dict[str, Callable[[Keys], ModelSpec]] = {"gpt_oss": _gpt_oss, "deepseek_v2": _deepseek_v2}
