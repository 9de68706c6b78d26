"""Quantised models on a GPU against the same codes computed on the CPU in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from gpu_prompts import logits
from tiny_gguf import Q, save_tiny_gguf

from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.store import Catalogue, open_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
if torch.cuda.is_available():
    from dovetail.engine.devices.cuda.device import CudaDevice

LENGTHS = [1, 9, 40, 150]
KINDS = [Q.Q8_0, Q.Q5_1, Q.Q4_0, Q.Q4_1]
WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}


@pytest.fixture(scope="module")
def device() -> Any:
    return CudaDevice("cuda:0")


@pytest.fixture(params=["int8", "int4", *(kind.name for kind in KINDS), "moe int8", "tied int8"])
def path(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    kind = request.param
    if kind in Q.__members__:
        save_tiny_gguf("llama", tmp_path / "m.gguf", Q[kind], **WHOLE_BLOCKS)
        source, layout = tmp_path / "m.gguf", "gguf"
    else:
        family = {"moe": "mixtral", "tied": "gemma2"}.get(kind.split()[0], "llama")
        source, layout = tiny_folder(family), kind.split()[-1]
    card = Catalogue(tmp_path / "store").pull(str(source), name="m", layout=layout)
    return Path(card.path)


@pytest.mark.parametrize("lengths", [[1], [9], [40, 1, 5], [150, 70]], ids=str)
def test_codes_are_multiplied_as_they_are_stored(path: Path, lengths: list[int], device: Any) -> None:
    config = ExecutorConfig(kv_bytes=1 << 24, dtype="f32", max_batch=16)
    executor = device.executor(open_checkpoint(path), config)
    assert executor.weight_bytes < executor.spec.weight_bytes("f32") / 2, "codes were widened"
    ours = logits(executor, lengths)
    wanted = logits(CpuExecutor(open_checkpoint(path), msgspec.structs.replace(config, level="torch")), lengths)
    assert (ours - wanted).abs().max().item() < 2e-3 * max(wanted.abs().max().item(), 1.0)
