"""The dispatch table: every operation that a faster kernel may replace, by name, with one signature for all levels.

A level is a full table. `select` takes the best one that this device can run; a level that lacks an operation inherits
it from the one below with `dataclasses.replace`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError
from dovetail.native import torch_ops

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


@dataclass(frozen=True)
class Ops:
    level: str
    # (x [n, d], weight [d], eps, in_float32) -> [n, d]
    rms_norm: Callable[[Tensor, Tensor, float, bool], Tensor]
    # (x [n, d], weight [d], bias [d], eps) -> [n, d]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    # (x [n, in], weight [out, in], bias [out] | None) -> [n, out]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    # (gate_up [n, 2·d], activation) -> activation(gate)·up [n, d]
    gated: Callable[[Tensor, str], Tensor]
    # (x [n, d], activation) -> [n, d]
    activate: Callable[[Tensor, str], Tensor]
    # (x [n, heads, d], cos [n, 1, d/2], sin [n, 1, d/2]) -> x rotated
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    # (cache of a layer [blocks, 2, size, kv_heads, d], k, v [n, kv_heads, d], block [n], offset [n])
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    # (q [n, heads, d], cache of a layer, groups, scale, window, softcap) -> [n, heads·d]
    attend: Callable[[Tensor, Tensor, Sequence[Any], float, int, float | None], Tensor]


_TORCH = Ops(
    level="torch",
    rms_norm=torch_ops.rms_norm,
    layer_norm=torch_ops.layer_norm,
    linear=torch_ops.linear,
    gated=torch_ops.gated,
    activate=torch_ops.activate,
    rotate=torch_ops.rotate,
    write_kv=torch_ops.write_kv,
    attend=torch_ops.attend,
)
LEVELS = {"torch": _TORCH}  # best last


def select(level: str = "auto") -> Ops:
    if level == "auto":
        return next(reversed(LEVELS.values()))
    if level not in LEVELS:
        raise ConfigError(f"unknown kernel level {level!r}: this machine has {', '.join(LEVELS)}")
    return LEVELS[level]
