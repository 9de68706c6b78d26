"""The levels of kernels, and which one runs here.

torch       plain torch, operation by operation: runs everywhere, every family
neon        AArch64
dotprod     AArch64 with dot products of bytes and arithmetic in float16
i8mm        AArch64 with matrix products of bytes and dot products of bf16
avx2        x86-64 with AVX2 and FMA
avxvnni     x86-64 with AVX-VNNI too
avx512      x86-64 with AVX-512 F/BW/DQ/VL
avx512vnni  x86-64 with its VNNI too
avx512bf16  x86-64 with its bf16 too
amx         x86-64 with AMX tiles

All but the first are one compiled module that computes a whole iteration in one call (see docs/design/kernels.md).
Where it was not built, where the processor has none of them or computes wrongly in all of them (kernel_self_test), or
where DOVETAIL_KERNELS says so, the torch level serves.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError
from dovetail.native import kernel_self_test, torch_ops

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor


@dataclass(frozen=True)
class Ops:
    level: str
    kernels: ModuleType | None  # computes whole iterations of models that it knows; the operations below do the others
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
    # (cache of a layer [blocks, 2 (1: k is v), size, kv_heads, d], k, v [n, kv_heads, d], block [n], offset [n])
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    # (q [n, heads, d], cache of a layer, groups, scale, window, softcap, sinks [heads] | None) -> [n, heads·d]
    attend: Callable[[Tensor, Tensor, Sequence[Any], float, int, float | None, Tensor | None], Tensor]


TORCH = Ops(
    level="torch",
    kernels=None,
    rms_norm=torch_ops.rms_norm,
    layer_norm=torch_ops.layer_norm,
    linear=torch_ops.linear,
    gated=torch_ops.gated,
    activate=torch_ops.activate,
    rotate=torch_ops.rotate,
    write_kv=torch_ops.write_kv,
    attend=torch_ops.attend,
)
VARIABLE = "DOVETAIL_KERNELS"

log = logging.getLogger("dovetail.native")


def load_kernels() -> ModuleType | None:
    """The compiled module; None where it was not built."""
    try:
        return importlib.import_module("dovetail.native._kernels")
    except ImportError:
        return None


def levels() -> list[str]:
    """What this machine can run, best last."""
    kernels = load_kernels()
    return ["torch", *(kernels.levels() if kernels is not None else [])]


@cache
def best_level() -> str:
    """The last level that computes rightly here; torch where none does. Checked once in a process, in milliseconds."""
    for level in reversed(levels()[1:]):
        wrong = kernel_self_test.failed_parts(level)
        if not wrong:
            return level
        log.warning("%s kernels are wrong on this processor (%s): the next level is taken", level, ", ".join(wrong))
    return "torch"


def select(level: str = "auto", environment: Mapping[str, str] = os.environ) -> Ops:
    """A named level; "auto" takes the one that the environment names, or else the best that passes its check."""
    asked = environment.get(VARIABLE, "") or "auto" if level == "auto" else level
    found = levels()
    if asked == "auto":
        asked = best_level()
    if asked not in found:
        where = f"{VARIABLE}: " if level == "auto" else ""
        raise ConfigError(f"{where}unknown kernel level {asked!r}: this machine has {', '.join(found)}")
    return TORCH if asked == "torch" else replace(TORCH, level=asked, kernels=load_kernels())


def explain(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The level that `auto` means here, and why."""
    found, forced = levels(), environment.get(VARIABLE, "")
    if forced:
        known = forced == "auto" or forced in found
        return (forced, f"{VARIABLE} says so") if known else (forced, f"{VARIABLE} names it, but it cannot run here")
    if load_kernels() is None:
        return "torch", "the native kernels were not built (no C++ compiler at installation?)"
    if len(found) == 1:
        return "torch", "this processor has none of the instruction sets that the native kernels need"
    return best_level(), "the best that passed its check: " + ", ".join(f"{level} {how}" for level, how in verdicts())


def verdicts() -> list[tuple[str, str]]:
    """Every native level that this processor has the instructions for, weakest first, and how its check came out."""
    failed = {level: kernel_self_test.failed_parts(level) for level in levels()[1:]}
    return [(level, f"failed in {', '.join(parts)}" if parts else "passed") for level, parts in failed.items()]
