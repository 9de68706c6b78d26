"""Rotary position angles, with the scalings that the families use (linear, Llama 3, YaRN, LongRoPE)."""

from __future__ import annotations

import math

import torch

from dovetail.modelspec import RopeSpec


class Rope:
    """Angles for one RopeSpec. Nothing is tabulated: an iteration needs the angles of its own tokens only."""

    def __init__(self, spec: RopeSpec, head_dim: int, dtype: torch.dtype) -> None:
        precision = torch.float64 if dtype == torch.float64 else torch.float32
        turning = spec.rotary_dims or head_dim
        exponents = torch.arange(0, turning, 2, dtype=precision) / turning
        frequencies = 1.0 / (spec.theta**exponents)  # [turning / 2]
        self._dtype = dtype
        self.scale = 1.0  # of what turns; the rest of a head stays as it is
        if spec.kind == "linear":
            frequencies = frequencies / spec.factor
        elif spec.kind == "llama3":
            frequencies = _llama3(frequencies, spec)
        elif spec.kind == "yarn":
            frequencies = _yarn(frequencies, spec, turning)
            factor = spec.attention_factor
            self.scale = factor if factor is not None else 0.1 * math.log(max(spec.factor, 1.0)) + 1.0
        elif spec.kind == "longrope":
            frequencies = frequencies / torch.tensor(spec.factors, dtype=precision)
            self.scale = 1.0 if spec.attention_factor is None else spec.attention_factor
        elif spec.kind == "none":
            frequencies = torch.zeros_like(frequencies)
        # [head_dim / 2]; a frequency of 0: the pair stays
        self.frequencies = torch.nn.functional.pad(frequencies, (0, (head_dim - turning) // 2))

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [tokens, 1, head_dim / 2], ready to multiply [tokens, heads, head_dim / 2]."""
        angles = positions.to(self.frequencies.dtype)[:, None] * self.frequencies
        scale = torch.where(self.frequencies == 0, 1.0, self.scale)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        return cos.to(self._dtype)[:, None], sin.to(self._dtype)[:, None]


def _llama3(frequencies: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = spec.original_context / wavelengths
    smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / spec.factor + smooth * frequencies


def _yarn(frequencies: torch.Tensor, spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Dimensions that turn often within the original context are kept, those that turn rarely are stretched."""

    def dimension(rotations: float) -> float:
        return head_dim * math.log(spec.original_context / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    index = torch.arange(head_dim // 2, dtype=frequencies.dtype)
    stretched = ((index - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return frequencies / spec.factor * stretched + frequencies * (1 - stretched)
