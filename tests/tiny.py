"""Builders of tiny random models in the form that transformers saves: a folder with config, weights and tokenizer.

Every parameter is drawn anew, norms and biases included, so that a reader that swaps two of them cannot pass.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 307  # 256 bytes, a few special tokens, and rows that no text reaches
CONTEXT = 256
EOS = 256  # <|end|>

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": CONTEXT,
    "num_hidden_layers": 3,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": None,
}
_GQA: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
_WIDE_HEADS: dict[str, Any] = _GQA | {"hidden_size": 36, "num_attention_heads": 4, "head_dim": 16}  # 4·16 != 36
_GEMMA: dict[str, Any] = _WIDE_HEADS | {
    "num_hidden_layers": 4,
    "sliding_window": 12,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}
_MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **values}}


# Name -> (model_type, keyword arguments of its config class).
TINY_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GQA),
    "llama_tied": ("llama", _GQA | {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama_bias": ("llama", _GQA | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama_linear": ("llama", _GQA | _rope("linear", factor=2.0)),
    "llama_llama3": (
        "llama",
        _GQA
        | _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama_yarn": ("llama", _GQA | _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral": ("mistral", _WIDE_HEADS | {"sliding_window": 12}),
    "mistral_full": ("mistral", _WIDE_HEADS | {"sliding_window": None}),
    "qwen2": ("qwen2", _GQA | {"tie_word_embeddings": True}),
    "qwen2_window": ("qwen2", _GQA | {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    "qwen3": ("qwen3", _WIDE_HEADS | {"tie_word_embeddings": True}),
    "qwen3_bias": ("qwen3", _WIDE_HEADS | {"attention_bias": True}),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3": ("gemma3_text", _GEMMA | {"sliding_window_pattern": 3}),
    "opt": (
        "opt",
        {"hidden_size": 48, "ffn_dim": 88, "num_attention_heads": 6, "word_embed_proj_dim": 48},
    ),
    "mixtral": ("mixtral", _GQA | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": (
        "qwen3_moe",
        _WIDE_HEADS
        | {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    # A head of 8 turns in 6 dimensions; every sequence is longer than the original context, so that the long factors
    # are the ones in use.
    "phi3": (
        "phi3",
        _GQA
        | {"original_max_position_embeddings": 4}
        | _rope("longrope", short_factor=[1.0] * 3, long_factor=[1.5, 2.5, 4.0], partial_rotary_factor=0.75),
    ),
    "smollm3": ("smollm3", _GQA | {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", _GQA),
    "olmo3": (
        "olmo3",
        _GQA
        | {
            "sliding_window": 12,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": _rope("yarn", factor=4.0, original_max_position_embeddings=64)["rope_parameters"],
                "sliding_attention": _rope("default")["rope_parameters"],
            },
        },
    ),
    "granite": ("granite", _GQA | _MULTIPLIERS),
    "granite_hybrid": (
        "granitemoehybrid",
        _GQA
        | _MULTIPLIERS
        | {
            "num_hidden_layers": 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 88,
            "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "rope",
            "mamba_n_heads": 8,
        },
    ),
    "starcoder2": ("starcoder2", _GQA | {"sliding_window": 12}),
    "glm4": ("glm4", _WIDE_HEADS | {"attention_bias": True}),
    "cohere": ("cohere", _GQA | {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "gpt_oss": (
        "gpt_oss",
        _WIDE_HEADS
        | {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 12,
            "swiglu_limit": 1.5,  # which a tiny model reaches
        }
        | _rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {
            "hidden_size": 48,
            "intermediate_size": 88,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "q_lora_rank": None,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "routed_scaling_factor": 1.5,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "tie_word_embeddings": False,
        }
        | _rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.9),
    ),
    "cohere2": ("cohere2", _WIDE_HEADS | {"sliding_window": 12, "sliding_window_pattern": 2, "logit_scale": 0.25}),
}

_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "intermediate_size": 88,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Name -> (model_type, arguments, what sentence-transformers would do with the states: pooling, normalise).
TINY_ENCODERS: dict[str, tuple[str, dict[str, Any], tuple[str, bool] | None]] = {
    "bert": ("bert", _ENCODER | {"max_position_embeddings": 160}, ("cls_token", True)),
    "xlm_roberta": ("xlm-roberta", _ENCODER | {"max_position_embeddings": 162}, ("mean_tokens", False)),
    "modernbert": (
        "modernbert",
        _ENCODER | {"max_position_embeddings": 160, "local_attention": 12, "cls_token_id": None, "sep_token_id": None},
        None,
    ),
}


def tiny_encoder(name: str, seed: int = 0, labels: int = 0) -> Any:
    """Or, with labels, one that classifies; into one class: a cross-encoder."""
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    model_type, arguments, _ = TINY_ENCODERS[name]
    config = AutoConfig.for_model(model_type, **arguments, **({"num_labels": labels} if labels else {}))
    kind = AutoModelForSequenceClassification if labels else AutoModel
    return _drawn(kind.from_config(config, attn_implementation="eager").eval(), seed)


def save_tiny_encoder(name: str, folder: Path, seed: int = 0, labels: int = 0) -> None:
    """With a tokenizer that puts its tokens around a text, as those of encoders do."""
    tiny_encoder(name, seed, labels).save_pretrained(folder)
    save_tiny_tokenizer(folder, around=("<|system|>", "<|end|>"))
    pooling = TINY_ENCODERS[name][2]
    if pooling is None or labels:
        return
    kinds = ["Transformer", "Pooling", *(["Normalize"] if pooling[1] else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in zip(kinds, paths, strict=False)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    flags = {f"pooling_mode_{mode}": mode == pooling[0] for mode in ("cls_token", "mean_tokens", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **flags}))


def tiny_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """The transformers model itself, in float32 and eval mode; `changes` override the config's arguments."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, arguments = TINY_CONFIGS[name]
    config = AutoConfig.for_model(model_type, **(_COMMON | arguments | changes))
    return _drawn(
        AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval(), seed
    )


def _drawn(model: Any, seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            # A norm stays near its 1 (or Gemma's 0), a bias near its 0; these two are drawn when a model is made.
            keep = 1.0 if parameter.ndim == 1 and not name.endswith((".sinks", ".router.bias")) else 0.0
            parameter.mul_(keep).add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
    return model


def save_tiny(name: str, folder: Path, seed: int = 0, **changes: Any) -> None:
    """Write the model and a byte-level tokenizer, as a download from a hub would look."""
    tiny_model(name, seed, **changes).save_pretrained(folder)
    save_tiny_tokenizer(folder)


def save_tiny_tokenizer(folder: Path, around: tuple[str, str] | None = None) -> None:
    """One token per byte, ids 0..255 in byte order, then the special tokens of CHAT_TEMPLATE; every text is put between
    the two of them that are given as `around`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = _byte_characters()
    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if around is not None:
        ids = [(text, tokenizer.token_to_id(text)) for text in around]
        single = f"{around[0]} $A {around[1]}"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=f"{single} $B:1 {around[1]}:1", special_tokens=ids
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": "<|end|>", "bos_token": None, "sep_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]
