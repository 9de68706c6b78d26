"""A decoder-only model on a GPU as modules that map rows to rows: embed, then per layer qkv, attention, proj, mlp, then
head. What an addition leaves to the norm after it is carried along as `update`, so that both are one kernel.

One implementation for all families: what differs between them is in ModelSpec.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.engine.devices.cuda.adapter_image import AdaptedMatrix, adapted_matrix
from dovetail.engine.devices.cuda.coded import CodedMatrix, look_up
from dovetail.engine.devices.cuda.elementwise import activate, add_norm, rotate_and_write
from dovetail.engine.devices.cuda.fp8 import Fp8Matrix
from dovetail.engine.devices.cuda.in_place import HostMatrix
from dovetail.engine.devices.cuda.lora import AdaptedRows
from dovetail.engine.devices.cuda.products import Matrix, gated_linear, linear
from dovetail.engine.devices.cuda.splits import AttentionShape
from dovetail.engine.devices.cuda.weights import DeviceWeights
from dovetail.engine.rope import Rope
from dovetail.modelspec import ModelSpec, RopeSpec


@dataclass
class Rows:
    """The residual stream [rows, hidden], and what is still to be added to it."""

    residual: Tensor
    update: Tensor | None = None
    post_norm: Tensor | None = None  # weight of the norm that the update goes through before it is added


class Attend(Protocol):
    """Attention of an iteration's rows over one layer's cache; q and k within qkv are rotated already."""

    def __call__(self, qkv: Tensor, cache: Tensor, shape: AttentionShape) -> Tensor: ...


class Projection:
    """One matrix of a layer, and what adapters add to its products."""

    def __init__(self, spec: ModelSpec, weights: DeviceWeights, layer: int, name: str) -> None:
        self.weight: Matrix = weights.matrix(f"layers.{layer}.{name}.weight")
        self.bias = weights.find(f"layers.{layer}.{name}.bias")
        self._adapted: AdaptedMatrix = adapted_matrix(spec, layer, name, self.weight.shape[0])

    def __call__(self, x: Tensor, adapted: AdaptedRows | None) -> Tensor:
        """The adapters' first half comes before the product: it is done by the time that their second half is due."""
        if adapted is None:
            return linear(x, self.weight, self.bias)
        sums = adapted.shrink(x, self._adapted)
        out = linear(x, self.weight, self.bias)
        adapted.expand(sums, out, self._adapted)
        return out


class CudaLayer:
    def __init__(self, spec: ModelSpec, weights: DeviceWeights, index: int) -> None:
        prefix = f"layers.{index}"
        self._spec = spec
        self.window = spec.window(index)
        self.local_rope = spec.has_local_rope(index)
        scale = spec.attention_scale if spec.attention_scale is not None else spec.head_dim**-0.5
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self.attention = AttentionShape(*heads, scale, spec.attention_softcap, self.window)
        self._attn_norm = _norm(spec, weights, f"{prefix}.attn_norm")
        self._qkv = Projection(spec, weights, index, "qkv")
        q_norm, k_norm = weights.find(f"{prefix}.q_norm.weight"), weights.find(f"{prefix}.k_norm.weight")
        self._qk_norms = (q_norm, k_norm) if q_norm is not None and k_norm is not None else None
        self._out = Projection(spec, weights, index, "out")
        self._post_attn = weights.find(f"{prefix}.post_attn_norm.weight")
        self._mlp_norm = _norm(spec, weights, f"{prefix}.mlp_norm")
        self._mlp = (_Experts if spec.is_moe_layer(index) else _Mlp)(spec, weights, index)
        self._post_mlp = weights.find(f"{prefix}.post_mlp_norm.weight")

    @property
    def is_capturable(self) -> bool:
        """It looks at no value on the host, so that a graph can hold it."""
        return isinstance(self._mlp, _Mlp)

    def qkv(self, rows: Rows, adapted: AdaptedRows | None) -> Tensor:
        """[rows, (heads + 2·kv_heads)·d]"""
        return self._qkv(_normed(rows, self._attn_norm, self._spec), adapted)

    def rotate_and_write(self, qkv: Tensor, positions: Tensor, slots: Tensor, cache: Tensor, rope: DeviceRope) -> None:
        spec = self._spec
        frequencies = rope.frequencies
        rotate_and_write(
            qkv, positions, slots, cache, frequencies, rope.scale, self._qk_norms, spec.norm_eps, spec.norm_in_float32,
            spec.num_heads,
        )  # fmt: skip

    def proj(self, attended: Tensor, rows: Rows, adapted: AdaptedRows | None) -> Rows:
        return Rows(rows.residual, self._out(attended, adapted), self._post_attn)

    def mlp(self, rows: Rows, adapted: AdaptedRows | None) -> Rows:
        return Rows(rows.residual, self._mlp(_normed(rows, self._mlp_norm, self._spec), adapted), self._post_mlp)


class DeviceRope:
    def __init__(self, spec: RopeSpec | None, head_dim: int, device: torch.device) -> None:
        rope = None if spec is None else Rope(spec, head_dim, torch.float32)
        self.frequencies = None if rope is None else rope.frequencies.to(device)
        self.scale = 1.0 if rope is None else rope.scale


class CudaModel:
    def __init__(self, spec: ModelSpec, weights: DeviceWeights, device: torch.device) -> None:
        self.spec = spec
        self._weights = weights
        self._dtype = weights.dtype
        self._embed = weights.matrix("embed.weight")
        self._positions = weights.matrix("positions.weight") if weights.has("positions.weight") else None
        self.layers = [CudaLayer(spec, weights, index) for index in range(spec.num_layers)]
        self._final_norm = _norm(spec, weights, "final_norm")
        self._head = self._embed if spec.tied_embeddings else weights.matrix("lm_head.weight")
        uses_rope = spec.position_offset is None
        self._rope = DeviceRope(spec.rope if uses_rope else None, spec.head_dim, device)
        self._rope_local = DeviceRope(spec.rope_local, spec.head_dim, device) if uses_rope and spec.rope_local else None

    def one_of_each_kind(self) -> CudaModel:
        """The same model of as few layers as have all of its kernels between them."""
        kinds = {(layer.attention, layer.local_rope, layer.is_capturable): layer for layer in reversed(self.layers)}
        few = copy.copy(self)
        few.layers = list(kinds.values())
        return few

    def attention_shapes(self) -> list[AttentionShape]:
        """Each once."""
        return list(dict.fromkeys(layer.attention for layer in self.layers))

    @property
    def is_capturable(self) -> bool:
        return all(layer.is_capturable for layer in self.layers)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: Tensor,
        sampled: Tensor | None,
        attend: Attend,
        adapted: AdaptedRows | None = None,
    ) -> Tensor:
        """cache [blocks, layers, 2, page, kv_heads, d]; returns the logits of the `sampled` rows (None = all), in the
        compute type. Layers that have not arrived yet are waited for by the stream."""
        return self.head(self.states(tokens, positions, slots, cache, sampled, attend, adapted))

    def states(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: Tensor,
        sampled: Tensor | None,
        attend: Attend,
        adapted: AdaptedRows | None = None,
    ) -> Tensor:
        """The same up to what the head reads."""
        self._weights.begin()
        self._weights.wait_for_layer(0)
        rows = self.embed(tokens, positions)
        for index, layer in enumerate(self.layers):
            self._weights.acquire(index)
            rope = self._rope_local if layer.local_rope and self._rope_local is not None else self._rope
            blocks = cache[:, index]
            qkv = layer.qkv(rows, adapted)
            layer.rotate_and_write(qkv, positions, slots, blocks, rope)
            rows = layer.proj(attend(qkv, blocks, layer.attention), rows, adapted)
            rows = layer.mlp(rows, adapted)
            self._weights.release(index)
        self._weights.wait_for_layer(len(self.layers))
        return _normed(rows, self._final_norm, self.spec, sampled)

    def embed(self, tokens: Tensor, positions: Tensor) -> Rows:
        hidden = _look_up(tokens, self._embed, self._dtype)
        if self.spec.embed_scale != 1.0:
            hidden = hidden * torch.full((), self.spec.embed_scale, dtype=hidden.dtype, device=hidden.device)
        if self._positions is not None and self.spec.position_offset is not None:
            hidden = hidden + _look_up(positions.long() + self.spec.position_offset, self._positions, self._dtype)
        return Rows(hidden)

    def head(self, states: Tensor) -> Tensor:
        logits = linear(states, self._head, None)
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        if self.spec.final_softcap is not None:
            logits = torch.tanh(logits / self.spec.final_softcap) * self.spec.final_softcap
        return logits


class _Mlp:
    def __init__(self, spec: ModelSpec, weights: DeviceWeights, layer: int) -> None:
        self._gated, self._activation = spec.gated_mlp, spec.activation
        self._up = Projection(spec, weights, layer, "gate_up" if spec.gated_mlp else "up")
        self._down = Projection(spec, weights, layer, "down")

    def __call__(self, x: Tensor, adapted: AdaptedRows | None) -> Tensor:
        if self._gated and self._up.bias is None and adapted is None:
            inner = gated_linear(x, self._up.weight, self._activation)
        else:
            inner = activate(self._up(x, adapted), self._activation, self._gated)
        return self._down(inner, adapted)


class _Experts:
    """Each row goes through its few chosen experts; rows of one expert go together. No adapter has anything for them:
    the store refuses those that do."""

    def __init__(self, spec: ModelSpec, weights: DeviceWeights, layer: int) -> None:
        assert spec.moe is not None
        prefix = f"layers.{layer}"
        self._moe, self._activation = spec.moe, spec.activation
        self._router = weights.matrix(f"{prefix}.router.weight")
        self._gate_up = weights.matrix(f"{prefix}.experts.gate_up.weight")
        self._down = weights.matrix(f"{prefix}.experts.down.weight")

    def __call__(self, x: Tensor, adapted: AdaptedRows | None) -> Tensor:
        shares, experts = torch.topk(
            torch.softmax(linear(x, self._router, None).float(), dim=-1), self._moe.experts_per_token
        )
        if self._moe.normalize_weights:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(x)
        for expert in experts.unique().tolist():
            rows, rank = torch.where(experts == expert)
            inner = gated_linear(x[rows], self._gate_up[expert], self._activation)
            mixed.index_add_(0, rows, linear(inner, self._down[expert], None) * shares[rows, rank, None].to(x.dtype))
        return mixed


def _norm(spec: ModelSpec, weights: DeviceWeights, name: str) -> tuple[Tensor, Tensor | None]:
    """A bias is how the kernel knows a layer norm."""
    weight, bias = weights.get(f"{name}.weight"), weights.find(f"{name}.bias")
    return weight, torch.zeros_like(weight) if bias is None and spec.norm == "layer" else bias


def _look_up(which: Tensor, matrix: Matrix, dtype: torch.dtype) -> Tensor:
    assert not isinstance(matrix, Fp8Matrix), "what is looked up has 16 bits"
    if isinstance(matrix, CodedMatrix):
        return look_up(which, matrix, dtype)
    return F.embedding(which, matrix.values if isinstance(matrix, HostMatrix) else matrix)


def _normed(rows: Rows, norm: tuple[Tensor, Tensor | None], spec: ModelSpec, some: Tensor | None = None) -> Tensor:
    weight, bias = norm
    return add_norm(
        rows.residual, rows.update, weight, bias, rows.post_norm, spec.norm_eps, spec.norm_in_float32, rows=some
    )
