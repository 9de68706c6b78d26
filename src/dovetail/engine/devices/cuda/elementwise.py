"""Triton kernels that map rows to rows: norms with the residual addition before them, rotary positions with the write
to the KV cache after them, activations. Every kernel computes in float32 and rounds where the reference model rounds.
"""

# Triton reads these functions' source: annotations of their arguments are types of the compiler, not of Python.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dovetail.engine.devices.cuda.launch import OVERLAP, launch_next, wait_for_previous

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}


@triton.jit
def _rms(x, width, eps):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)


@triton.jit
def _scaled(normed, weight, bias, offsets, mask, dtype: tl.constexpr, LAYER: tl.constexpr, IN_FLOAT32: tl.constexpr):
    scale = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    if LAYER:
        return normed * scale + tl.load(bias + offsets, mask=mask, other=0.0).to(tl.float32)
    if IN_FLOAT32:
        return normed * scale
    return normed.to(dtype).to(tl.float32) * scale.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _add_norm_kernel(
    residual, update, normed, weight, bias, post_weight, rows, width, update_stride, eps,
    ADD: tl.constexpr, POST: tl.constexpr, LAYER: tl.constexpr, IN_FLOAT32: tl.constexpr, GATHER: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + program).to(tl.int64) if GATHER else program
    offsets = tl.arange(0, BLOCK)
    mask = offsets < width
    dtype = residual.dtype.element_ty
    x = tl.load(residual + row * width + offsets, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        y = tl.load(update + row * update_stride + offsets, mask=mask, other=0.0).to(tl.float32)
        if POST:
            y = _scaled(_rms(y, width, eps), post_weight, bias, offsets, mask, dtype, False, IN_FLOAT32)
            y = y.to(dtype).to(tl.float32)
        x = (x + y).to(dtype).to(tl.float32)
        if not GATHER:
            tl.store(residual + row * width + offsets, x.to(dtype), mask=mask)
    if LAYER:
        centred = tl.where(mask, x - tl.sum(x, axis=0) / width, 0.0)
        value = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    else:
        value = _rms(x, width, eps)
    value = _scaled(value, weight, bias, offsets, mask, dtype, LAYER, IN_FLOAT32)
    tl.store(normed + program * width + offsets, value.to(dtype), mask=mask)


def add_norm(
    residual: Tensor,
    update: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    post_weight: Tensor | None,
    eps: float,
    in_float32: bool,
    rows: Tensor | None = None,
) -> Tensor:
    """residual [n, d] += (normed) update [n, d], in place; returns the norm of the sum. With `rows`: of those rows
    only, and the residual stays as it is."""
    count, width = (len(residual) if rows is None else len(rows)), residual.shape[1]
    normed = torch.empty(count, width, dtype=residual.dtype, device=residual.device)
    block = triton.next_power_of_2(width)
    some = weight  # stands for pointers that are not read
    _add_norm_kernel[(count,)](
        residual,
        some if update is None else update,
        normed,
        weight,
        some if bias is None else bias,
        some if post_weight is None else post_weight,
        some if rows is None else rows,
        width,
        width if update is None else update.stride(0),
        eps,
        ADD=update is not None,
        POST=post_weight is not None,
        LAYER=bias is not None,
        IN_FLOAT32=in_float32,
        GATHER=rows is not None,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
        **OVERLAP,
    )
    return normed


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rotate_and_write_kernel(
    qkv, positions, slots, cache, frequencies, q_weight, k_weight, rope_scale, eps,
    qkv_stride, block_stride, value_offset, token_stride, num_heads, num_kv_heads,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, ROPE: tl.constexpr, NORM: tl.constexpr, IN_FLOAT32: tl.constexpr,
    PAGE: tl.constexpr, HEADS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    dtype = qkv.dtype.element_ty
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_query = heads < num_heads
    is_value = heads >= num_heads + num_kv_heads
    columns = tl.arange(0, HALF)
    mask = (heads < num_heads + 2 * num_kv_heads)[:, None] & (columns < HEAD_DIM // 2)[None, :]
    at = qkv + token * qkv_stride + heads[:, None] * HEAD_DIM + columns[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    rotated_first, rotated_second = first, second
    if NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        lower = columns < HEAD_DIM // 2
        q_first, q_second = (
            tl.load(q_weight + columns, mask=lower),
            tl.load(q_weight + HEAD_DIM // 2 + columns, mask=lower),
        )
        k_first, k_second = (
            tl.load(k_weight + columns, mask=lower),
            tl.load(k_weight + HEAD_DIM // 2 + columns, mask=lower),
        )
        scale_first = tl.where(is_query[:, None], q_first[None, :], k_first[None, :]).to(tl.float32)
        scale_second = tl.where(is_query[:, None], q_second[None, :], k_second[None, :]).to(tl.float32)
        if IN_FLOAT32:
            rotated_first = first * inverse * scale_first
            rotated_second = second * inverse * scale_second
        else:
            rotated_first = (first * inverse).to(dtype).to(tl.float32) * scale_first.to(dtype).to(tl.float32)
            rotated_second = (second * inverse).to(dtype).to(tl.float32) * scale_second.to(dtype).to(tl.float32)
        rotated_first = rotated_first.to(dtype).to(tl.float32)
        rotated_second = rotated_second.to(dtype).to(tl.float32)
    if ROPE:
        position = tl.load(positions + token).to(tl.float32)
        frequency = tl.load(frequencies + columns, mask=columns < HEAD_DIM // 2, other=0.0)
        angle = position * frequency
        scale = tl.where(frequency == 0.0, 1.0, rope_scale)  # a pair that does not turn stays as it is
        cos = (tl.cos(angle) * scale)[None, :]
        sin = (tl.sin(angle) * scale)[None, :]
        turned = rotated_first * cos - rotated_second * sin
        rotated_second = rotated_second * cos + rotated_first * sin
        rotated_first = turned
    first = tl.where(is_value[:, None], first, rotated_first).to(dtype)
    second = tl.where(is_value[:, None], second, rotated_second).to(dtype)
    tl.store(at, first, mask=mask & ~is_value[:, None])
    tl.store(at + HEAD_DIM // 2, second, mask=mask & ~is_value[:, None])
    slot = tl.load(slots + token).to(tl.int64)
    kv_head = heads - num_heads - tl.where(is_value, num_kv_heads, 0)
    place = cache + (slot // PAGE) * block_stride + (slot % PAGE) * token_stride
    place = place + (tl.where(is_value, value_offset, 0) + kv_head * HEAD_DIM)[:, None] + columns[None, :]
    kept = mask & ((heads >= num_heads) & (slot + heads * 0 >= 0))[:, None]
    tl.store(place, first, mask=kept)
    tl.store(place + HEAD_DIM // 2, second, mask=kept)


def rotate_and_write(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    frequencies: Tensor | None,
    rope_scale: float,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    in_float32: bool,
    num_heads: int,
) -> None:
    """q and k within qkv [n, (heads + 2·kv_heads)·d] are normed and rotated in place; k and v also go to the cache of a
    layer [blocks, 2, page, kv_heads, d], token i to slots[i] (block · page + offset; negative = nowhere)."""
    _, _, page, num_kv_heads, head_dim = cache.shape
    heads = 8
    total = num_heads + 2 * num_kv_heads
    some = positions
    _rotate_and_write_kernel[(len(qkv), triton.cdiv(total, heads))](
        qkv,
        positions,
        slots,
        cache,
        some if frequencies is None else frequencies,
        some if norms is None else norms[0],
        some if norms is None else norms[1],
        rope_scale,
        eps,
        qkv.stride(0),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        num_heads,
        num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2),
        ROPE=frequencies is not None,
        NORM=norms is not None,
        IN_FLOAT32=in_float32,
        PAGE=page,
        HEADS=heads,
        num_warps=2,
        **OVERLAP,
    )


@triton.jit
def activate_values(x, KIND: tl.constexpr):
    if KIND == 0:
        return x * tl.sigmoid(x)
    if KIND == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if KIND == 2:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * tl.sigmoid(2.0 * inner)  # 0.5·x·(1 + tanh(inner))
    return tl.maximum(x, 0.0)


@triton.jit
def _activate_kernel(
    x, out, width, x_stride,
    GATED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    launch_next(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    dtype = x.dtype.element_ty
    value = activate_values(tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32), KIND)
    if GATED:
        up = tl.load(x + row * x_stride + width + columns, mask=mask, other=0.0).to(tl.float32)
        value = value.to(dtype).to(tl.float32) * up
    tl.store(out + row * width + columns, value.to(dtype), mask=mask)


def activate(x: Tensor, activation: str, gated: bool) -> Tensor:
    """[n, d] → [n, d], or gate and up side by side [n, 2·d] → activation(gate)·up [n, d]."""
    count, width = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    out = torch.empty(count, width, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(width))
    grid = (count, triton.cdiv(width, block))
    _activate_kernel[grid](
        x, out, width, x.stride(0), GATED=gated, KIND=ACTIVATIONS[activation], BLOCK=block, num_warps=4, **OVERLAP
    )
    return out
