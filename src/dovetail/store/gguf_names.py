"""How llama.cpp names the tensors behind each canonical one, and which of them have their rows in another order."""

from __future__ import annotations

from typing import NamedTuple

from dovetail.modelspec import ModelSpec


class Part(NamedTuple):
    tensor: str
    shape: tuple[int, ...]  # of the whole tensor in the file
    expert: int | None = None  # of a stack of experts, only this one
    heads: int = 0  # rows are permuted within this many heads; 0 = as they are

    @property
    def piece_shape(self) -> tuple[int, ...]:
        return self.shape if self.expert is None else self.shape[1:]


_TOP = {"embed": "token_embd", "final_norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "attn_norm": "attn_norm",
    "out": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attn_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "down": "ffn_down",
    "post_mlp_norm": "post_ffw_norm",
    "router": "ffn_gate_inp",
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
        return _expert_parts(spec, prefix, module)
    if module == "qkv":
        permuted = architecture == "llama"
        rows = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads, "attn_v": spec.num_kv_heads}
        return [
            tuple(
                Part(
                    f"{prefix}{part}.{kind}",
                    (heads * spec.head_dim, *shape[1:]),
                    heads=heads if permuted and part != "attn_v" else 0,
                )
                for part, heads in rows.items()
            )
        ]
    if module == "gate_up":
        half = (spec.intermediate_size, *shape[1:])
        return [tuple(Part(f"{prefix}{part}.{kind}", half) for part in ("ffn_gate", "ffn_up"))]
    return [(Part(f"{prefix}{_LAYER[module]}.{kind}", shape),)]


def _expert_parts(spec: ModelSpec, prefix: str, module: str) -> list[tuple[Part, ...]]:
    """One stack per projection, or (files of before 2024) one matrix per expert and projection."""
    assert spec.moe is not None
    inner, hidden, experts = spec.moe.intermediate_size, spec.hidden_size, spec.moe.num_experts
    is_down = module == "experts.down"
    each = (hidden, inner) if is_down else (inner, hidden)
    names = ("ffn_down",) if is_down else ("ffn_gate", "ffn_up")
    order = [(expert, name) for expert in range(experts) for name in names]
    stacked = tuple(Part(f"{prefix}{name}_exps.weight", (experts, *each), expert=expert) for expert, name in order)
    separate = tuple(Part(f"{prefix}{name}.{expert}.weight", each) for expert, name in order)
    return [stacked, separate]
