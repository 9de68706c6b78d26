"""How transformers names the pieces of each canonical tensor, per family. Names only; reads no files.

Names come without the prefix (`model.`, `model.decoder.`, `language_model.model.`…) under which a file keeps them.
"""

from __future__ import annotations

from typing import NamedTuple

from dovetail.modelspec import ModelSpec

PREFIXES = ("model.", "model.language_model.", "language_model.model.", "model.decoder.", "decoder.", "")
LM_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
EMBEDDING = "embed_tokens.weight"


class Piece(NamedTuple):
    name: str
    shape: tuple[int, ...]


_TOP = {"embed": "embed_tokens", "positions": "embed_positions", "final_norm": "norm"}
_TOP_OPT = _TOP | {"final_norm": "final_layer_norm"}

_LAYER = {
    "attn_norm": "input_layernorm",
    "out": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "down": "mlp.down_proj",
}
_LAYER_GEMMA = _LAYER | {
    "post_attn_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
_LAYER_OLMO = _LAYER | {
    "post_attn_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
_LAYER_GLM4 = _LAYER | {
    "post_attn_norm": "post_self_attn_layernorm",
    "post_mlp_norm": "post_mlp_layernorm",
}
_LAYER_OPT = {
    "attn_norm": "self_attn_layer_norm",
    "out": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "up": "fc1",
    "down": "fc2",
}
_LAYERS = {
    "gemma2": _LAYER_GEMMA,
    "gemma3": _LAYER_GEMMA,
    "olmo2": _LAYER_OLMO,
    "olmo3": _LAYER_OLMO,
    "glm4": _LAYER_GLM4,
    "starcoder2": _LAYER | {"up": "mlp.c_fc", "down": "mlp.c_proj"},
    "granite_hybrid": _LAYER | {"down": "shared_mlp.output_linear"},
    "deepseek_v2": _LAYER | {"kv_norm": "self_attn.kv_a_layernorm"},
    "opt": _LAYER_OPT,
}
# Families whose files keep q, k and v, or gate and up, in one tensor.
_FUSED = {
    "phi3": {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
    "glm": {"gate_up": "mlp.gate_up_proj"},
    "glm4": {"gate_up": "mlp.gate_up_proj"},
    "granite_hybrid": {"gate_up": "shared_mlp.input_linear"},
}

# Where the experts live in a layer, and what an expert calls its gate, up and down matrix.
_EXPERTS = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "deepseek_v2": ("mlp", "gate_proj", "up_proj", "down_proj"),
}


def hf_pieces(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> list[tuple[Piece, ...]]:
    """The ways in which files keep the canonical tensor `name`, likeliest first; lm_head is found elsewhere."""
    if not name.startswith("layers."):
        module, kind = name.split(".")
        top = _TOP_OPT if spec.family == "opt" else _TOP
        return [(Piece(f"{top[module]}.{kind}", shape),)]
    _, layer, part = name.split(".", 2)
    prefix = f"layers.{layer}."
    module, kind = part.rsplit(".", 1)
    if spec.family == "gpt_oss" and (module in ("router", "sinks") or module.startswith("experts.")):
        return _gpt_oss_pieces(spec, prefix, part, shape)
    if module == "router" or module.startswith("experts."):
        return _expert_pieces(spec, prefix, module, shape)
    if spec.mla is not None and module in ("qkv", "k_up", "v_up"):
        return [_latent_pieces(spec, prefix, module)]
    if (fused := _FUSED.get(spec.family, {}).get(module)) is not None:
        return [(Piece(f"{prefix}{fused}.{kind}", shape),)]
    if module == "qkv":
        sizes = {"q_proj": spec.q_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
        return [tuple(Piece(f"{prefix}self_attn.{part}.{kind}", (rows, *shape[1:])) for part, rows in sizes.items())]
    if module in ("gate_up", "shared.gate_up"):
        rows, home = shape[0] // 2, "mlp" if module == "gate_up" else "mlp.shared_experts"
        return [tuple(Piece(f"{prefix}{home}.{part}.{kind}", (rows, *shape[1:])) for part in ("gate_proj", "up_proj"))]
    if module == "shared.down":
        return [(Piece(f"{prefix}mlp.shared_experts.down_proj.{kind}", shape),)]
    return [(Piece(f"{prefix}{_LAYERS.get(spec.family, _LAYER)[module]}.{kind}", shape),)]


def _expert_pieces(spec: ModelSpec, prefix: str, module: str, shape: tuple[int, ...]) -> list[tuple[Piece, ...]]:
    """One matrix per expert and projection, as files have them, or the fused form of transformers 5 in memory."""
    assert spec.moe is not None
    block, gate, up, down = _EXPERTS[spec.family]
    if module == "router":
        return [(Piece(f"{prefix}{home}.gate.weight", shape),) for home in dict.fromkeys((block, "mlp"))]
    inner, hidden = spec.moe.intermediate_size, spec.hidden_size
    is_down = module == "experts.down"
    parts, fused = ([down], "down_proj") if is_down else ([gate, up], "gate_up_proj")
    each = (hidden, inner) if is_down else (inner, hidden)
    separate = tuple(
        Piece(f"{prefix}{block}.experts.{expert}.{part}.weight", each)
        for expert in range(spec.moe.num_experts)
        for part in parts
    )
    return [separate, (Piece(f"{prefix}mlp.experts.{fused}", shape),)]


def _gpt_oss_pieces(spec: ModelSpec, prefix: str, part: str, shape: tuple[int, ...]) -> list[tuple[Piece, ...]]:
    """Experts as blocks of MXFP4 with their scales, or as floats [experts, in, out]."""
    assert spec.moe is not None
    module, kind = part.rsplit(".", 1)
    if module == "sinks":
        return [(Piece(f"{prefix}self_attn.sinks", shape),)]
    if module == "router":
        return [(Piece(f"{prefix}mlp.router.{kind}", shape),)]
    name = f"{prefix}mlp.experts.{module.removeprefix('experts.')}_proj"
    experts = spec.moe.num_experts
    if kind == "bias":
        return [(Piece(f"{name}_bias", (experts, shape[0] // experts)),)]
    _, rows, columns = shape
    groups = (experts, rows, columns // 32)
    coded = (Piece(f"{name}_blocks", (*groups, 16)), Piece(f"{name}_scales", groups))
    return [coded, (Piece(name, (experts, columns, rows)),)]


def _latent_pieces(spec: ModelSpec, prefix: str, module: str) -> tuple[Piece, ...]:
    mla, heads = spec.mla, spec.num_heads
    assert mla is not None
    if module != "qkv":
        return (Piece(f"{prefix}self_attn.kv_b_proj.weight", (heads * (mla.nope + mla.value), mla.rank)),)
    queries = Piece(f"{prefix}self_attn.q_proj.weight", (heads * (mla.nope + mla.rope), spec.hidden_size))
    latents = Piece(f"{prefix}self_attn.kv_a_proj_with_mqa.weight", (mla.rank + mla.rope, spec.hidden_size))
    return queries, latents
