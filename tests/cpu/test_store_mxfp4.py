"""gpt-oss as its authors publish it, with experts in MXFP4: read, kept and multiplied with the codes that it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from drive import logits_of, make_executor
from safetensors.torch import load_file, save_file
from store_builders import stored
from tiny import save_tiny_tokenizer, tiny_model
from tiny_gguf import Q, save_tiny_gguf
from tried import tried

from dovetail.native import levels
from dovetail.store import open_checkpoint
from dovetail.store.format.arrays import to_float32

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def in_blocks(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of matrices [experts, in, out]: blocks [experts, out, groups, 16] with neighbours in one byte, scales, and what
    they stand for, by the `gguf` package, which keeps the codes of a block in two halves."""
    rows = matrices.swapaxes(1, 2).contiguous().numpy()
    raw = gguf.quants.quantize(rows, Q.MXFP4).reshape(*rows.shape[:2], -1, 17)
    scales, halves = raw[..., 0].copy(), raw[..., 1:]
    codes = np.concatenate([halves & 15, halves >> 4], axis=-1)
    values = gguf.quants.dequantize(raw.reshape(*rows.shape[:2], -1), Q.MXFP4)
    exact = torch.from_numpy(values).swapaxes(1, 2).contiguous()
    return torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4), torch.from_numpy(scales), exact


@pytest.fixture(scope="module")
def model() -> Any:
    """With experts that MXFP4 holds exactly."""
    made = tiny_model("gpt_oss", **SIZES)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                parameter.copy_(in_blocks(parameter)[2])
    return made


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("mxfp4")
    model.save_pretrained(made)
    save_tiny_tokenizer(made)
    state = load_file(made / "model.safetensors")
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        state[f"{name}_blocks"], state[f"{name}_scales"], _ = in_blocks(state.pop(name))
    save_file(state, made / "model.safetensors")
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return made


def layouts_of(path: Path) -> dict[str, str]:
    checkpoint = open_checkpoint(path)
    return {name.split(".", 2)[-1]: checkpoint.pieces(name)[0].layout for name, _ in checkpoint.spec.tensors()}


def logits(path: Path, level: str) -> torch.Tensor:
    executor = make_executor(path, level=level)
    try:
        return torch.stack(logits_of(executor, TOKENS, [7, 8]))
    finally:
        executor.close()


def test_logits_equal_those_of_the_unpacked_model(folder: Path, model: Any) -> None:
    with torch.inference_mode():
        theirs = model(torch.tensor([TOKENS])).logits[0, [6, 14]]
    assert (logits(folder, "torch") - theirs).abs().max() < 1e-4


def test_codes_are_kept_to_the_bit_and_what_is_no_code_stays_float(folder: Path, tmp_path: Path) -> None:
    path = stored(folder, tmp_path, layout="auto").path
    kept = layouts_of(Path(path))
    assert {name for name, layout in kept.items() if layout == "fp4-e32"} == {
        "experts.gate_up.weight",
        "experts.down.weight",
    }
    assert kept["qkv.weight"] == kept["router.weight"] == kept["experts.down.bias"] == "plain"
    ours, theirs = open_checkpoint(path), open_checkpoint(folder)
    for name in ("layers.1.experts.gate_up.weight", "layers.1.experts.down.weight"):
        values = [np.concatenate([to_float32(one).reshape(-1) for one in c.pieces(name)]) for c in (ours, theirs)]
        np.testing.assert_array_equal(*values)


def test_a_gguf_keeps_the_same_codes(model: Any, folder: Path, tmp_path: Path) -> None:
    blocks = {}
    for name, parameter in model.named_parameters():
        if name.endswith("down_proj"):
            rows = parameter.detach().swapaxes(1, 2).contiguous().numpy()
            blocks[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = (gguf.quants.quantize(rows, Q.MXFP4), Q.MXFP4)
    save_tiny_gguf("gpt_oss", tmp_path / "m.gguf", replace=blocks, **SIZES)
    ours, theirs = open_checkpoint(tmp_path / "m.gguf"), open_checkpoint(folder)
    name = "layers.1.experts.down.weight"
    assert ours.pieces(name)[0].layout == "fp4-e32"
    for one, other in zip(ours.pieces(name), theirs.pieces(name), strict=True):
        np.testing.assert_array_equal(to_float32(one), to_float32(other))


@pytest.mark.parametrize("level", tried(levels()[1:]))
def test_codes_are_multiplied_as_they_lie(folder: Path, tmp_path: Path, level: str) -> None:
    """The error is that of activations of eight bits and more."""
    exact = logits(folder, "torch")
    ours = logits(Path(stored(folder, tmp_path, layout="auto").path), level)
    assert (ours - exact).norm() / exact.norm() < 0.02
