"""Rows with LoRA adapters: the numbers of merged weights, many adapters in one iteration, nobody's row changed by
others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from drive import Engine, make_executor, make_request, make_row
from tiny_adapters import ATTENTION, merge, save_adapter

from dovetail.engine.adapters import read_matrices
from dovetail.engine.executor import CpuExecutor
from dovetail.errors import UnsupportedModel
from dovetail.native import levels
from dovetail.sched.turn import Turn, TurnRow
from dovetail.store import open_checkpoint
from dovetail.store.hf.adapter_parts import open_adapter
from dovetail.types import AdapterRef

TinyFolder = Callable[[str], Path]
LEVELS = levels()[1:]
pytestmark = pytest.mark.skipif(not LEVELS, reason="the native kernels were not built")
FAMILIES = ("llama_bias", "gemma2", "opt", "qwen3_moe", "gpt_oss", "phi3", "cohere", "glm4")  # the last turn q and k
PROMPTS = {"": 19, "a": 3, "b": 70, "c": 1}  # tokens, by adapter


def bind(executor: CpuExecutor, key: str, folder: Path) -> None:
    weights = open_adapter(folder, executor.spec)
    executor.add_adapter(key, read_matrices(weights))
    weights.close()


def rows_of(order: list[str]) -> tuple[TurnRow, ...]:
    rows, free = [], 0
    for index, key in enumerate(order):
        tokens = [(11 * i + 5 * len(key)) % 250 for i in range(PROMPTS[key])]
        blocks = list(range(free, free + -(-len(tokens) // 4)))
        rows.append(make_row(index, tokens, 0, len(tokens), blocks, adapter=key))
        free += len(blocks)
    return tuple(rows)


def logits_by_key(executor: CpuExecutor, order: list[str]) -> dict[str, torch.Tensor]:
    found = executor.logits(Turn(rows_of(order)))
    return {key: found[index] for index, key in enumerate(order)}


@pytest.mark.parametrize(
    ("family", "level"),
    [("llama", level) for level in LEVELS] + [(family, LEVELS[-1] if LEVELS else "") for family in FAMILIES],
)
def test_rows_of_several_adapters_have_the_logits_of_merged_models(
    family: str, level: str, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    base, targets = tiny_folder(family), {"targets": ATTENTION} if "moe" in family else {}
    executor = make_executor(base, level=level)
    expected = logits_by_key(executor, [""])
    for seed, (key, rank) in enumerate([("a", 4), ("b", 16), ("c", 1)]):
        adapter = save_adapter(tmp_path / key, base, rank=rank, seed=seed, **targets)
        bind(executor, key, adapter)
        merged = make_executor(merge(base, adapter, tmp_path / f"merged-{key}"), level=level)
        (row,) = rows_of([key])
        expected[key] = merged.logits(Turn((make_row(0, row.tokens, 0, row.count, row.blocks),)))[0]
        merged.close()
    found = logits_by_key(executor, ["b", "", "c", "a"])
    for key, logits in expected.items():
        torch.testing.assert_close(found[key], logits, rtol=2e-4, atol=2e-4)
    for key in ("a", "b", "c"):  # a test that cannot fail would pass with adapters that do nothing
        assert not torch.allclose(expected[key][:50], expected[""][:50], atol=0.05)


def test_an_adapter_for_attention_over_latents_is_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    base = tiny_folder("deepseek_v2")
    adapter = save_adapter(tmp_path / "a", base, targets=("q_proj",))
    with pytest.raises(UnsupportedModel, match="not served for deepseek_v2, whose attention is over latents"):
        open_adapter(adapter, open_checkpoint(base).spec)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_row_has_the_same_numbers_alone_and_in_company(dtype: str, tiny_folder: TinyFolder, tmp_path: Path) -> None:
    executor = make_executor(tiny_folder("llama"), dtype=dtype)
    for seed, key in enumerate("abc"):
        bind(executor, key, save_adapter(tmp_path / key, tiny_folder("llama"), seed=seed, rank=3 + seed))
    together = logits_by_key(executor, ["c", "b", "", "a"])
    for key in PROMPTS:
        assert torch.equal(logits_by_key(executor, [key])[key], together[key])


def test_answers_are_those_of_merged_weights_in_one_batch(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    base = tiny_folder("llama")
    executor = make_executor(base)
    requests: list[Any] = [make_request(list(range(40)), "base")]
    expected = Engine(make_executor(base)).run(requests[0])
    for seed in range(6):
        key = f"adapter-{seed}"
        adapter = save_adapter(tmp_path / key, base, seed=seed, rank=8)
        ref = AdapterRef(key, str(adapter), "1")
        bind(executor, ref.key, adapter)
        plain = make_request(list(range(40)), key)
        expected |= Engine(make_executor(merge(base, adapter, tmp_path / f"merged-{seed}"))).run(plain)
        requests.append(_with(plain, ref))
    engine = Engine(executor)
    assert engine.run(*requests) == expected
    assert len(set(map(tuple, expected.values()))) > 4  # adapters differ
    # The same prompts again: each finds its own prefix and no other's.
    assert engine.run(*requests) == expected
    assert engine.scheduler.prefix_hits == len(requests) * 36


def test_states_and_logprobs_of_prompts_are_read_with_the_adapter(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    base = tiny_folder("llama")
    adapter = save_adapter(tmp_path / "a", base)
    executor, merged = make_executor(base), make_executor(merge(base, adapter, tmp_path / "merged"))
    bind(executor, "a", adapter)
    tokens = list(range(30))
    for pooling in ("last", "mean"):
        sampling = make_request(tokens, pooling=pooling).sampling
        outcomes = [
            each.run(Turn((make_row(0, tokens, 0, 30, list(range(8)), sampling=sampling, **named),))).rows[0]
            for each, named in ((executor, {"adapter": "a"}), (merged, {}))
        ]
        found, expected = (torch.frombuffer(bytearray(one.embedding or b""), dtype=torch.float32) for one in outcomes)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_that_was_removed_leaves_nothing_behind(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    executor = make_executor(tiny_folder("llama"))
    plain = logits_by_key(executor, [""])[""]
    bind(executor, "a", save_adapter(tmp_path / "a", tiny_folder("llama")))
    logits_by_key(executor, ["a"])
    executor.remove_adapter("a")
    executor.remove_adapter("a")  # of one that is not there nothing is left either
    assert torch.equal(logits_by_key(executor, [""])[""], plain)
    with pytest.raises(KeyError):
        logits_by_key(executor, ["a"])


def test_the_torch_level_says_that_it_has_no_adapters(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    executor = make_executor(tiny_folder("llama"), level="torch")
    bind(executor, "a", save_adapter(tmp_path / "a", tiny_folder("llama")))
    outcomes = {row.sequence: row for row in executor.run(Turn(rows_of(["a", ""]))).rows}
    assert outcomes[1].error is None
    assert "native kernels" in (outcomes[0].error or "")


def _with(request: Any, adapter: AdapterRef) -> Any:
    return msgspec.structs.replace(request, adapter=adapter)
