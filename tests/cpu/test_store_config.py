"""config.json to ModelSpec: defaults and spellings as transformers reads them; what is not implemented is refused."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from tiny import TINY_CONFIGS

from dovetail.errors import CheckpointError, DamagedCheckpoint, UnsupportedModel
from dovetail.modelspec import ModelSpec
from dovetail.store.format.arrange import arrange
from dovetail.store.hf.config import spec_from_config
from dovetail.store.hf.defaults import DEFAULTS

LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}

# As found in the wild, written by transformers 4 and older.
OLD_CONFIGS: dict[str, dict[str, Any]] = {
    "llama 3.1": {
        "model_type": "llama",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rope_scaling": LLAMA3_SCALING,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    },
    "llama 1, before most keys existed": {"model_type": "llama", "max_sequence_length": 2048, "rms_norm_eps": 1e-06},
    "linear scaling under its old name": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "mistral 0.1": {"model_type": "mistral", "sliding_window": 4096, "rope_theta": 10000.0},
    "mistral 0.3": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "rope_theta": 1000000.0, "sliding_window": None},
    "qwen2.5 with its long-context recipe": {
        "model_type": "qwen2",
        "max_window_layers": 28,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "qwen2 with windows": {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 21},
    "qwen3": {"model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 1024},
    "qwen3 moe": {
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 2,
        "head_dim": 128,
        "mlp_only_layers": [3],
        "norm_topk_prob": True,
        "num_experts": 64,
    },
    "gemma 2": {
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 224,
        "sliding_window": 4096,
    },
    "gemma 3, text": {
        "model_type": "gemma3_text",
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "gemma 3 with scaled global layers": {
        "model_type": "gemma3_text",
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "opt": {"model_type": "opt", "ffn_dim": 3072, "word_embed_proj_dim": 768, "_remove_final_layer_norm": False},
    "phi 3.5": {
        "model_type": "phi3",
        "max_position_embeddings": 131072,
        "rope_scaling": {"type": "longrope", "short_factor": [1.05] * 48, "long_factor": [2.5] * 48},
        "sliding_window": 262144,
    },
    "phi 4 mini, which turns in part": {
        "model_type": "phi3",
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.5] * 48},
    },
    "smollm 3": {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0] * 9, "rope_theta": 5000000.0},
    "olmo 3": {
        "model_type": "olmo3",
        "max_position_embeddings": 65536,
        "rope_theta": 500000,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    },
    "granite 3": {"model_type": "granite", "residual_multiplier": 0.22, "logits_scaling": 8.0, "rope_theta": 1e7},
    "granite 4": {
        "model_type": "granitemoehybrid",
        "num_local_experts": 0,
        "layer_types": ["attention"] * 32,
        "position_embedding_type": "rope",
        "shared_intermediate_size": 8192,
    },
    "starcoder 2": {"model_type": "starcoder2", "rope_theta": 999999.4420358813, "sliding_window": 4096},
    "glm 4": {"model_type": "glm4", "partial_rotary_factor": 0.5, "rope_theta": 10000.0},
    "command r": {"model_type": "cohere", "rope_theta": 8000000.0, "logit_scale": 0.0625, "use_qk_norm": False},
    "command r7b": {"model_type": "cohere2", "sliding_window_pattern": 4, "rope_theta": 50000.0, "head_dim": 128},
    "gpt oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "experts_per_token": 4,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "initial_context_length": 4096,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    },
    "deepseek v2 lite": {
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "softmax",
        "max_position_embeddings": 163840,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
    },
    "modernbert": {"model_type": "modernbert", "global_rope_theta": 80000.0, "global_attn_every_n_layers": 2},
}


# What is silent about this means what is refused: experts and state spaces, queries made of a latent.
SAID: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"num_local_experts": 0, "layer_types": ["attention"] * 32},
    "deepseek_v2": {"q_lora_rank": None, "num_experts_per_tok": 6},
}


def through_transformers(config: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig

    arguments = {key: value for key, value in config.items() if key != "model_type"}
    converted: dict[str, Any] = AutoConfig.for_model(config["model_type"], **arguments).to_dict()
    return converted


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_a_key_left_out_means_what_transformers_takes_it_to_mean(model_type: str) -> None:
    bare = {"model_type": model_type, **SAID.get(model_type, {})}
    assert spec_from_config(bare) == spec_from_config(through_transformers(bare))


@pytest.mark.parametrize("config", OLD_CONFIGS.values(), ids=OLD_CONFIGS)
def test_an_old_config_means_the_same_as_what_transformers_5_makes_of_it(config: dict[str, Any]) -> None:
    assert spec_from_config(config) == spec_from_config(through_transformers(config))


def test_a_multimodal_gemma_3_is_read_as_its_language_model() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    text["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    spec = spec_from_config({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}})
    assert (spec.family, spec.num_heads, spec.head_dim, spec.vocab_size) == ("gemma3", 8, 256, 262208)
    assert (spec.rope.kind, spec.rope.factor, spec.rope.theta) == ("linear", 8.0, 1e6)
    assert spec.rope_local is not None
    assert (spec.rope_local.kind, spec.rope_local.theta) == ("default", 1e4)
    assert [layer for layer in range(34) if spec.window(layer) == 0] == [5, 11, 17, 23, 29]


def test_gemma_scales_are_spelt_out() -> None:
    spec = spec_from_config({"model_type": "gemma2", "hidden_size": 3584, "query_pre_attn_scalar": 256})
    assert spec.embed_scale == math.sqrt(3584)
    assert spec.attention_scale == 1 / 16
    assert (spec.attention_softcap, spec.final_softcap) == (50.0, 30.0)
    assert [spec.window(layer) for layer in range(4)] == [4096, 0, 4096, 0]


def test_qwen3_moe_counts_dense_layers_by_list_and_by_step() -> None:
    spec = spec_from_config(OLD_CONFIGS["qwen3 moe"] | {"num_hidden_layers": 6})
    assert spec.dense_layers == (0, 2, 3, 4)


def test_deepseek_v2_lite_keeps_one_latent_per_token() -> None:
    spec = spec_from_config(OLD_CONFIGS["deepseek v2 lite"] | {"num_hidden_layers": 27})
    assert spec.kv_bytes_per_token("bf16") == 27 * (512 + 64) * 2
    assert spec.kv_bytes_per_token("bf16", "int8") == 27 * (512 + 64 + 4)
    growth = 0.1 * 0.707 * math.log(40) + 1
    assert spec.attention_scale == pytest.approx(192**-0.5 * growth**2)
    assert spec.rope.attention_factor == 1.0


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v2"])
def test_a_family_that_is_not_cut_for_several_devices_is_refused_by_name(name: str) -> None:
    model_type, arguments = TINY_CONFIGS[name]
    with pytest.raises(UnsupportedModel, match=f"a {name} model is not cut for several devices"):
        arrange(spec_from_config({"model_type": model_type, **arguments}), "f32", ranks=2)


def test_every_tiny_config_survives_the_round_trip_of_its_record() -> None:
    import msgspec

    for model_type, arguments in TINY_CONFIGS.values():
        spec = spec_from_config({"model_type": model_type, **arguments})
        assert msgspec.json.decode(msgspec.json.encode(spec), type=ModelSpec) == spec


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; the nearest that is: 'opt'"),
    ({"model_type": "qwen2_5_vl_text"}, "'qwen2_5_vl_text' is not supported; the nearest that is: 'qwen2'"),
    ({"model_type": "cohere", "use_qk_norm": True}, "use_qk_norm = True"),
    ({"model_type": "granitemoehybrid", "num_local_experts": 0, "layer_types": ["mamba"] * 32}, "'mamba'"),
    ({"model_type": "granitemoehybrid"}, "num_local_experts = 8"),
    ({"model_type": "deepseek_v2", "num_experts_per_tok": 6}, "q_lora_rank = 1536"),
    ({"model_type": "deepseek_v2", **SAID["deepseek_v2"], "topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
    (
        {"model_type": "deepseek_v2", **SAID["deepseek_v2"], "norm_topk_prob": True, "routed_scaling_factor": 16.0},
        "routed_scaling_factor = 16.0",
    ),
    ({"model_type": "deepseek_v3"}, "'deepseek_v3' is not supported; the nearest that is: 'deepseek_v2'"),
    ({"model_type": "llama", "quantization_config": {"quant_method": "mxfp4"}}, "quantization_config (mxfp4)"),
    ({}, "model_type 'None' is not supported"),
    ({"model_type": "llama", "hidden_act": "mish"}, "hidden_act = 'mish'"),
    ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
    ({"model_type": "llama", "rope_parameters": {"rope_type": "proportional"}}, "rope_type = 'proportional'"),
    ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ({"model_type": "llama", "head_dim": 33}, "head_dim = 33"),
    ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "quantization_config (gptq)"),
    ({"model_type": "opt", "word_embed_proj_dim": 512, "hidden_size": 1024}, "word_embed_proj_dim = 512"),
    ({"model_type": "opt", "do_layer_norm_before": False}, "do_layer_norm_before = False"),
    ({"model_type": "opt", "layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine = False"),
    ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["chunked_attention"] * 32}, "chunked"),
]
DAMAGED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama", "hidden_size": "4096"}, "hidden_size: expected a whole number above 0, got '4096'"),
    ({"model_type": "llama", "num_hidden_layers": -1}, "num_hidden_layers: expected a whole number above 0, got -1"),
    ({"model_type": "llama", "rms_norm_eps": None}, "rms_norm_eps: expected a number, got None"),
    ({"model_type": "llama", "rope_scaling": {"type": "linear"}}, "factor: expected a number, got nothing"),
    ({"model_type": "llama", "num_key_value_heads": 5}, "num_key_value_heads: expected a divisor"),
    ({"model_type": "phi3", "rope_scaling": {"type": "su"}}, "short_factor: expected a list of numbers above 0"),
    ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok: expected at most 8"),
    ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types: expected 26 entries"),
]


@pytest.mark.parametrize(("config", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_the_engine_does_not_implement_is_refused_by_key_and_value(config: dict[str, Any], text: str) -> None:
    expect(UnsupportedModel, config, text)


@pytest.mark.parametrize(("config", "text"), DAMAGED, ids=[text for _, text in DAMAGED])
def test_a_wrong_value_is_reported_by_key(config: dict[str, Any], text: str) -> None:
    expect(DamagedCheckpoint, config, text)


JUNK: list[Any] = [None, True, -1, 0, 1, "x", [], {}, [1, "a"], {"a": 1}, 1e300, math.nan, 10**12]
KEYS = ["rope_scaling", "rope_theta", "quantization_config", "layer_types", "text_config", "mlp_only_layers"]


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_no_value_of_any_key_leads_to_anything_but_a_spec_or_an_error_of_ours(name: str) -> None:
    model_type, arguments = TINY_CONFIGS[name]
    config = through_transformers({"model_type": model_type, **arguments})
    rope = config.get("rope_parameters") or {}
    damaged = [{**config, key: junk} for key in [*config, *KEYS] for junk in JUNK]
    damaged += [{**config, "rope_parameters": {**rope, key: junk}} for key in rope for junk in JUNK]
    for candidate in damaged:
        with contextlib.suppress(CheckpointError):
            spec_from_config(candidate)


def expect(kind: type[CheckpointError], config: dict[str, Any], text: str) -> None:
    with pytest.raises(kind) as caught:
        spec_from_config(config, "there/config.json")
    assert text in str(caught.value)
    assert str(caught.value).startswith("there/config.json: ")
