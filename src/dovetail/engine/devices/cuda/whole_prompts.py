"""Attention of a long prompt that has no context but itself, by cuDNN: nearly twice as fast as any other here, from a
thousand tokens on. But it compiles a plan for every length that it has not had, in each thread anew, which takes some
50 ms: lengths are rounded up to multiples, for which plans are made ahead, between iterations. Until then, and for all
other shapes, our own kernel computes them.
"""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dovetail.engine.devices.cuda.splits import AttentionShape

LENGTHS = (*range(1024, 4096, 128), *range(4096, 8193, 512))
_TYPES = (torch.bfloat16, torch.float16)

_Plan = tuple[int, int, int, int, float, torch.dtype]  # length, heads, heads of keys, columns, scale, type
_READY: dict[_Plan, bool] = {}  # of this process; False = cuDNN has nothing for it


def attend_whole(qkv: Tensor, shape: AttentionShape) -> Tensor | None:
    """qkv [n, (heads + 2·kv_heads)·d] → [n, heads·d]; None: it is another kernel's."""
    length = next((length for length in LENGTHS if length >= len(qkv)), 0)
    if len(qkv) < LENGTHS[0] or not _READY.get(_plan(length, shape, qkv.dtype)):
        return None
    if len(qkv) == length:
        return _attend(qkv, shape)
    padded = torch.empty(length, qkv.shape[1], dtype=qkv.dtype, device=qkv.device)
    padded[: len(qkv)] = qkv
    padded[len(qkv) :].zero_()  # seen by no token that is asked for, but a product with what is no number is none
    return _attend(padded, shape)[: len(qkv)]


def load_library(shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> None:
    """A second of the first use in a process, by the thread that loads."""
    if dtype in _TYPES:
        with suppress(RuntimeError):
            _attend(torch.zeros(LENGTHS[0], _width(shape), dtype=dtype, device=device), shape)


def prepare(length: int, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> bool:
    """By the thread of iterations. False if there was nothing to do."""
    plan = _plan(length, shape, dtype)
    if plan in _READY or shape.window or shape.softcap is not None or dtype not in _TYPES:
        return False
    try:
        _attend(torch.zeros(length, _width(shape), dtype=dtype, device=device), shape)
        _READY[plan] = True
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # an older card, or a size of heads that cuDNN does not know
        _READY[plan] = False
    return True


def _width(shape: AttentionShape) -> int:
    return (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim


def _plan(length: int, shape: AttentionShape, dtype: torch.dtype) -> _Plan:
    return length, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.scale, dtype


def _attend(qkv: Tensor, shape: AttentionShape) -> Tensor:
    heads = qkv.view(len(qkv), -1, shape.head_dim).transpose(0, 1)[None]  # [1, heads + 2·kv_heads, n, d]
    q, k, v = heads.split((shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), dim=1)
    shared = shape.num_heads != shape.num_kv_heads
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=shape.scale, enable_gqa=shared)
    return attended[0].transpose(0, 1).reshape(len(qkv), -1)
