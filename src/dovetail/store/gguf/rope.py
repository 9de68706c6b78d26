"""The rotary settings of a GGUF file as a RopeSpec, including those it keeps as a tensor of per-frequency factors."""

from __future__ import annotations

import math

import msgspec

from dovetail.errors import UnsupportedModel
from dovetail.modelspec import RopeSpec
from dovetail.store.keys import Keys

# Llama 3.1 and its kin; GGUF files keep the resulting factors but not the numbers they came from.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR = 1.0, 4.0
_ORIGINAL_CONTEXTS = (8192, *(2**power for power in range(5, 18) if power != 13))


def rope_from_metadata(keys: Keys, architecture: str, default_theta: float, *, local: bool = False) -> RopeSpec:
    """`local` is the second set of layers that have a window; those are never scaled."""
    prefix = f"{architecture}.rope."
    theta_key = f"{prefix}freq_base_swa" if local else f"{prefix}freq_base"
    theta = default_theta if keys.get(theta_key) is None else keys.number(theta_key)
    kind = keys.get(f"{prefix}scaling.type")
    legacy = keys.get(f"{prefix}scale_linear")  # written before there were types
    if local or (kind in (None, "none") and legacy in (None, 1.0)):
        return RopeSpec(theta=theta)
    if kind == "longrope":  # its factors are tensors
        return RopeSpec(theta=theta)
    factor = keys.number(f"{prefix}scale_linear" if kind is None else f"{prefix}scaling.factor")
    if kind in (None, "linear"):
        return RopeSpec(theta=theta, kind="linear", factor=factor)
    if kind != "yarn":
        raise keys.unsupported(f"{prefix}scaling.type", kind)
    for key in ("yarn_ext_factor", "yarn_attn_factor", "attn_factor"):
        keys.require(f"{prefix}scaling.{key}", 1.0)
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=keys.integer(f"{prefix}scaling.original_context_length"),
        beta_fast=keys.optional_number(f"{prefix}scaling.yarn_beta_fast") or 32.0,
        beta_slow=keys.optional_number(f"{prefix}scaling.yarn_beta_slow") or 1.0,
    )


def factors_to_rope(rope: RopeSpec, factors: list[float], head_dim: int, origin: str) -> RopeSpec:
    """The Llama 3 scaling whose factors these are."""
    if all(factor == 1.0 for factor in factors):
        return rope
    largest = max(factors)
    for context in _ORIGINAL_CONTEXTS:
        expected = llama3_factors(rope.theta, head_dim, largest, context)
        if len(expected) == len(factors) and all(map(_close, expected, factors)):
            return msgspec.structs.replace(
                rope,
                kind="llama3",
                factor=largest,
                original_context=context,
                low_freq_factor=_LOW_FREQ_FACTOR,
                high_freq_factor=_HIGH_FREQ_FACTOR,
            )
    raise UnsupportedModel(f"{origin}: rope_freqs.weight is not a scaling of the Llama 3 kind")


def llama3_factors(theta: float, head_dim: int, factor: float, context: int) -> list[float]:
    """By how much each rotary frequency is divided."""
    low_wavelength, high_wavelength = context / _LOW_FREQ_FACTOR, context / _HIGH_FREQ_FACTOR
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        if wavelength < high_wavelength:
            factors.append(1.0)
        elif wavelength > low_wavelength:
            factors.append(factor)
        else:
            smooth = (context / wavelength - _LOW_FREQ_FACTOR) / (_HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _close(expected: float, found: float) -> bool:
    return math.isclose(expected, found, rel_tol=1e-4)  # they are stored as float32
