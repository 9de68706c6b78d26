"""GGUF: every architecture and type against the same model as an HF folder, and every way to be broken."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
from tiny import TINY_CONFIGS, save_tiny
from tiny_gguf import Q, permuted, save_tiny_gguf

from dovetail.errors import CheckpointError, DamagedCheckpoint, UnsupportedModel
from dovetail.modelspec import ModelSpec, rotary_order
from dovetail.node.ports import Checkpoint
from dovetail.store import open_checkpoint
from dovetail.store.format.arrays import to_float32
from dovetail.store.gguf.rope import llama3_factors

TinyFolder = Callable[[str], Path]

# GGUF keeps no query_pre_attn_scalar (llama.cpp knows it by model) and no norm_topk_prob (it is always on).
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "qwen3_moe": {"mlp_only_layers": []},
    # Nor do its readers know another period of layers that do not turn, or (StarCoder 2) a window.
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "starcoder2": {"sliding_window": None},
    "cohere2": {"sliding_window_pattern": 4, "num_hidden_layers": 4, "tie_word_embeddings": True},
    # Nor do they say where gates end (gpt-oss), or have a YaRN whose two factors differ and groups (DeepSeek).
    "gpt_oss": {"swiglu_limit": 7.0},
    "deepseek_v2": {
        "topk_method": "greedy",
        "rope_parameters": TINY_CONFIGS["deepseek_v2"][1]["rope_parameters"] | {"mscale": 0.9},
    },
}
ROUND = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}  # rows of whole blocks of 32


def whole(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.concatenate([to_float32(piece).reshape(-1) for piece in checkpoint.pieces(name)]).reshape(shape)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama_tied",
        "llama_bias",
        "llama_linear",
        "llama_llama3",
        "llama_yarn",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3",
        "mixtral",
        "qwen3_moe",
        "phi3",
        "smollm3",
        "olmo2",
        "olmo3",
        "granite",
        "starcoder2",
        "glm4",
        "cohere",
        "cohere2",
        "gpt_oss",
        "deepseek_v2",
    ],
)
def test_a_gguf_and_an_hf_folder_of_one_model_are_the_same(name: str, tmp_path: Path) -> None:
    changes = CHANGES.get(name, {})
    save_tiny(name, tmp_path / "hf", **changes)
    save_tiny_gguf(name, tmp_path / "model.gguf", **changes)
    theirs, ours = open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "model.gguf")
    assert ours.spec == comparable(theirs.spec, ours.spec)
    for key, shape in theirs.spec.tensors():
        np.testing.assert_array_equal(whole(ours, key, shape), whole(theirs, key, shape), err_msg=key)


def comparable(spec: Any, ours: Any) -> Any:
    """The HF spec where the two formats cannot say the same: an unscaled llama and a llama3 found by its factors."""
    assert abs((spec.attention_scale or 0) - (ours.attention_scale or 0)) < 1e-12
    if spec.rope.kind == "llama3":
        assert ours.rope.kind == "llama3"
        expected = llama3_factors(spec.rope.theta, spec.head_dim, spec.rope.factor, spec.rope.original_context)
        found = llama3_factors(ours.rope.theta, ours.head_dim, ours.rope.factor, ours.rope.original_context)
        np.testing.assert_allclose(found, expected, rtol=1e-4)
        return msgspec.structs.replace(spec, rope=ours.rope)
    return msgspec.structs.replace(spec, attention_scale=ours.attention_scale)


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q8_0, Q.Q5_1, Q.Q5_0, Q.Q4_1, Q.Q4_0, Q.MXFP4], ids=lambda q: q.name)
def test_quantised_matrices_come_out_as_gguf_dequantises_them(kind: Q, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "hf", **ROUND)
    save_tiny_gguf("llama", tmp_path / "model.gguf", kind, **ROUND)
    theirs, ours = open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "model.gguf")
    for key, shape in theirs.spec.tensors():
        exact = whole(theirs, key, shape)
        # Blocks run along a row, so quantising before or after rows change places is the same.
        expected = exact if exact.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(exact, kind), kind)
        np.testing.assert_array_equal(whole(ours, key, shape), expected, err_msg=key)


READABLE = [
    kind
    for kind in Q
    if kind.name not in ("Q8_1", "Q8_K", "Q1_0", "I8", "I16", "I32", "I64", "F64", "F32", "F16", "BF16")
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes hold the odd infinity
@pytest.mark.parametrize("kind", READABLE, ids=lambda q: q.name)
def test_every_type_that_gguf_can_dequantise_is_read(kind: Q, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(int(kind)).integers(0, 256, (32, 256 // block * size), dtype=np.uint8)
    save_tiny_gguf("llama", tmp_path / "m.gguf", replace={"blk.0.ffn_down.weight": (raw, kind)}, **sizes)
    found = whole(open_checkpoint(tmp_path / "m.gguf"), "layers.0.down.weight", (32, 256))
    np.testing.assert_array_equal(found, gguf.quants.dequantize(raw, kind))


def test_a_type_that_cannot_be_dequantised_is_named_before_anything_is_read(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    raw = np.zeros((32, gguf.GGML_QUANT_SIZES[Q.Q8_K][1]), np.uint8)
    save_tiny_gguf("llama", tmp_path / "m.gguf", replace={"blk.0.ffn_down.weight": (raw, Q.Q8_K)}, **sizes)
    expect(UnsupportedModel, tmp_path / "m.gguf", "blk.0.ffn_down.weight: type Q8_K cannot be dequantised")


def test_plain_floats_are_handed_out_in_place_and_large_tensors_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_gguf("qwen2", tmp_path / "m.gguf", Q.BF16)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    (piece,) = checkpoint.pieces("layers.0.out.weight")
    assert (piece.dtype, piece.data.readonly) == ("bf16", True)
    monkeypatch.setattr("dovetail.store.gguf.file._PIECE_BYTES", 4 * 48 * 100)
    pieces = checkpoint.pieces("embed.weight")
    assert [piece.shape for piece in pieces] == [(100, 48), (100, 48), (100, 48), (7, 48)]


def test_rows_permuted_by_llama_cpp_come_back_in_hf_order() -> None:
    from dovetail.store.gguf.file import _in_order

    value = np.arange(2 * 8 * 3, dtype=np.float32).reshape(16, 3)
    assert not np.array_equal(permuted(value, 2), value)
    order = rotary_order(ModelSpec("llama", 10, 16, 1, 2, 2, 8, 16, 32, pairs_side_by_side=True))
    assert order is not None
    np.testing.assert_array_equal(_in_order(permuted(value, 2), order), value)


def test_experts_kept_one_by_one_in_old_files_are_read(tmp_path: Path, tiny_folder: TinyFolder) -> None:
    from tiny import tiny_model

    model, replace, dropped = tiny_model("mixtral"), {}, set()
    for layer, block in enumerate(model.model.layers):
        gate_up, down = block.mlp.experts.gate_up_proj.detach().numpy(), block.mlp.experts.down_proj.detach().numpy()
        for expert in range(5):
            gate, up = np.split(gate_up[expert], 2)
            for part, value in (("gate", gate), ("up", up), ("down", down[expert])):
                replace[f"blk.{layer}.ffn_{part}.{expert}.weight"] = (np.ascontiguousarray(value), Q.F32)
                dropped.add(f"blk.{layer}.ffn_{part}_exps.weight")
    path = tmp_path / "m.gguf"
    save_tiny_gguf("mixtral", path, replace=replace, drop=dropped)
    ours, theirs = open_checkpoint(path), open_checkpoint(tiny_folder("mixtral"))
    for key, shape in theirs.spec.tensors():
        np.testing.assert_array_equal(whole(ours, key, shape), whole(theirs, key, shape), err_msg=key)


def test_gemma_27b_gets_the_scale_that_llama_cpp_gives_it(tmp_path: Path) -> None:
    small = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
    save_tiny_gguf("gemma2", tmp_path / "m.gguf", num_hidden_layers=46, intermediate_size=8, **small)
    assert open_checkpoint(tmp_path / "m.gguf").spec.attention_scale == 0.5  # 1/sqrt(8/2), not 1/sqrt(2)


def test_factors_of_another_kind_than_llama_3_are_refused(tmp_path: Path) -> None:
    factors = np.array([1.0, 3.0, 2.0, 9.0], np.float32)
    save_tiny_gguf("llama", tmp_path / "m.gguf", replace={"rope_freqs.weight": (factors, Q.F32)})
    expect(UnsupportedModel, tmp_path / "m.gguf", "rope_freqs.weight is not a scaling of the Llama 3 kind")


def test_an_unsupported_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expect(UnsupportedModel, tmp_path / "m.gguf", "'mamba' is not supported; the nearest that is: 'granite'")


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    save_tiny_gguf("llama", tmp_path / "m.gguf", adjust=lambda writer: writer.add_uint16("split.count", 3))
    expect(UnsupportedModel, tmp_path / "m.gguf", "one part of a split GGUF")


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path: Path) -> None:
    save_tiny_gguf("llama", tmp_path / "a.gguf", drop={"blk.2.ffn_up.weight"})
    expect(DamagedCheckpoint, tmp_path / "a.gguf", "tensor blk.2.ffn_up.weight is missing")
    save_tiny_gguf("llama", tmp_path / "b.gguf", replace={"output_norm.weight": (np.zeros(7, np.float32), Q.F32)})
    expect(DamagedCheckpoint, tmp_path / "b.gguf", "output_norm.weight has shape [7], the metadata asks for [48]")


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    save_tiny_gguf("llama", tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (5, 23, 100, 5_000, len(content) // 2, len(content) - 1):
        cut.write_bytes(content[:length])
        expect(DamagedCheckpoint, cut, "truncated")


def test_a_length_that_is_a_lie_is_found_at_once(tmp_path: Path) -> None:
    save_tiny_gguf("llama", tmp_path / "m.gguf")
    content = bytearray((tmp_path / "m.gguf").read_bytes())
    content[16:24] = (2**60).to_bytes(8, "little")  # the number of metadata entries
    (tmp_path / "m.gguf").write_bytes(content)
    expect(DamagedCheckpoint, tmp_path / "m.gguf", "")


def test_no_damage_to_a_header_leads_to_anything_but_a_model_or_an_error_of_ours(tmp_path: Path) -> None:
    save_tiny_gguf("llama", tmp_path / "m.gguf", num_hidden_layers=1)
    content = (tmp_path / "m.gguf").read_bytes()
    draw = random.Random(3)
    for _ in range(100):
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 2, 5])):
            damaged[draw.randrange(4, 9000)] = draw.choice([0, 255, draw.randrange(256)])
        (tmp_path / "m.gguf").write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            open_checkpoint(tmp_path / "m.gguf").tokenizer()


def test_what_is_not_a_gguf_says_so(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\3\4 something else")
    expect(DamagedCheckpoint, tmp_path / "m.gguf", "not a GGUF file")
    (tmp_path / "m.bin").write_bytes(b"PK")
    expect(DamagedCheckpoint, tmp_path / "m.bin", "neither a model folder nor a .gguf file")
    (tmp_path / "sha256-1").write_bytes(b"GGUF")  # by its first bytes, whatever its name
    expect(DamagedCheckpoint, tmp_path / "sha256-1", "truncated")


def expect(kind: type[CheckpointError], path: Path, text: str) -> None:
    with pytest.raises(kind) as caught:
        open_checkpoint(path)
    assert text in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_is_known_by_its_first_bytes_where_its_name_says_nothing(tmp_path: Path) -> None:
    save_tiny_gguf("llama", tmp_path / "m.gguf")
    named = (tmp_path / "m.gguf").rename(tmp_path / "sha256-abc")  # as other stores call it
    assert open_checkpoint(named).spec.num_layers > 0
    (tmp_path / "sha256-def").write_bytes(b"no weights")
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "sha256-def")
