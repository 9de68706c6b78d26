"""HF folders: every family's canonical tensors against transformers' own parameters, and every way to be broken."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import TINY_CONFIGS, save_tiny, tiny_model

from dovetail.errors import CheckpointError, DamagedCheckpoint, UnsupportedModel
from dovetail.modelspec import ModelSpec
from dovetail.node.ports import Checkpoint
from dovetail.store import describe, open_checkpoint
from dovetail.store.format.arrays import to_float32

TinyFolder = Callable[[str], Path]


def whole(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The tensor as one float32 array."""
    pieces = [to_float32(piece) for piece in checkpoint.pieces(name)]
    flat = np.concatenate([piece.reshape(-1) for piece in pieces])
    assert flat.size == np.prod(shape), f"{name}: {flat.size} values for shape {shape}"
    return flat.reshape(shape)


# Families that keep other parts than Llama does, or elsewhere. Rows of q and k that change places, and matrices that
# are transposed, are the engine's to test, against logits.
OTHERS: dict[str, dict[str, str]] = {
    "phi3": {"gate_up.weight": "mlp.gate_up_proj.weight", "mlp_norm.weight": "post_attention_layernorm.weight"},
    "olmo2": {
        "k_norm.weight": "self_attn.k_norm.weight",
        "post_attn_norm.weight": "post_attention_layernorm.weight",
        "post_mlp_norm.weight": "post_feedforward_layernorm.weight",
    },
    "granite_hybrid": {
        "gate_up.weight": "shared_mlp.input_linear.weight",
        "down.weight": "shared_mlp.output_linear.weight",
    },
    "starcoder2": {
        "up.bias": "mlp.c_fc.bias",
        "down.weight": "mlp.c_proj.weight",
        "attn_norm.bias": "input_layernorm.bias",
    },
    "glm4": {
        "gate_up.weight": "mlp.gate_up_proj.weight",
        "post_attn_norm.weight": "post_self_attn_layernorm.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        "post_mlp_norm.weight": "post_mlp_layernorm.weight",
    },
    "cohere": {"attn_norm.weight": "input_layernorm.weight", "out.weight": "self_attn.o_proj.weight"},
}
OTHERS |= {
    "gpt_oss": {
        "qkv.bias": "self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias",
        "sinks.weight": "self_attn.sinks",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        "router.bias": "mlp.router.bias",
    },
    "deepseek_v2": {
        "kv_norm.weight": "self_attn.kv_a_layernorm.weight",
        "out.weight": "self_attn.o_proj.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
    },
}
OTHERS |= {"olmo3": OTHERS["olmo2"], "cohere2": OTHERS["cohere"]}


def layer_parameters(spec: ModelSpec, state: dict[str, Any], layer: int) -> dict[str, Any]:
    """Canonical tensors of one layer, fused from a transformers state dict by a second, independent reading."""
    prefix = next(name.split("layers.0.")[0] for name in state if "layers.0." in name)
    ours: dict[str, Any] = {}

    def take(*names: str) -> Any:
        return np.concatenate([state[f"{prefix}layers.{layer}.{name}"].numpy() for name in names])

    if spec.family in OTHERS:
        return {canonical: take(*names.split()) for canonical, names in OTHERS[spec.family].items()}
    for kind in ("weight", "bias"):
        if kind == "weight" or spec.qkv_bias:
            ours[f"qkv.{kind}"] = take(*(f"self_attn.{part}_proj.{kind}" for part in "qkv"))
    if spec.qk_norm:
        ours["q_norm.weight"], ours["k_norm.weight"] = take("self_attn.q_norm.weight"), take("self_attn.k_norm.weight")
    if spec.family == "opt":
        ours["attn_norm.bias"], ours["up.bias"] = take("self_attn_layer_norm.bias"), take("fc1.bias")
        ours["mlp_norm.weight"], ours["down.weight"] = take("final_layer_norm.weight"), take("fc2.weight")
        return ours
    ours["attn_norm.weight"] = take("input_layernorm.weight")
    ours["out.weight"] = take("self_attn.o_proj.weight")
    if spec.is_moe_layer(layer):
        ours["router.weight"] = take("mlp.gate.weight")
        ours["experts.gate_up.weight"] = take("mlp.experts.gate_up_proj")
        ours["experts.down.weight"] = take("mlp.experts.down_proj")
    else:
        ours["gate_up.weight"] = take("mlp.gate_proj.weight", "mlp.up_proj.weight")
        ours["down.weight"] = take("mlp.down_proj.weight")
    if spec.sandwich_norm:
        ours["mlp_norm.weight"] = take("pre_feedforward_layernorm.weight")
        ours["post_attn_norm.weight"] = take("post_attention_layernorm.weight")
        ours["post_mlp_norm.weight"] = take("post_feedforward_layernorm.weight")
        return {name: value + np.float32(1) if "norm" in name else value for name, value in ours.items()}
    ours["mlp_norm.weight"] = take("post_attention_layernorm.weight")
    return ours


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_every_canonical_tensor_has_the_shape_and_the_values_of_transformers(
    name: str, tiny_folder: TinyFolder
) -> None:
    checkpoint = open_checkpoint(tiny_folder(name))
    spec = checkpoint.spec
    tensors = {key: whole(checkpoint, key, shape) for key, shape in spec.tensors()}
    model = tiny_model(name)
    state = model.state_dict()
    for layer in range(spec.num_layers):
        for key, value in layer_parameters(spec, state, layer).items():
            np.testing.assert_array_equal(tensors[f"layers.{layer}.{key}"], value, err_msg=f"layer {layer} {key}")
    np.testing.assert_array_equal(tensors["embed.weight"], model.get_input_embeddings().weight.detach().numpy())
    assert ("lm_head.weight" in tensors) != spec.tied_embeddings
    if not spec.tied_embeddings:
        np.testing.assert_array_equal(tensors["lm_head.weight"], state["lm_head.weight"].numpy())
    assert spec.num_parameters() == sum(value.size for value in tensors.values())
    assert spec.num_parameters() == model.num_parameters()


def test_a_sharded_folder_reads_like_a_whole_one(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    one, many = open_checkpoint(tiny_folder("qwen3")), open_checkpoint(tmp_path)
    for name, shape in one.spec.tensors():
        np.testing.assert_array_equal(whole(one, name, shape), whole(many, name, shape))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_folders_are_read_in_place(dtype: str, tmp_path: Path) -> None:
    import torch

    model = tiny_model("llama").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    (piece,) = checkpoint.pieces("layers.1.out.weight")
    assert piece.dtype == {"bfloat16": "bf16", "float16": "f16"}[dtype]
    wanted = model.model.layers[1].self_attn.o_proj.weight.detach().float().numpy()
    np.testing.assert_array_equal(whole(checkpoint, "layers.1.out.weight", piece.shape), wanted)


@pytest.mark.parametrize("prefix", ["", "language_model.model.", "model.language_model."])
def test_names_are_found_under_any_known_prefix(prefix: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder("gemma3"), tmp_path)
    rewrite(folder, lambda tensors: {prefix + name.removeprefix("model."): value for name, value in tensors.items()})
    checkpoint, original = open_checkpoint(folder), open_checkpoint(tiny_folder("gemma3"))
    for name, shape in original.spec.tensors():
        np.testing.assert_array_equal(whole(checkpoint, name, shape), whole(original, name, shape))


def test_experts_fused_as_transformers_keeps_them_in_memory_are_read_too(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    folder = copied(tiny_folder("mixtral"), tmp_path)
    save_file(
        {key: value.clone() for key, value in tiny_model("mixtral").state_dict().items()}, folder / "model.safetensors"
    )
    fused, separate = open_checkpoint(folder), open_checkpoint(tiny_folder("mixtral"))
    for name, shape in separate.spec.tensors():
        np.testing.assert_array_equal(whole(fused, name, shape), whole(separate, name, shape))


def test_a_tied_model_with_an_equal_lm_head_stays_tied(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder("llama_tied"), tmp_path)
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()})
    assert open_checkpoint(folder).spec.tied_embeddings


def test_a_tied_model_with_an_lm_head_of_its_own_is_not_tied(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder("llama_tied"), tmp_path)
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    assert not open_checkpoint(folder).spec.tied_embeddings


def test_a_tied_model_that_keeps_only_the_lm_head_is_read(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder("llama_tied"), tmp_path)
    rewrite(folder, lambda tensors: rename(tensors, "model.embed_tokens.weight", "lm_head.weight"))
    checkpoint, original = open_checkpoint(folder), open_checkpoint(tiny_folder("llama_tied"))
    shape = (original.spec.vocab_size, original.spec.hidden_size)
    assert checkpoint.spec.tied_embeddings
    np.testing.assert_array_equal(whole(checkpoint, "embed.weight", shape), whole(original, "embed.weight", shape))


def test_a_missing_tensor_is_named(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder("llama"), tmp_path)
    rewrite(folder, lambda tensors: without(tensors, "model.layers.1.mlp.up_proj.weight"))
    expect(DamagedCheckpoint, folder, "model.layers.1.mlp.up_proj.weight is missing")


def test_a_wrong_shape_is_named_with_both_shapes(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder("llama"), tmp_path)
    rewrite(folder, lambda tensors: tensors | {"model.norm.weight": np.zeros(7, np.float32)})
    expect(DamagedCheckpoint, folder, "model.norm.weight has shape [7], config.json asks for [48]")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    victim = sorted(tmp_path.glob("model-*.safetensors"))[1]
    victim.unlink()
    expect(DamagedCheckpoint, tmp_path, f"shard {victim.name} is missing")


def test_an_index_cannot_point_out_of_the_folder(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder("llama"), tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    expect(DamagedCheckpoint, folder, "is not the name of a file in this folder")


def test_pickled_weights_are_refused_and_never_read(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder("llama"), tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    expect(UnsupportedModel, folder, "weights only as pickle (pytorch_model.bin)")


def test_a_folder_without_weights_says_so(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder("llama"), tmp_path)
    (folder / "model.safetensors").unlink()
    expect(DamagedCheckpoint, folder, "no weights")


def test_a_folder_without_config_says_so(tmp_path: Path) -> None:
    expect(DamagedCheckpoint, tmp_path, "config.json is missing")
    expect(DamagedCheckpoint, tmp_path / "nowhere", "no such file or folder")


def test_a_config_that_is_not_json_says_so(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder("llama"), tmp_path)
    (folder / "config.json").write_text("{")
    expect(DamagedCheckpoint, folder, "config.json: not valid JSON")


def test_a_card_has_what_the_gateway_needs(tiny_folder: TinyFolder) -> None:
    card = describe(tiny_folder("qwen2"), "mine")
    assert (card.name, card.dtype, card.eos_token, card.eos_token_ids) == ("mine", "f32", "<|end|>", (256,))
    assert Path(card.tokenizer_file).is_file()
    assert card.chat_template is not None
    assert card.size_bytes > 4 * card.spec.num_parameters()


def test_chat_templates_are_found_wherever_transformers_keeps_them(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder("llama"), tmp_path)
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert describe(folder, "m").chat_template == "D"
    (folder / "chat_template.json").write_text('{"chat_template": "J"}')
    assert describe(folder, "m").chat_template == "J"
    (folder / "chat_template.jinja").write_text("F")
    assert describe(folder, "m").chat_template == "F"


def test_generation_config_gives_end_tokens_and_defaults(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder("llama"), tmp_path)
    settings = {"eos_token_id": [7, 9], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    card = describe(folder, "m")
    assert card.eos_token_ids == (7, 9, 256)  # the authors', then the tokenizer's own
    assert (card.defaults.temperature, card.defaults.top_k, card.defaults.top_p) == (0.6, 20, 0.9)
    assert card.defaults.repetition_penalty == 1.1


def test_a_tokenizer_model_alone_is_refused_with_the_way_out(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = copied(tiny_folder("llama"), tmp_path)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        describe(folder, "m")


def test_save_tiny_is_reproducible(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (tiny_folder("llama") / "model.safetensors").read_bytes()


def copied(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target / "model"))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    from safetensors.numpy import load_file, save_file

    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def rename(tensors: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: value for name, value in tensors.items()}


def without(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in tensors.items() if key != name}


def expect(kind: type[CheckpointError], path: Path, text: str) -> None:
    with pytest.raises(kind) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert text in message
    assert str(path) in message
    assert "\n" not in message


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer_config.json", "generation_config.json"]
)
def test_a_pipe_instead_of_a_file_is_an_error_and_not_waited_for(
    tiny_folder: TinyFolder, tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "piped")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError):
        describe(folder, "piped")


def test_weights_of_whole_numbers_are_refused_before_they_are_served(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder("llama"), tmp_path / "whole")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    save_file(weights | {name: weights[name].astype(np.int32)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=f"{name}: dtype I32 is not supported"):
        describe(folder, "whole")
