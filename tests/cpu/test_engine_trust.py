"""Kernels that multiply wrongly are found out before a model is served from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.engine import trust
from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.engine.native_model import READABLE_LAYOUTS
from dovetail.native.dispatch import levels, load_kernels
from dovetail.store import Catalogue, open_checkpoint

NATIVE = [level for level in levels() if level != "torch"]


@pytest.mark.parametrize("level", NATIVE)
def test_every_level_of_this_machine_is_trusted(level: str) -> None:
    assert trust.trusted_layouts(level, READABLE_LAYOUTS) == READABLE_LAYOUTS


@pytest.mark.skipif(not NATIVE, reason="no native kernels")
@pytest.mark.parametrize("factor", [1.1, 0.0, np.nan])
def test_wrong_products_are_noticed_and_the_model_is_unpacked(
    factor: float,
    tiny_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernels = load_kernels()
    assert kernels is not None

    def linear_quantised(level: str, threads: int, x: Any, codes: Any, scales: Any, out: Any) -> None:
        kernels.linear_quantised(level, threads, x, codes, scales, out)
        if codes.dtype == np.int8:
            out[-1] *= factor

    broken = SimpleNamespace(kernels=SimpleNamespace(linear_quantised=linear_quantised))
    monkeypatch.setattr(trust, "select", lambda level: broken)
    trust.trusted_layouts.cache_clear()
    try:
        assert trust.trusted_layouts(NATIVE[-1], READABLE_LAYOUTS) == ("int4-cells",)
        assert "wrong products of int8-cells" in caplog.text
        card = Catalogue(tmp_path).pull(str(tiny_folder("llama")), layout="int8", dtype="f32")
        executor = CpuExecutor(open_checkpoint(card.path), ExecutorConfig(kv_bytes=1 << 20, block_size=4))
        assert executor.copied_bytes > card.size_bytes  # floats of its own
        executor.close()
    finally:
        trust.trusted_layouts.cache_clear()
