"""A decoder-only model as modules that a runner can walk: embed, then per layer qkv, (attention), proj, mlp, then head.

One implementation for all families: what differs between them is in ModelSpec. A module maps rows to rows and keeps no
state, so the set of rows may change from one module to the next (O3); attention itself belongs to the runner.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.engine.latent import LatentAttention
from dovetail.engine.rope import Rope
from dovetail.engine.weights import Linear, Weights
from dovetail.modelspec import ModelSpec
from dovetail.native import Ops


class Norm:
    def __init__(self, spec: ModelSpec, weights: Weights, name: str, ops: Ops) -> None:
        self._weight = weights.norm(f"{name}.weight")
        self._bias: Tensor | None = None  # an RMS norm
        if spec.norm == "layer":
            has_bias = weights.has(f"{name}.bias")
            self._bias = weights.norm(f"{name}.bias") if has_bias else torch.zeros_like(self._weight)
        self._eps = spec.norm_eps
        self._in_float32 = spec.norm_in_float32
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        if self._bias is None:
            return self._ops.rms_norm(x, self._weight, self._eps, self._in_float32)
        return self._ops.layer_norm(x, self._weight, self._bias, self._eps)


class Mlp:
    def __init__(self, spec: ModelSpec, weights: Weights, prefix: str, ops: Ops) -> None:
        self._gated = spec.gated_mlp
        self._activation = spec.activation
        self._up = weights.linear(f"{prefix}.gate_up" if spec.gated_mlp else f"{prefix}.up")
        self._down = weights.linear(f"{prefix}.down")
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        inner = self._up(x)
        inner = self._ops.gated(inner, self._activation) if self._gated else self._ops.activate(inner, self._activation)
        return self._down(inner)


class MoeMlp:
    """Each row goes through its few chosen experts; rows of one expert go together."""

    def __init__(self, spec: ModelSpec, weights: Weights, prefix: str, ops: Ops) -> None:
        assert spec.moe is not None
        self._moe = spec.moe
        self._activation = spec.activation
        self._router = weights.linear(f"{prefix}.router")
        self._gate_up = weights.experts(f"{prefix}.experts.gate_up")
        self._down = weights.experts(f"{prefix}.experts.down")
        self._shared = Mlp(spec, weights, f"{prefix}.shared", ops) if spec.moe.shared_size else None
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        shares, experts = self._route(x)  # [rows, experts_per_token] each
        mixed = torch.zeros_like(x) if self._shared is None else self._shared(x)
        for expert in experts.unique().tolist():
            rows, rank = torch.where(experts == expert)
            inner = self._gate(self._gate_up[expert](x[rows]))
            mixed.index_add_(0, rows, self._down[expert](inner) * shares[rows, rank, None])
        return mixed

    def _gate(self, gate_up: Tensor) -> Tensor:
        limit = self._moe.limit
        if not limit:
            return self._ops.gated(gate_up, self._activation)
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(gate * self._moe.alpha)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._router(x)
        precise = logits if logits.dtype == torch.float64 else logits.float()
        weights = self._of_best_groups(torch.softmax(precise, dim=-1))
        shares, experts = torch.topk(weights, self._moe.experts_per_token, dim=-1)
        if self._moe.normalize_weights:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return (shares * self._moe.scale).to(x.dtype), experts

    def _of_best_groups(self, weights: Tensor) -> Tensor:
        """Those of other groups are 0."""
        moe = self._moe
        if moe.groups_per_token >= moe.groups:
            return weights
        grouped = weights.view(*weights.shape[:-1], moe.groups, -1)
        best = grouped.amax(dim=-1).topk(moe.groups_per_token, dim=-1).indices
        seen = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter_(-1, best, True)
        return (grouped * seen[..., None]).flatten(-2)


class PlainAttention:
    """What goes into attention and what comes out of it; attention itself belongs to the runner."""

    def __init__(self, spec: ModelSpec, weights: Weights, prefix: str, ops: Ops) -> None:
        self._spec = spec
        self._ops = ops
        self._qkv = weights.linear(f"{prefix}.qkv")
        self._q_norm = Norm(spec, weights, f"{prefix}.q_norm", ops) if spec.qk_norm else None
        self._k_norm = Norm(spec, weights, f"{prefix}.k_norm", ops) if spec.qk_norm else None
        self.out = weights.linear(f"{prefix}.out")

    def qkv(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """q [rows, heads, d], k and v [rows, kv_heads, d], normed and rotated."""
        spec = self._spec
        fused = self._qkv(x)
        if spec.qk_norm_whole and self._q_norm is not None and self._k_norm is not None:
            q, k, v = fused.split((spec.q_size, spec.kv_size, spec.kv_size), dim=-1)
            fused = torch.cat((self._q_norm(q), self._k_norm(k), v), dim=-1)
        fused = fused.view(len(x), -1, spec.head_dim)
        q, k, v = fused.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if not spec.qk_norm_whole and self._q_norm is not None and self._k_norm is not None:
            q, k = self._q_norm(q), self._k_norm(k)
        if angles is not None:
            q, k = self._ops.rotate(q, *angles), self._ops.rotate(k, *angles)
        return q, k, v


class DecoderLayer:
    def __init__(self, spec: ModelSpec, weights: Weights, index: int, ops: Ops) -> None:
        prefix = f"layers.{index}"
        self.index = index
        self.window = spec.window(index)
        self.local_rope = spec.has_local_rope(index)
        self._spec = spec
        self._attn_norm = Norm(spec, weights, f"{prefix}.attn_norm", ops) if spec.pre_norm else None
        self._attention = (PlainAttention if spec.mla is None else LatentAttention)(spec, weights, prefix, ops)
        self.sinks = weights.norm(f"{prefix}.sinks.weight") if spec.attention_sinks else None
        self._post_attn_norm = Norm(spec, weights, f"{prefix}.post_attn_norm", ops) if spec.sandwich_norm else None
        own = spec.pre_norm and not spec.parallel_block
        self._mlp_norm = Norm(spec, weights, f"{prefix}.mlp_norm", ops) if own else self._attn_norm
        self._mlp = (MoeMlp if spec.is_moe_layer(index) else Mlp)(spec, weights, prefix, ops)
        self._post_mlp_norm = Norm(spec, weights, f"{prefix}.post_mlp_norm", ops) if spec.sandwich_norm else None

    def qkv(self, hidden: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """q [rows, heads, d], k and v [rows, kv_heads, d] as attention takes them."""
        return self._attention.qkv(hidden if self._attn_norm is None else self._attn_norm(hidden), angles)

    def after_attention(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """Both updates of the residual stream; a parallel block's MLP reads it as attention did."""
        if self._spec.parallel_block:
            return self.proj(attended, self.mlp(hidden))
        return self.mlp(self.proj(attended, hidden))

    def proj(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """Attention's output [rows, heads·d] back onto the residual stream [rows, hidden]."""
        update = self._attention.out(attended)
        return hidden + (self._post_attn_norm(update) if self._post_attn_norm else update)

    def mlp(self, hidden: Tensor) -> Tensor:
        update = self._mlp(hidden if self._mlp_norm is None else self._mlp_norm(hidden))
        return hidden + (self._post_mlp_norm(update) if self._post_mlp_norm else update)


class DecoderModel:
    def __init__(self, spec: ModelSpec, weights: Weights, dtype: torch.dtype, ops: Ops) -> None:
        self.spec = spec
        self._embed = weights.tensor("embed.weight")
        self._positions = weights.tensor("positions.weight") if spec.position_offset is not None else None
        self._embed_scale = torch.tensor(spec.embed_scale, dtype=dtype) if spec.embed_scale != 1.0 else None
        self.layers = [DecoderLayer(spec, weights, index, ops) for index in range(spec.num_layers)]
        self._final_norm = Norm(spec, weights, "final_norm", ops)
        self._head = Linear([self._embed], None, ops) if spec.tied_embeddings else weights.linear("lm_head")
        uses_rope = spec.position_offset is None
        self._rope = Rope(spec.rope, spec.turning_dim, dtype) if uses_rope else None
        self._rope_local = Rope(spec.rope_local, spec.head_dim, dtype) if uses_rope and spec.rope_local else None

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = torch.nn.functional.embedding(tokens, self._embed)
        if self._embed_scale is not None:
            hidden = hidden * self._embed_scale
        if self._positions is not None and self.spec.position_offset is not None:
            hidden = hidden + torch.nn.functional.embedding(positions + self.spec.position_offset, self._positions)
        return hidden

    def angles(self, positions: Tensor) -> Angles:
        return Angles(
            self._rope.angles(positions) if self._rope else None,
            self._rope_local.angles(positions) if self._rope_local else None,
        )

    def states(self, hidden: Tensor) -> Tensor:
        """What the head reads."""
        return self._final_norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab] in float32, for the rows that sample."""
        return finish_logits(self.spec, self._head(self.states(hidden)))


def finish_logits(spec: ModelSpec, logits: Tensor) -> Tensor:
    """What follows the head, in float32 at least."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if spec.logit_scale != 1.0:
        logits = logits * spec.logit_scale
    cap = spec.final_softcap
    return logits if cap is None else torch.tanh(logits / cap) * cap


class Angles:
    """Rotary angles of an iteration's tokens, global and for layers with a window of their own."""

    def __init__(self, everywhere: tuple[Tensor, Tensor] | None, local: tuple[Tensor, Tensor] | None) -> None:
        self._everywhere = everywhere
        self._local = local

    def of(self, layer: DecoderLayer) -> tuple[Tensor, Tensor] | None:
        return self._local if layer.local_rope else self._everywhere
