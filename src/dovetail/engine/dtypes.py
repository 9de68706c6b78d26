"""Names of element types, and which one a device multiplies fastest."""

from __future__ import annotations

import torch

from dovetail.errors import ConfigError
from dovetail.machine import read_cpu
from dovetail.modelspec import FP8
from dovetail.native import select

TORCH_DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def compute_dtype(name: str, stored: str) -> str:
    """The type to compute in. "auto": the stored one if this CPU has instructions for it, else float32, which every
    CPU multiplies well (bf16 without them is a hundred times slower). "fp8" is for GPUs: CPUs of the same pool do as if
    it were not there."""
    if name in ("auto", FP8):
        return _fastest(stored) if stored in ("bf16", "f16") else stored
    if name not in TORCH_DTYPES:
        raise ConfigError(f"dtype: {name!r} is none of auto, {', '.join(TORCH_DTYPES)}, and fp8 on GPUs")
    return name


def _fastest(stored: str) -> str:
    cpu = read_cpu()
    if cpu.has_fast_bf16:
        return "bf16"
    # Only our own kernels have that arithmetic: torch's float16 is slower than any other type.
    return "f16" if stored == "f16" and cpu.has_fast_f16 and select().kernels is not None else "f32"
