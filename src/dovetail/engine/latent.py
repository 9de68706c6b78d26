"""Multi-head latent attention on the torch level, on top of attention over one key head (see `modelspec.MlaSpec`).

A head's key is k_up of the latent, so its score with a query is that of k_upᵀ·query with the latent itself; a head's
sum of values is v_up of the sum of latents. Both are done once per query, and the cache has the latents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.engine.weights import Weights
from dovetail.modelspec import ModelSpec
from dovetail.native import Ops


class LatentAttention:
    def __init__(self, spec: ModelSpec, weights: Weights, prefix: str, ops: Ops) -> None:
        assert spec.mla is not None
        self._mla = spec.mla
        self._heads = spec.num_heads
        self._qkv = weights.linear(f"{prefix}.qkv")
        self._norm = weights.norm(f"{prefix}.kv_norm.weight")
        self._k_up = weights.tensor(f"{prefix}.k_up.weight")  # [heads, rank, nope]
        self._v_up = weights.tensor(f"{prefix}.v_up.weight")  # [heads, value, rank]
        self._out = weights.linear(f"{prefix}.out")
        self._ops = ops

    def qkv(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """q [rows, heads, rank + rope]; the latent and the key that turns [rows, 1, rank + rope], twice."""
        mla, heads = self._mla, self._heads
        assert angles is not None
        q, latent, turning = self._qkv(x).split((heads * (mla.nope + mla.rope), mla.rank, mla.rope), dim=-1)
        still, turning_q = q.view(len(x), heads, -1).split((mla.nope, mla.rope), dim=-1)
        latent = self._ops.rms_norm(latent, self._norm, mla.norm_eps, False)
        key = torch.cat((latent[:, None], self._ops.rotate(turning[:, None], *angles)), dim=-1)
        absorbed = torch.einsum("nhd,hrd->nhr", still, self._k_up)
        return torch.cat((absorbed, self._ops.rotate(turning_q, *angles)), dim=-1), key, key

    def out(self, attended: Tensor) -> Tensor:
        """Of sums [rows, heads·(rank + rope)], of which the rotated part belongs to no value."""
        latents = attended.view(len(attended), self._heads, -1)[:, :, : self._mla.rank]
        return self._out(torch.einsum("nhr,hvr->nhv", latents, self._v_up).flatten(1))
