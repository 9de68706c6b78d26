"""The level that runs everywhere: each operation of the dispatch table in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def rms_norm(x: Tensor, weight: Tensor, eps: float, in_float32: bool) -> Tensor:
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    normed = F.rms_norm(x.float(), x.shape[-1:], None, eps)
    return (normed * weight).to(x.dtype) if in_float32 else normed.to(x.dtype) * weight.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def gated(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return _ACTIVATIONS[activation](gate) * up


def activate(x: Tensor, activation: str) -> Tensor:
    return _ACTIVATIONS[activation](x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def write_kv(cache: Tensor, k: Tensor, v: Tensor, block: Tensor, offset: Tensor) -> None:
    cache[:, 0].index_put_((block, offset), k)
    if cache.shape[1] > 1:
        cache[:, 1].index_put_((block, offset), v)


class _Rule(NamedTuple):
    """How scores become weights."""

    scale: float
    window: int
    softcap: float | None
    sinks: Tensor | None  # [heads]: a score of each that has no value


def attend(
    q: Tensor,
    cache: Tensor,
    groups: Sequence[Any],
    scale: float,
    window: int,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    rule = _Rule(scale, window, softcap, sinks)
    outputs = [_attend_group(q[group.tokens], cache, group, rule) for group in groups]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_group(q: Tensor, cache: Tensor, group: Any, rule: _Rule) -> Tensor:
    heads, head_dim = q.shape[1:]
    kv_heads = cache.shape[3]
    count, queries, keys = group.num_sequences, group.num_queries, group.max_length
    shape = (count, group.width * group.block_size, kv_heads, head_dim)
    k, v = (
        cache[:, part]
        .index_select(0, group.blocks)
        .view(shape)[:, :keys]
        .transpose(1, 2)  # [sequences, kv_heads, keys, d]
        for part in (0, -1)
    )
    mask = group.mask(rule.window)
    if queries == 1:  # the query heads that share a key head take the place of the queries
        q = q.view(count, kv_heads, heads // kv_heads, head_dim)
        return _scores(q, k, v, mask, rule, (kv_heads, heads // kv_heads, 1)).reshape(count, heads * head_dim)
    q = q.view(count, queries, heads, head_dim).transpose(1, 2)  # [sequences, heads, queries, head_dim]
    attended = _scores(q, k, v, mask, rule, (heads, 1, 1))
    return attended.transpose(1, 2).reshape(count * queries, heads * head_dim)


def _scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: _Rule, each: tuple[int, ...]) -> Tensor:
    """`each`: the shape in which one number per head goes with the scores of a sequence."""
    shared = q.shape[1] != k.shape[1]  # several query heads per key head
    if rule.softcap is None and rule.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rule.scale, enable_gqa=shared)
    if shared:
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    scores = q @ k.transpose(-1, -2) * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    precise = scores if scores.dtype == torch.float64 else scores.float()
    if rule.sinks is not None:
        sinks = rule.sinks.to(precise.dtype).view(each).expand(*precise.shape[:-1], 1)
        return torch.softmax(torch.cat((precise, sinks), dim=-1), dim=-1)[..., :-1].to(q.dtype) @ v
    return torch.softmax(precise, dim=-1).to(q.dtype) @ v
