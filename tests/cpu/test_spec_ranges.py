"""Specs that no engine could compute: the reader refuses each by its key, and the kernels do where no reader was."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from drive import make_row
from store_builders import sealed, stored

from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.errors import DamagedCheckpoint, DovetailError
from dovetail.sched.turn import Turn
from dovetail.store.format.manifest import MANIFEST, StoredModel, parse_manifest

TinyFolder = Callable[[str], Path]
BAD: list[tuple[str, str, Any]] = [
    ("opt", "position_offset", -(2**31)),
    ("opt", "position_offset", -2),
    ("llama", "num_heads", 0),
    ("llama", "num_kv_heads", -2),
    ("llama", "head_dim", -8),
    ("llama", "vocab_size", 0),
    ("llama", "hidden_size", 2**40),
    ("llama", "intermediate_size", 0),
    ("llama", "context_length", -1),
    ("llama", "norm_eps", -1.0),
    ("llama", "embed_scale", 1e300),
    ("llama", "attention_softcap", -3.0),
    ("mixtral", "moe.experts_per_token", 0),
    ("mixtral", "moe.experts_per_token", 6),
    ("mixtral", "moe.intermediate_size", -1),
    ("mixtral", "intermediate_size", 2**62),
    ("gemma3", "windows", [-5, 0, 0, 0]),
    ("gemma3", "windows", [12]),
    ("llama", "rope.theta", 0.0),
    ("llama", "rope.factor", -1.0),
    ("llama_llama3", "rope.original_context", 0),
    ("llama_llama3", "rope.high_freq_factor", 1.0),
    ("llama_yarn", "rope.beta_fast", 0.0),
    ("qwen3_moe", "dense_layers", [-1]),
    ("phi3", "rope.factors", [1.0]),
    ("phi3", "rope.rotary_dims", 7),
    ("smollm3", "rope_local_layers", [3]),
    ("cohere", "logit_scale", 1e300),
]


@pytest.fixture(scope="module")
def models(tiny_folder: TinyFolder, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], StoredModel]:
    root = tmp_path_factory.mktemp("ranges")
    return cache(lambda name: stored(tiny_folder(name), root / name))


def altered(content: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    *path, last = key.split(".")
    place = content["spec"]
    for part in path:
        place = place[part]
    place[last] = value
    return content


@pytest.mark.parametrize(("name", "key", "value"), BAD)
def test_a_manifest_with_such_a_number_is_refused_by_its_key(
    name: str, key: str, value: Any, models: Callable[[str], StoredModel]
) -> None:
    model = models(name)
    content = altered(json.loads((model.path / MANIFEST).read_text()), key, value)
    with pytest.raises(DamagedCheckpoint, match=rf"spec: {key}: expected") as caught:
        parse_manifest(sealed(content), "here")
    assert "here" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("opt", {"position_offset": -(2**31)}),
        ("opt", {"position_offset": -7}),
        ("llama", {"num_heads": 0, "num_kv_heads": 1}),
        ("llama", {"head_dim": 0}),
        ("llama", {"num_kv_heads": -2}),
        ("gemma3", {"windows": (-12, 0, 0, 0)}),
        ("mixtral", {"hidden_size": 0}),
    ],
)
def test_the_kernels_refuse_what_no_reader_has_looked_at(
    name: str, changes: dict[str, Any], models: Callable[[str], StoredModel]
) -> None:
    model = models(name)
    assert model.manifest.spec is not None
    spec = msgspec.structs.replace(model.manifest.spec, **changes)
    with pytest.raises((DovetailError, RuntimeError, ValueError, ArithmeticError)):
        compute(StoredModel(model.path, manifest=msgspec.structs.replace(model.manifest, spec=spec)))


def compute(model: StoredModel) -> None:
    executor = CpuExecutor(model, ExecutorConfig(kv_bytes=1 << 22, block_size=4, dtype="f32"))
    try:
        executor.resize(4)
        executor.run(Turn((make_row(0, [1, 2, 3, 4, 5], 0, 5, [0, 1, 2, 3]),)))
    finally:
        executor.close()


@pytest.mark.parametrize("value", [-1.0, math.inf, 1e9])
def test_a_recommended_temperature_that_nobody_can_follow_is_refused(
    value: float, models: Callable[[str], StoredModel]
) -> None:
    model = models("llama")
    content = json.loads((model.path / MANIFEST).read_text())
    content["tokens"]["defaults"] = {"temperature": value}
    with pytest.raises(DamagedCheckpoint, match="here"):
        parse_manifest(sealed(content), "here")
