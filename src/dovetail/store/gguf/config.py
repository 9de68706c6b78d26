"""Turns the metadata of a GGUF file into a ModelSpec. What the metadata leaves out follows llama.cpp's loader.

Whether projections have biases and whether the output matrix is its own is not in the metadata but in which tensors
exist, so their names are asked for too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dovetail.errors import UnsupportedModel
from dovetail.modelspec import ModelSpec, MoeSpec
from dovetail.store.gguf.families import FAMILIES
from dovetail.store.gguf.rope import rope_from_metadata
from dovetail.store.gguf.shapes import GgufModel, rotary_shape, windows
from dovetail.store.keys import checked_spec
from dovetail.store.kin import nearest

# llama.cpp knows these models by their number of layers, and gives them a scale of hidden/heads instead of head_dim.
_GEMMA2_27B_LAYERS = 46
_GEMMA3_27B_LAYERS = 62
_ENCODERS = ("bert", "t5encoder", "eurobert")  # in the names of all of them


def spec_from_metadata(model: GgufModel) -> ModelSpec:
    builder = _BUILDERS.get(model.architecture)
    if builder is None:
        if any(word in model.architecture for word in _ENCODERS):
            raise UnsupportedModel(
                f"{model.all.origin}: architecture {model.architecture!r} is not supported; "
                "encoders are read from folders of safetensors"
            )
        known, kin = ", ".join(sorted(_BUILDERS)), nearest(model.architecture, _BUILDERS)
        raise UnsupportedModel(
            f"{model.all.origin}: architecture {model.architecture!r} is not supported; "
            f"the nearest that is: {kin!r} (known: {known})"
        )
    return checked_spec(builder(model), model.all.origin)


def _llama(model: GgufModel) -> ModelSpec:
    """Llama itself, and what llama.cpp files under its name: Mistral (with its window) and Mixtral (with experts)."""
    shape = rotary_shape(model)
    has_window = model.get("attention.sliding_window") is not None
    reach = (model.integer("attention.sliding_window"),) * shape["num_layers"] if has_window else ()
    moe = _moe(model, model.integer("feed_forward_length")) if model.get("expert_count") else None
    family = "mixtral" if moe is not None else "mistral" if has_window else "llama"
    return ModelSpec(family=family, **shape, windows=reach, moe=moe)


def _qwen2(model: GgufModel) -> ModelSpec:
    return ModelSpec(family="qwen2", **rotary_shape(model))


def _qwen3(model: GgufModel) -> ModelSpec:
    return ModelSpec(family="qwen3", **rotary_shape(model), qk_norm=True)


def _qwen3_moe(model: GgufModel) -> ModelSpec:
    shape = rotary_shape(model)
    return ModelSpec(
        family="qwen3_moe",
        **shape,
        qk_norm=True,
        moe=_moe(model, model.integer("expert_feed_forward_length")),
        dense_layers=tuple(n for n in range(shape["num_layers"]) if not model.has(f"blk.{n}.ffn_gate_inp.weight")),
    )


def _moe(model: GgufModel, intermediate_size: int) -> MoeSpec:
    return MoeSpec(
        num_experts=model.integer("expert_count"),
        experts_per_token=model.integer("expert_used_count"),
        intermediate_size=intermediate_size,
        normalize_weights=True,  # llama.cpp does so for both architectures, whatever the config said
    )


def _gemma(model: GgufModel, layers_of_27b: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    shape = rotary_shape(model)
    wide = shape["num_layers"] == layers_of_27b
    scale_of = shape["hidden_size"] // shape["num_heads"] if wide else shape["head_dim"]
    return {
        **shape,
        "norm_in_float32": True,
        "activation": "gelu_tanh",
        "sandwich_norm": True,
        "embed_scale": math.sqrt(shape["hidden_size"]),
        "attention_scale": scale_of**-0.5,
    }


def _gemma2(model: GgufModel) -> ModelSpec:
    return ModelSpec(
        family="gemma2",
        **_gemma(model, _GEMMA2_27B_LAYERS),
        attention_softcap=model.number("attn_logit_softcapping", 50.0),
        final_softcap=model.number("final_logit_softcapping", 30.0),
        windows=windows(model, default_window=4096, period=2),
    )


def _gemma3(model: GgufModel) -> ModelSpec:
    softcap = model.number("final_logit_softcapping", 0.0)
    pattern = model.get("attention.sliding_window_pattern")
    local = rope_from_metadata(model.all, model.architecture, 10_000.0, local=True)
    return ModelSpec(
        family="gemma3",
        **_gemma(model, _GEMMA3_27B_LAYERS),
        qk_norm=True,
        final_softcap=softcap or None,
        rope_local=local,
        windows=windows(model, default_window=1024, period=6 if pattern is None else pattern),
    )


_BUILDERS: dict[str, Callable[[GgufModel], ModelSpec]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    **FAMILIES,
}
