"""Turns the metadata of a GGUF file into a ModelSpec. What the metadata leaves out follows llama.cpp's loader.

Whether projections have biases and whether the output matrix is its own is not in the metadata but in which tensors
exist, so their names are asked for too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from dovetail.errors import UnsupportedModel
from dovetail.modelspec import ModelSpec, MoeSpec
from dovetail.store.gguf_rope import factors_to_rope, rope_from_metadata
from dovetail.store.keys import MANY, Keys, checked_spec

# llama.cpp knows these models by their number of layers, and gives them a scale of hidden/heads instead of head_dim.
_GEMMA2_27B_LAYERS = 46
_GEMMA3_27B_LAYERS = 62


class GgufModel:
    """The metadata with the architecture's prefix taken off, and the names of the tensors."""

    def __init__(self, keys: Keys, tensors: Collection[str], vocab_size: int, rope_factors: list[float] | None) -> None:
        self.architecture = str(keys.get("general.architecture"))
        self.all = keys
        self.tensors = tensors
        self.vocab_size = vocab_size
        self.rope_factors = rope_factors  # the tensor rope_freqs.weight: each frequency is divided by its factor

    def get(self, key: str) -> Any:
        return self.all.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """One value for the whole model; some files repeat it per layer."""
        full = f"{self.architecture}.{key}"
        value = self.all.get(full)
        if value is None and default is not None:
            return default
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.all.unsupported(full, "different from layer to layer")
            return int(value[0])
        return self.all.integer(full, at_most=MANY if key in ("block_count", "expert_count") else 2**31 - 1)

    def number(self, key: str, default: float) -> float:
        return default if self.get(key) is None else self.all.number(f"{self.architecture}.{key}")

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors


def spec_from_metadata(model: GgufModel) -> ModelSpec:
    builder = _BUILDERS.get(model.architecture)
    if builder is None:
        known = ", ".join(sorted(_BUILDERS))
        raise UnsupportedModel(
            f"{model.all.origin}: architecture {model.architecture!r} is not supported (known: {known})"
        )
    return checked_spec(builder(model), model.all.origin)


def _shape(model: GgufModel) -> dict[str, Any]:
    hidden, heads = model.integer("embedding_length"), model.integer("attention.head_count")
    head_dim = model.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if model.integer(key, head_dim) != head_dim:
            raise model.all.unsupported(f"{model.architecture}.{key}", model.get(key))
    rope = rope_from_metadata(model.all, model.architecture, _default_theta(model))
    if model.rope_factors is not None:
        rope = factors_to_rope(rope, model.rope_factors, head_dim, model.all.origin)
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": hidden,
        "num_layers": model.integer("block_count"),
        "num_heads": heads,
        "num_kv_heads": model.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": model.integer("feed_forward_length", 0),
        "context_length": model.integer("context_length"),
        "norm_eps": model.number("attention.layer_norm_rms_epsilon", 1e-6),
        "qkv_bias": model.has("blk.0.attn_q.bias"),
        "out_bias": model.has("blk.0.attn_output.bias"),
        "mlp_bias": model.has("blk.0.ffn_down.bias"),
        "tied_embeddings": not model.has("output.weight"),
        "rope": rope,
    }


def _default_theta(model: GgufModel) -> float:
    return 1e6 if model.architecture == "gemma3" else 10_000.0


def _llama(model: GgufModel) -> ModelSpec:
    """Llama itself, and what llama.cpp files under its name: Mistral (with its window) and Mixtral (with experts)."""
    shape = _shape(model)
    has_window = model.get("attention.sliding_window") is not None
    windows = (model.integer("attention.sliding_window"),) * shape["num_layers"] if has_window else ()
    moe = _moe(model, model.integer("feed_forward_length")) if model.get("expert_count") else None
    family = "mixtral" if moe is not None else "mistral" if has_window else "llama"
    return ModelSpec(family=family, **shape, windows=windows, moe=moe)


def _qwen2(model: GgufModel) -> ModelSpec:
    return ModelSpec(family="qwen2", **_shape(model))


def _qwen3(model: GgufModel) -> ModelSpec:
    return ModelSpec(family="qwen3", **_shape(model), qk_norm=True)


def _qwen3_moe(model: GgufModel) -> ModelSpec:
    shape = _shape(model)
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
    shape = _shape(model)
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
        windows=_windows(model, default_window=4096, period=2),
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
        windows=_windows(model, default_window=1024, period=6 if pattern is None else pattern),
    )


def _windows(model: GgufModel, default_window: int, period: int | list[bool]) -> tuple[int, ...]:
    """Every `period`-th layer sees everything; or a list that says for each layer whether it has a window."""
    window = model.integer("attention.sliding_window", default_window)
    layers = range(model.integer("block_count"))
    if isinstance(period, list):
        if len(period) != len(layers):
            raise model.all.damaged(f"{model.architecture}.attention.sliding_window_pattern", f"{len(layers)} entries")
        return tuple(window if has_window else 0 for has_window in period)
    return tuple(window if (layer + 1) % period else 0 for layer in layers)


_BUILDERS: dict[str, Callable[[GgufModel], ModelSpec]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
