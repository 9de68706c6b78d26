"""Writes the tiny models as GGUF the way llama.cpp's converter does: its tensor names, its row order, its metadata.

Names come from the `gguf` package's own map, so that a mistake in the reader's table cannot hide behind the same
mistake here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny import tiny_model

Q = gguf.GGMLQuantizationType
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "olmo3": gguf.MODEL_ARCH.OLMO2,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
    "glm4": gguf.MODEL_ARCH.GLM4,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
}
# What the converter brings into the order of its own rotation; the others' rows stay as HF has them.
PERMUTED = (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.SMOLLM3, gguf.MODEL_ARCH.GRANITE)


def save_tiny_gguf(
    name: str,
    path: Path,
    kind: gguf.GGMLQuantizationType = Q.F32,
    adjust: Callable[[gguf.GGUFWriter], None] | None = None,
    replace: Mapping[str, tuple[np.ndarray[Any, Any], gguf.GGMLQuantizationType]] | None = None,
    drop: Collection[str] = (),
    **changes: Any,
) -> None:
    """`adjust` may add metadata; `replace` swaps or adds tensors by GGUF name, as raw data of a type; `drop` omits."""
    model = tiny_model(name, **changes)
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_metadata(writer, config)
    _add_tokenizer(writer, config.vocab_size)
    if adjust is not None:
        adjust(writer)
    tensors = {name: quantised(value, kind, name) for name, value in _tensors(model, architecture).items()}
    for gguf_name, (data, its_kind) in {**tensors, **(replace or {})}.items():
        if gguf_name not in drop:
            writer.add_tensor(gguf_name, data, raw_dtype=its_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantised(
    value: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType, name: str = ""
) -> tuple[np.ndarray[Any, Any], Any]:
    """Vectors stay in float32, as llama.cpp keeps them, those of a stack too."""
    return (value, Q.F32) if value.ndim == 1 or name.endswith(".bias") else (gguf.quants.quantize(value, kind), kind)


def _add_metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    for key, add in (
        ("rms_norm_eps", writer.add_layer_norm_rms_eps),
        ("norm_epsilon", writer.add_layer_norm_eps),
        ("layer_norm_eps", writer.add_layer_norm_eps),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("attention_multiplier", writer.add_attention_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("logit_scale", writer.add_logit_scale),
    ):
        if getattr(config, key, None) is not None:
            add(getattr(config, key))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type in ("gemma3_text", "olmo3"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    experts = getattr(config, "num_local_experts", None) or getattr(config, "n_routed_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if config.model_type == "deepseek_v2":
        _add_latent_metadata(writer, config, rope)


def _add_latent_metadata(writer: gguf.GGUFWriter, config: Any, rope: dict[str, Any]) -> None:
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    from tiny import _byte_characters

    tokens = [*_byte_characters(), *(f"<|{index}|>" for index in range(256, vocab_size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * (vocab_size - 256))
    writer.add_eos_token_id(256)


def _tensors(model: Any, architecture: gguf.MODEL_ARCH) -> dict[str, np.ndarray[Any, Any]]:
    config = model.config
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    found: dict[str, np.ndarray[Any, Any]] = {}
    for hf_name, parameter in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = parameter.numpy()
        if architecture in PERMUTED and (".q_proj." in hf_name or ".k_proj." in hf_name):
            heads = config.num_attention_heads if ".q_proj." in hf_name else config.num_key_value_heads
            value = permuted(value, heads)
        if config.model_type.startswith("gemma") and "norm" in hf_name:
            value = value + np.float32(1)
        special = {"gpt_oss": _of_gpt_oss, "deepseek_v2": _of_deepseek}.get(config.model_type)
        found.update((special(hf_name, value, config) if special else None) or _named(names, hf_name, value))
    if "rope_type" in config.rope_parameters and config.rope_parameters["rope_type"] == "llama3":
        frequencies = model.model.rotary_emb.inv_freq.numpy()
        plain = config.rope_parameters["rope_theta"] ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        found["rope_freqs.weight"] = (plain / frequencies).astype(np.float32)
    if config.rope_parameters.get("rope_type") == "longrope":
        for length in ("long", "short"):
            factors = np.array(config.rope_parameters[f"{length}_factor"], np.float32)
            found[f"rope_factors_{length}.weight"] = factors
    return found


def _named(names: gguf.TensorNameMap, hf_name: str, value: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    if "mlp.experts.gate_up_proj" in hf_name:
        layer = hf_name.split("layers.")[1].split(".")[0]
        gate, up = np.split(value, 2, axis=1)
        return {f"blk.{layer}.ffn_gate_exps.weight": gate.copy(), f"blk.{layer}.ffn_up_exps.weight": up.copy()}
    if "mlp.experts.down_proj" in hf_name:
        return {f"blk.{hf_name.split('layers.')[1].split('.')[0]}.ffn_down_exps.weight": value}
    found = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
    assert found is not None, hf_name
    return {found: value}


def _of_gpt_oss(hf_name: str, value: np.ndarray[Any, Any], config: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Gate and up interleaved, matrices [experts, in, out]; sinks without a suffix."""
    if hf_name.endswith(".sinks"):
        return {f"blk.{hf_name.split('.')[2]}.attn_sinks.weight": value}
    if "experts." not in hf_name:
        return {}
    prefix = f"blk.{hf_name.split('layers.')[1].split('.')[0]}."
    kind, rows = ("bias", value) if value.ndim == 2 else ("weight", value.swapaxes(1, 2))
    if "down_proj" in hf_name:
        return {f"{prefix}ffn_down_exps.{kind}": rows.copy()}
    gate, up = rows[:, 0::2].copy(), rows[:, 1::2].copy()
    return {f"{prefix}ffn_gate_exps.{kind}": gate, f"{prefix}ffn_up_exps.{kind}": up}


def _of_deepseek(hf_name: str, value: np.ndarray[Any, Any], config: Any) -> dict[str, np.ndarray[Any, Any]]:
    """What makes keys of a latent transposed, and apart from what makes values."""
    if "kv_b_proj" not in hf_name:
        return {}
    prefix = f"blk.{hf_name.split('layers.')[1].split('.')[0]}."
    heads = value.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    key, own = np.split(heads, [config.qk_nope_head_dim], axis=1)
    return {f"{prefix}attn_k_b.weight": key.swapaxes(1, 2).copy(), f"{prefix}attn_v_b.weight": own.copy()}


def permuted(value: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """llama.cpp's order: the two halves of each head interleaved."""
    halves = value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
