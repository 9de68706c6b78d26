"""What the readers of `config.json` share: the sizes that every rotary family has, activations, windows per layer."""

from __future__ import annotations

from typing import Any, Literal

from dovetail.errors import UnsupportedModel
from dovetail.modelspec import MoeSpec
from dovetail.store.keys import MANY, Keys

Activation = Literal["silu", "gelu_tanh", "gelu", "relu"]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}


def rotary_shape(keys: Keys) -> dict[str, Any]:
    """What every rotary family has."""
    heads, hidden = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    kv_heads = heads if keys.get("num_key_value_heads") is None else keys.integer("num_key_value_heads")
    if heads % kv_heads != 0:
        raise keys.damaged("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    head_dim = hidden // heads if keys.get("head_dim") is None else keys.integer("head_dim")
    if head_dim % 2 != 0:
        raise UnsupportedModel(f"{keys.origin}: head_dim = {head_dim} is odd; rotary positions need pairs")
    return {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": hidden,
        "num_layers": num_layers(keys),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": keys.integer("intermediate_size"),
        "context_length": keys.integer("max_position_embeddings"),
        "norm_eps": keys.number("rms_norm_eps"),
        "tied_embeddings": keys.flag("tie_word_embeddings"),
    }


def activation(keys: Keys, key: str) -> Activation:
    name = keys.get(key)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise keys.unsupported(key, name)
    return ACTIVATIONS[name]


def num_layers(keys: Keys) -> int:
    return keys.integer("num_hidden_layers", at_most=MANY)


def num_experts(keys: Keys) -> int:
    """Files of before and after transformers 5 disagree on the name; the one in the file wins over the default."""
    key = "num_local_experts" if keys.get("num_local_experts") is not None else "num_experts"
    return keys.integer(key, at_most=MANY)


def checked_moe(keys: Keys, moe: MoeSpec) -> MoeSpec:
    if moe.experts_per_token > moe.num_experts:
        raise keys.damaged("num_experts_per_tok", f"at most {moe.num_experts}")
    return moe


def same_window(keys: Keys) -> tuple[int, ...]:
    if keys.get("sliding_window") is None:
        return ()
    return (keys.integer("sliding_window"),) * num_layers(keys)


def qwen_windows(keys: Keys) -> tuple[int, ...]:
    if not keys.flag("use_sliding_window") or keys.get("sliding_window") is None:
        return ()
    layers = range(num_layers(keys))
    first = 0 if keys.get("max_window_layers") == 0 else keys.integer("max_window_layers")  # 0: every layer has one
    types = keys.sequence("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in layers
    ]
    return windows_of_types(keys, types)


def pattern_windows(keys: Keys, period: int) -> tuple[int, ...]:
    """Every `period`-th layer sees everything, the others a window."""
    layers = range(num_layers(keys))
    types = keys.sequence("layer_types") or [
        "sliding_attention" if (layer + 1) % period else "full_attention" for layer in layers
    ]
    return windows_of_types(keys, types)


def windows_of_types(keys: Keys, types: list[str]) -> tuple[int, ...]:
    if len(types) != num_layers(keys):
        raise keys.damaged("layer_types", f"{num_layers(keys)} entries")
    unknown = [kind for kind in types if kind not in ("sliding_attention", "full_attention")]
    if unknown:
        raise keys.unsupported("layer_types", unknown[0])
    window = keys.integer("sliding_window") if "sliding_attention" in types else 0
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
