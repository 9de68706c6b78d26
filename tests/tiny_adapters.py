"""Random LoRA adapters of tiny models as PEFT saves them, and the models that merging one in makes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

LINEAR = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "gate_up_proj")
LINEAR += ("down_proj", "fc1", "fc2", "c_fc", "c_proj")
ATTENTION = LINEAR[:6]


def save_adapter(
    folder: Path, base: Path, *, rank: int = 4, seed: int = 1, targets: Sequence[str] = LINEAR, **changes: Any
) -> Path:
    """For each of these matrices of the model, as strong as the matrix itself."""
    generator, tensors = np.random.default_rng(seed), {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.rpartition(".")[2] in targets and ".experts." not in name:
            rows, columns = weight.shape
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = _draw(generator, (rank, columns), columns**-0.5)
            tensors[f"{prefix}.lora_B.weight"] = _draw(generator, (rows, rank), rank**-0.5)
    return write_adapter(folder, tensors, **({"r": rank, "target_modules": sorted(targets)} | changes))


def write_adapter(folder: Path, tensors: Mapping[str, Any], **config: Any) -> Path:
    folder.mkdir(parents=True)
    defaults = {"peft_type": "LORA", "lora_alpha": 3, "base_model_name_or_path": "tiny", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(defaults | config))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def merge(base: Path, adapter: Path, folder: Path) -> Path:
    """The model with the adapter in its weights, in float32: W + alpha/r · B·A."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    deltas, weights = load_file(adapter / "adapter_model.safetensors"), load_file(base / "model.safetensors")
    for name, first in deltas.items():
        if name.endswith(".lora_A.weight"):
            second = deltas[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            delta = second.astype(np.float64) @ first.astype(np.float64) * (config["lora_alpha"] / config["r"])
            weights[target] = (weights[target] + delta).astype(np.float32)
    shutil.copytree(base, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _draw(generator: np.random.Generator, shape: tuple[int, int], scale: float) -> Any:
    return (generator.standard_normal(shape) * scale).astype(np.float32)
