"""Keys and values as int8: near the float cache, the same in any company, moved with all that belongs to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drive import Engine, logits_of, make_executor, make_request, make_row
from tried import tried

from dovetail.errors import ConfigError
from dovetail.native import levels
from dovetail.sched.turn import Turn

LEVELS = levels()[1:]
native = pytest.mark.skipif(not LEVELS, reason="the native kernels were not built")
TinyFolder = Callable[[str], Path]
TOKENS = [(31 * i) % 300 for i in range(90)]


@native
@pytest.mark.parametrize("level", tried(LEVELS))
@pytest.mark.parametrize("family", ["llama", "gemma3", "opt", "deepseek_v2"])  # heads of 8 and 16; windows; latents
def test_logits_are_near_those_of_a_float_cache(tiny_folder: TinyFolder, family: str, level: str) -> None:
    found = {}
    for kv in ("auto", "int8"):
        executor = make_executor(tiny_folder(family), level=level, kv=kv)
        found[kv] = torch.stack(logits_of(executor, TOKENS, [40, 7, *[1] * 43]))
        assert executor._cache.block_bytes == 4 * executor.spec.kv_bytes_per_token("f32", kv)
        executor.close()
    error = (found["int8"] - found["auto"]).norm() / found["auto"].norm()
    assert 0 < error < 0.03


@native
@pytest.mark.parametrize("level", tried(LEVELS))
def test_sequences_say_the_same_alone_and_in_company(tiny_folder: TinyFolder, level: str) -> None:
    """Over shared prefixes, in chunks, with so few blocks that some are preempted."""
    requests = [make_request(TOKENS[: 20 + 5 * i], id=str(i), max_tokens=20) for i in range(4)]
    options = {"kv": "int8", "level": level}
    alone = {}
    for request in requests:
        alone |= Engine(make_executor(tiny_folder("llama"), **options)).run(request)
    executor = make_executor(tiny_folder("llama"), **options)
    assert Engine(executor, num_blocks=30, max_turn_tokens=24).run(*requests) == alone


@native
def test_a_block_is_moved_with_its_scales(tiny_folder: TinyFolder) -> None:
    executor = make_executor(tiny_folder("llama"), kv="int8")
    blocks = [60 - i for i in range(10)]
    executor.run(Turn((make_row(0, TOKENS[:40], 0, 39, blocks),)))
    stayed = executor.logits(Turn((make_row(0, TOKENS[:40], 39, 1, blocks),)))[0]
    executor.resize(20, [(block, i) for i, block in enumerate(blocks)])
    moved = executor.logits(Turn((make_row(0, TOKENS[:40], 39, 1, list(range(10))),)))[0]
    assert torch.equal(stayed, moved)


@native
def test_int8_takes_a_quarter_of_the_memory(tiny_folder: TinyFolder) -> None:
    sizes = {kv: make_executor(tiny_folder("qwen3"), kv=kv).max_blocks for kv in ("auto", "int8")}
    assert sizes["int8"] == pytest.approx(sizes["auto"] * 64 / 20, rel=0.01)  # 16 floats, or 16 codes and a scale


def test_torchs_level_says_that_it_cannot(tiny_folder: TinyFolder) -> None:
    for options in ({"level": "torch"}, {"dtype": "f64"}):
        with pytest.raises(ConfigError, match="kv: int8 needs native kernels"):
            make_executor(tiny_folder("llama"), kv="int8", **options)
