"""LoRA adapters in PEFT's form: kept in the same format as models, listed with them, refused where they could harm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dovetail.errors import CheckpointError, DamagedCheckpoint, UnsupportedModel
from dovetail.store import Catalogue, describe
from dovetail.store.format.arrays import as_array
from dovetail.store.format.manifest import partition_files
from dovetail.store.hf.adapters import PeftFolder

TinyFolder = Callable[[str], Path]
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["v_proj", "q_proj"],
    "base_model_name_or_path": "org/base",
}


def tensors(rank: int = 4) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    found = {}
    for layer in range(12):
        for module in ("q_proj", "v_proj"):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            found[f"{prefix}.lora_A.weight"] = generator.standard_normal((rank, 48)).astype(np.float16)
            found[f"{prefix}.lora_B.weight"] = generator.standard_normal((48, rank)).astype(np.float16)
    return found


def write_adapter(folder: Path, weights: dict[str, Any] | None = None, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors() if weights is None else weights, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_comes_back_bit_for_bit_and_in_order_of_layers(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "store")
    entry = catalogue.take(str(write_adapter(tmp_path / "Nice Adapter")))
    assert (entry.name, entry.kind) == ("nice-adapter", "adapter")
    opened = catalogue.open_adapter("nice-adapter")
    assert (opened.adapter.rank, opened.adapter.alpha, opened.adapter.scaling) == (4, 8, 2)
    assert (opened.adapter.target_modules, opened.adapter.base_model) == (("q_proj", "v_proj"), "org/base")
    layers = [int(name.split("layers.")[1].split(".")[0]) for name in opened.names()]
    assert layers == sorted(layers)
    for name, value in tensors().items():
        (piece,) = opened.pieces(name.removeprefix("base_model.model."))
        assert piece.dtype == "f16"
        np.testing.assert_array_equal(as_array(piece), value)
    buffers = [memoryview(path.read_bytes()) for path, _ in partition_files(tmp_path / "store/models/nice-adapter")]
    (piece,) = catalogue.open_adapter("nice-adapter", buffers).pieces(opened.names()[0])
    assert bytes(piece.data) == bytes(opened.pieces(opened.names()[0])[0].data)


def test_adapters_are_listed_apart_from_models_and_removed_like_them(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "store")
    catalogue.pull(str(tiny_folder("llama")), name="base")
    folder = write_adapter(tmp_path / "tuned")
    first = catalogue.take(str(folder))
    assert catalogue.take(str(folder)) == first
    assert [card.name for card in catalogue.cards()] == ["base"]  # what a server offers
    assert [(entry.name, entry.kind) for entry in catalogue.entries()] == [("base", "model"), ("tuned", "adapter")]
    with pytest.raises(UnsupportedModel, match="an adapter, not a model"):
        catalogue.get("tuned")
    with pytest.raises(UnsupportedModel, match="an adapter, not a model"):
        catalogue.pull(str(folder))
    with pytest.raises(UnsupportedModel, match="a model, not an adapter"):
        catalogue.open_adapter("base")
    catalogue.remove("tuned")
    assert [entry.name for entry in catalogue.entries()] == ["base"]
    assert len(list((tmp_path / "store" / "blobs").glob("*/*"))) == 1


def test_rank_stabilised_scaling_is_kept(tmp_path: Path) -> None:
    entry = Catalogue(tmp_path / "store").take(str(write_adapter(tmp_path / "a", use_rslora=True)), dtype="f32")
    assert entry.manifest is not None
    assert entry.manifest.adapter is not None
    assert entry.manifest.adapter.scaling == 4
    assert entry.manifest.dtype == "f32"


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"peft_type": "IA3"}, UnsupportedModel, "peft_type = 'IA3'"),
        ({"use_dora": True}, UnsupportedModel, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedModel, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, UnsupportedModel, "rank_pattern"),
        ({"r": 0}, DamagedCheckpoint, "r: expected a whole number above 0"),
        ({"r": 5}, DamagedCheckpoint, "the rank is 5"),
        ({"lora_alpha": "x"}, DamagedCheckpoint, "lora_alpha: expected a number"),
        ({"target_modules": [1]}, DamagedCheckpoint, "target_modules"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(
    changes: dict[str, Any], kind: type[CheckpointError], text: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=text):
        Catalogue(tmp_path / "store").take(str(write_adapter(tmp_path / "a", **changes)))
    assert Catalogue(tmp_path / "store").entries() == []


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    weights = tensors()
    lone = "base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight"
    del weights[lone]
    catalogue = Catalogue(tmp_path / "store")
    with pytest.raises(DamagedCheckpoint, match=r"layers\.3\.self_attn\.q_proj\.lora_B\.weight is missing"):
        catalogue.take(str(write_adapter(tmp_path / "a", weights)))
    with pytest.raises(UnsupportedModel, match="neither a lora_A nor a lora_B"):
        catalogue.take(str(write_adapter(tmp_path / "b", tensors() | {"lm_head.weight": np.zeros((4, 4), "f4")})))
    with pytest.raises(UnsupportedModel, match="kept plain and whole"):
        catalogue.take(str(write_adapter(tmp_path / "c")), layout="int8")


def test_a_pickled_adapter_is_refused_and_never_read(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UnsupportedModel, match=r"weights only as pickle \(adapter_model\.bin\)"):
        Catalogue(tmp_path / "store").take(str(folder))


def test_a_scaling_that_no_type_can_hold_is_refused_on_adding(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"lora_alpha 1e\+308 with r 4 scales by .*; at most 65504"):
        Catalogue(tmp_path / "store").take(str(write_adapter(tmp_path / "a", lora_alpha=1e308)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pipe_instead_of_a_file_is_an_error_and_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError):
        PeftFolder(folder)


def test_an_adapter_that_is_given_for_a_model_is_told_where_it_belongs(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"a LoRA adapter, not a model; name it under models\.BASE\.adapters"):
        describe(write_adapter(tmp_path / "a"), "tuned")
