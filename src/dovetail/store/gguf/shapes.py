"""What the readers of GGUF metadata share: typed access by architecture, the sizes of rotary families, windows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from dovetail.store.gguf.rope import factors_to_rope, rope_from_metadata
from dovetail.store.keys import MANY, Keys

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class GgufModel:
    """The metadata with the architecture's prefix taken off, and the names of the tensors."""

    def __init__(
        self, keys: Keys, tensors: Collection[str], vocab_size: int, rope_factors: Mapping[str, list[float]]
    ) -> None:
        self.architecture = str(keys.get("general.architecture"))
        self.all = keys
        self.tensors = tensors
        self.vocab_size = vocab_size
        self.rope_factors = rope_factors  # tensors of ROPE_FACTORS: each frequency is divided by its factor

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

    def whole(self, key: str) -> int:
        """From 0 on, which it is where it is left out."""
        return 0 if not self.get(key) else self.integer(key)

    def number(self, key: str, default: float) -> float:
        return default if self.get(key) is None else self.all.number(f"{self.architecture}.{key}")

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors


def rotary_shape(model: GgufModel, turns_in_part: bool = False) -> dict[str, Any]:
    hidden, heads = model.integer("embedding_length"), model.integer("attention.head_count")
    head_dim = model.integer("attention.key_length", hidden // heads)
    turning = model.integer("rope.dimension_count", head_dim)
    whole = ("attention.value_length",) if turns_in_part else ("attention.value_length", "rope.dimension_count")
    for key in whole:
        if model.integer(key, head_dim) != head_dim:
            raise model.all.unsupported(f"{model.architecture}.{key}", model.get(key))
    rope = rope_from_metadata(model.all, model.architecture, _default_theta(model))
    if ROPE_FACTORS[0] in model.rope_factors:
        rope = factors_to_rope(rope, model.rope_factors[ROPE_FACTORS[0]], head_dim, model.all.origin)
    if turning != head_dim:
        rope = msgspec.structs.replace(rope, rotary_dims=turning)
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


def windows(model: GgufModel, default_window: int, period: int | list[bool]) -> tuple[int, ...]:
    """Every `period`-th layer sees everything; or a list that says for each layer whether it has a window."""
    window = model.integer("attention.sliding_window", default_window)
    layers = range(model.integer("block_count"))
    if isinstance(period, list):
        if len(period) != len(layers):
            raise model.all.damaged(f"{model.architecture}.attention.sliding_window_pattern", f"{len(layers)} entries")
        return tuple(window if has_window else 0 for has_window in period)
    return tuple(window if (layer + 1) % period else 0 for layer in layers)
