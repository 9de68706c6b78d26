"""What transformers' config classes assume where a `config.json` is silent, per model_type. Data only.

Old files leave out keys that had a default when they were written, so the table is part of the format.
"""

from __future__ import annotations

from typing import Any

SHARED_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "use_bidirectional_attention": False,
}
_QWEN_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_MISTRAL_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
_LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_OLMO_DEFAULTS: dict[str, Any] = _LLAMA_SIZES | {"vocab_size": 50_304, "rms_norm_eps": 1e-5}
_GRANITE_DEFAULTS: dict[str, Any] = _LLAMA_SIZES | {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}
_GLM_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_COHERE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 8192,
    "intermediate_size": 22_528,
    "logit_scale": 0.0625,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 500_000.0,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_SIZES,
    "mistral": _MISTRAL_DEFAULTS,
    "mixtral": _MISTRAL_DEFAULTS
    | {
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "rope_theta": 1e6,
    },
    "qwen2": _QWEN_DEFAULTS,
    "qwen3": _QWEN_DEFAULTS | {"head_dim": 128},
    "qwen3_moe": _QWEN_DEFAULTS
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
        "mlp_only_layers": [],
    },
    "gemma2": _GEMMA_DEFAULTS | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
    "gemma3_text": _GEMMA_DEFAULTS
    | {
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
    },
    "opt": {
        "vocab_size": 50_272,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "ffn_dim": 3072,
        "max_position_embeddings": 2048,
        "num_attention_heads": 12,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True,
    },
    "phi3": _LLAMA_SIZES
    | {
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "smollm3": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
    },
    "olmo2": _OLMO_DEFAULTS,
    "olmo3": _OLMO_DEFAULTS | {"sliding_window": 4096, "rope_theta": 500_000.0},
    "granite": _GRANITE_DEFAULTS,
    "granitemoehybrid": _GRANITE_DEFAULTS | {"num_local_experts": 8, "shared_intermediate_size": 1024},
    "starcoder2": {
        "vocab_size": 49_152,
        "hidden_size": 3072,
        "intermediate_size": 12_288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    "glm": _GLM_DEFAULTS,
    "glm4": _GLM_DEFAULTS,
    "cohere": _COHERE_DEFAULTS,
    "cohere2": _COHERE_DEFAULTS | {"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 10_000.0},
}
