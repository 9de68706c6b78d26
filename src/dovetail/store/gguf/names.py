"""How llama.cpp names the tensors behind each canonical one, and which of them have their rows in another order."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from dovetail.modelspec import ModelSpec, rotary_order
from dovetail.store.hf.transforms import latent_orders


class Part(NamedTuple):
    tensor: str
    shape: tuple[int, ...]  # of the whole tensor in the file
    expert: int | None = None  # of a stack of experts or heads, only this one
    order: tuple[int, ...] = ()  # of the rows of each head, by their places in the file; empty = as they are
    first: int = 0  # of a fused tensor, from this row on
    rows: int | None = None  # so many of them; None = all

    @property
    def piece_shape(self) -> tuple[int, ...]:
        shape = self.shape if self.expert is None else self.shape[1:]
        return shape if self.rows is None else (self.rows, *shape[1:])


# Architectures whose files keep the two rows of a rotary pair side by side.
_SIDE_BY_SIDE = ("llama", "smollm3", "granite", "glm4", "command-r", "cohere2")
_FUSED_GATE_UP = ("phi3", "glm4")  # under the name of `up`

_TOP = {"embed": "token_embd", "final_norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "attn_norm": "attn_norm",
    "out": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attn_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "up": "ffn_up",
    "down": "ffn_down",
    "post_mlp_norm": "post_ffw_norm",
    "router": "ffn_gate_inp",
    "sinks": "attn_sinks",
    "kv_norm": "attn_kv_a_norm",
    "k_up": "attn_k_b",
    "v_up": "attn_v_b",
    "shared.down": "ffn_down_shexp",
}


def gguf_parts(spec: ModelSpec, architecture: str, name: str, shape: tuple[int, ...]) -> list[tuple[Part, ...]]:
    """The ways in which files keep the canonical tensor `name`, newest first."""
    if not name.startswith("layers."):
        module, kind = name.split(".")
        return [(Part(f"{_TOP[module]}.{kind}", shape),)]
    _, layer, part = name.split(".", 2)
    prefix = f"blk.{layer}."
    module, kind = part.rsplit(".", 1)
    if module.startswith("experts."):
        return _expert_parts(spec, prefix, module, kind)
    if module == "qkv" and spec.mla is not None:
        return [_latent_parts(spec, prefix)]
    if module == "qkv":
        return _qkv_parts(spec, architecture, prefix, kind, shape)
    if module == "gate_up" and architecture in _FUSED_GATE_UP:
        return [(Part(f"{prefix}ffn_up.{kind}", shape),)]
    if module == "gate_up":
        half = (spec.intermediate_size, *shape[1:])
        return [tuple(Part(f"{prefix}{part}.{kind}", half) for part in ("ffn_gate", "ffn_up"))]
    if module == "shared.gate_up":
        half = (shape[0] // 2, *shape[1:])
        return [tuple(Part(f"{prefix}{part}.{kind}", half) for part in ("ffn_gate_shexp", "ffn_up_shexp"))]
    if module in ("k_up", "v_up"):
        return [tuple(Part(f"{prefix}{_LAYER[module]}.weight", shape, expert=head) for head in range(shape[0]))]
    if module == "mlp_norm" and architecture == "gpt-oss":
        return [(Part(f"{prefix}post_attention_norm.{kind}", shape),)]
    return [(Part(f"{prefix}{_LAYER[module]}.{kind}", shape),)]


def _latent_parts(spec: ModelSpec, prefix: str) -> tuple[Part, ...]:
    assert spec.mla is not None
    query, latent = latent_orders(spec.mla)
    queries = (spec.num_heads * len(query), spec.hidden_size)
    first = Part(f"{prefix}attn_q.weight", queries, order=query)
    return first, Part(f"{prefix}attn_kv_a_mqa.weight", (len(latent), spec.hidden_size), order=latent)


def _qkv_parts(
    spec: ModelSpec, architecture: str, prefix: str, kind: str, shape: tuple[int, ...]
) -> list[tuple[Part, ...]]:
    """One matrix each, or (Phi-3, and GLM-4 as some convert it) one for all."""
    in_file = msgspec.structs.replace(spec, pairs_side_by_side=architecture in _SIDE_BY_SIDE)
    turned = rotary_order(in_file) or ()
    sizes = {"attn_q": (spec.q_size, turned), "attn_k": (spec.kv_size, turned), "attn_v": (spec.kv_size, ())}
    apart = tuple(Part(f"{prefix}{part}.{kind}", (rows, *shape[1:]), order=o) for part, (rows, o) in sizes.items())
    fused, first = [], 0
    for rows, order in sizes.values():
        fused.append(Part(f"{prefix}attn_qkv.{kind}", shape, order=order, first=first, rows=rows))
        first += rows
    return [apart, tuple(fused)]


def _expert_parts(spec: ModelSpec, prefix: str, module: str, kind: str) -> list[tuple[Part, ...]]:
    """One stack per projection, or (files of before 2024) one matrix per expert and projection."""
    assert spec.moe is not None
    inner, hidden, experts = spec.moe.intermediate_size, spec.hidden_size, spec.moe.num_experts
    is_down = module == "experts.down"
    each: tuple[int, ...] = (hidden, inner) if is_down else (inner, hidden)
    names = ("ffn_down",) if is_down else ("ffn_gate", "ffn_up")
    order = [(expert, name) for expert in range(experts) for name in names]
    each = each if kind == "weight" else each[:1]
    stacked = tuple(Part(f"{prefix}{name}_exps.{kind}", (experts, *each), expert=expert) for expert, name in order)
    separate = tuple(Part(f"{prefix}{name}.{expert}.{kind}", each) for expert, name in order)
    return [stacked, separate]
