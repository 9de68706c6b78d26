"""A server whose models stay on its GPU whole, in part, or not at all."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dovetail.store import Catalogue

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from server_fixture import running_server

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_a_server_answers_alike_whatever_share_of_a_model_stays(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Three models of the same weights; of two the configuration leaves layers in the host pool."""
    catalogue = Catalogue(tmp_path / "store")
    shares = {"whole": 1, "half": 0.5, "streamed": 0}
    for name in shares:
        catalogue.pull(str(tiny_folder("llama")), name=name, dtype="f32")
    models = {name: {"source": name, "dtype": "f32", "resident_share": share} for name, share in shares.items()}
    config = {
        "nodes": [{"name": "gpu-0", "device": "cuda:0", "memory": "1GiB", "kv_cache": "4MiB"}],
        "store": {"path": str(tmp_path / "store"), "host_pool": "256MiB"},
        "models": models,
    }
    file = tmp_path / "dovetail.yaml"
    file.write_text(json.dumps(config))
    with running_server("--config", file) as server:
        texts, taken = {}, {}
        for name in [*shares, *shares]:
            body = {"model": name, "prompt": "layers that stay", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            answer = server.post("/v1/completions", body)
            assert answer.status_code == 200, answer.text
            texts.setdefault(name, set()).add(answer.json()["choices"][0]["text"])
        for model in server.get("/api/ps").json()["nodes"][0]["models"]:
            taken[model["name"]] = model["weight_bytes"]
    assert texts["whole"] == texts["half"] == texts["streamed"]
    assert len(texts["whole"]) == 1
    assert taken["streamed"] < taken["whole"]
