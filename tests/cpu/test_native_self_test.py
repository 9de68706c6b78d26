"""Kernels that compute wrongly are found out before a model is served from them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dovetail.codings import CODINGS
from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.engine.native_model import READABLE_LAYOUTS
from dovetail.native import dispatch, explain, kernel_self_test, levels, select
from dovetail.native.dispatch import load_kernels
from dovetail.store import Catalogue, open_checkpoint

NATIVE = [level for level in levels() if level != "torch"]
FUNCTIONS = ("linear", "linear_quantised", "attend", "norm", "gate", "argmax")


@pytest.fixture
def forgets() -> Iterator[None]:
    """Verdicts are found once per process: forgotten before and after."""
    caches = (kernel_self_test.failed_parts, dispatch.best_level)
    for found in caches:
        found.cache_clear()
    yield
    for found in caches:
        found.cache_clear()


def broken(name: str, break_it: Callable[..., None]) -> SimpleNamespace:
    """The kernels of this machine, one function of which spoils what it returns."""
    kernels = load_kernels()
    whole = {function: getattr(kernels, function) for function in FUNCTIONS}

    def spoiled(*arguments: Any) -> Any:
        result = getattr(kernels, name)(*arguments)
        break_it(*arguments)
        return result

    return SimpleNamespace(**{**whole, name: spoiled})


@pytest.mark.parametrize("level", NATIVE)
def test_every_level_of_this_machine_passes(level: str) -> None:
    assert kernel_self_test.failed_parts(level) == ()
    assert set(READABLE_LAYOUTS) <= set(kernel_self_test.QUANTISED)
    assert kernel_self_test.trusted_layouts(level, READABLE_LAYOUTS) == READABLE_LAYOUTS


def spoil_type(dtype: str, factor: float) -> Callable[..., None]:
    def spoil(level: str, threads: int, precision: str, x: Any, weight: Any, out: Any) -> None:
        if dtype in str(weight.dtype):
            out[-1, -1] *= factor

    return spoil


def spoil_last(*arguments: Any) -> None:
    arguments[-1].reshape(-1)[-1] = np.nan


@pytest.mark.skipif(not NATIVE, reason="no native kernels")
@pytest.mark.parametrize(
    ("name", "spoil", "parts"),
    [
        ("linear", spoil_type("bfloat16", 2.0), ("bf16 in f32", "bf16")),
        ("linear", spoil_type("torch.float16", np.nan), ("f16 in f32", "f16")),
        ("linear", spoil_type("float32", 0.0), ("f32",)),
        ("linear_quantised", spoil_last, CODINGS),
        ("attend", spoil_last, ("attention over f32", "attention over bf16", "attention over f16")),
        ("norm", spoil_last, ("norm",)),
        ("gate", spoil_last, ("gate",)),
    ],
)
def test_one_wrong_number_is_noticed(name: str, spoil: Callable[..., None], parts: tuple[str, ...]) -> None:
    assert kernel_self_test.check_level(broken(name, spoil), NATIVE[-1]) == parts


@pytest.mark.skipif(not NATIVE, reason="no native kernels")
def test_a_token_that_differs_in_company_is_noticed() -> None:
    """By one unit in the last place, far below what rounding explains."""

    def nudge(level: str, threads: int, precision: str, x: Any, weight: Any, out: Any) -> None:
        if len(out) > 8:
            out[0, 0] = np.nextafter(out[0, 0], np.float32(np.inf))

    assert "f32" in kernel_self_test.check_level(broken("linear", nudge), NATIVE[-1])


@pytest.mark.skipif(not NATIVE, reason="no native kernels")
def test_auto_falls_to_the_next_level_with_a_warning(
    forgets: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = {NATIVE[-1]: ("attention over bf16",)}
    monkeypatch.setattr(kernel_self_test, "failed_parts", lambda level: wrong.get(level, ()))
    with caplog.at_level(logging.WARNING):
        assert select("auto", {}).level == levels()[-2]
    assert f"{NATIVE[-1]} kernels are wrong on this processor (attention over bf16)" in caplog.text
    assert f"{NATIVE[-1]} failed in attention over bf16" in explain({})[1]
    assert select(NATIVE[-1]).level == NATIVE[-1]  # by name it can still be had


@pytest.mark.skipif(not NATIVE, reason="no native kernels")
@pytest.mark.parametrize("factor", [1.1, 0.0, np.nan])
def test_a_model_of_a_layout_that_fails_is_unpacked(
    factor: float,
    forgets: None,
    tiny_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def spoil(level: str, threads: int, x: Any, data: Any, layout: str, out: Any) -> None:
        if layout == "int8-g32":
            out[-1] *= factor

    failed = kernel_self_test.check_level(broken("linear_quantised", spoil), NATIVE[-1])
    assert failed == ("int8-g32",)
    monkeypatch.setattr(kernel_self_test, "failed_parts", lambda level: failed)
    others = tuple(layout for layout in READABLE_LAYOUTS if layout != "int8-g32")
    assert kernel_self_test.trusted_layouts(NATIVE[-1], READABLE_LAYOUTS) == others
    assert "wrong products of int8-g32" in caplog.text
    card = Catalogue(tmp_path).pull(str(tiny_folder("llama")), layout="int8", dtype="f32")
    config = ExecutorConfig(kv_bytes=1 << 20, block_size=4, level=NATIVE[-1])
    executor = CpuExecutor(open_checkpoint(card.path), config)
    assert executor.copied_bytes > card.size_bytes  # floats of its own
    executor.close()
