"""What loading, closing and resizing one model on a GPU asks of the others: nothing that they would wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.engine.executor import ExecutorConfig
from dovetail.sched.turn import Turn, TurnRow
from dovetail.store import open_checkpoint
from dovetail.types import Grammar, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
if torch.cuda.is_available():
    from dovetail.engine.devices.cuda.arena import RECLAIMER, CudaArena
    from dovetail.engine.devices.cuda.device import CudaDevice

GREEDY = SamplingParams(max_tokens=1000, seed=0, temperature=0.0)


@pytest.fixture(scope="module")
def device() -> Any:
    return CudaDevice("cuda:0")


@pytest.fixture
def others_copy(device: Any) -> Iterator[torch.cuda.Event]:
    """Weights of another model on their way: some hundred milliseconds of the stream that all models share."""
    torch.cuda.synchronize()
    memory = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
    half = len(memory) // 2
    done = torch.cuda.Event()
    with torch.cuda.stream(device._streams.copier.stream):
        for _ in range(200):
            memory[:half].copy_(memory[half:])
        done.record()
    yield done
    done.synchronize()


def open_tiny(folder: Path, device: Any, **options: Any) -> Any:
    options = {"kv_bytes": 1 << 26, "block_size": 4, "dtype": "f32", "max_batch": 8} | options
    executor = device.executor(open_checkpoint(folder), ExecutorConfig(**options))
    executor.resize(executor.max_blocks)
    return executor


def decode(executor: Any, tokens: list[int], count: int, sampling: SamplingParams = GREEDY) -> list[int]:
    made = list(tokens)
    blocks = list(range(-(-(len(tokens) + count) // 4)))
    executor.run(Turn((TurnRow(0, made, 0, len(made) - 1, blocks, len(tokens), sampling, samples=False),)))
    for _ in range(count):
        row = TurnRow(0, list(made), len(made) - 1, 1, blocks, len(tokens), sampling, samples=True)
        made.append(executor.run(Turn((row,))).rows[0].token)
    return made


def test_closing_and_shrinking_wait_for_nobody_elses_copy(
    tiny_folder: Callable[[str], Path], device: Any, request: pytest.FixtureRequest
) -> None:
    executor = open_tiny(tiny_folder("llama"), device)
    decode(executor, [1, 2, 3], 5)
    copied = request.getfixturevalue("others_copy")
    executor.resize(8)
    assert not copied.query(), "the cache has shrunk while the copy goes on"
    executor.close()
    assert not copied.query(), "and the model is closed"


def test_memory_that_is_on_its_way_back_is_waited_for() -> None:
    free = torch.cuda.mem_get_info()[0]
    size = int(free * 0.6)
    first = CudaArena(size, torch.device("cuda:0"))
    first.resize(size)
    first.close()
    second = CudaArena(size, torch.device("cuda:0"))
    second.resize(size)  # there is no room for both
    second.resize(size // 2)
    second.resize(size)
    assert second.committed_bytes >= size
    second.close()
    RECLAIMER.wait()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free - (64 << 20)


def test_loading_and_closing_again_and_again_takes_no_more_memory(
    tiny_folder: Callable[[str], Path], device: Any
) -> None:
    """Graphs included: what those of a closed model computed in is the next one's."""
    reserved, texts = [], []
    for _ in range(24):
        executor = open_tiny(tiny_folder("llama"), device)
        texts.append(decode(executor, [1, 2, 3], 6))
        assert len(executor._steps) > 0
        executor.close()
        reserved.append(torch.cuda.memory_reserved())
    RECLAIMER.wait()
    assert reserved[-1] == reserved[4]
    assert all(text == texts[0] for text in texts)


def test_a_model_whose_logits_another_one_overwrote_chooses_the_same_tokens(
    tiny_folder: Callable[[str], Path], device: Any
) -> None:
    """A grammar's rows are sampled when their texts are known; graphs of all models share their memory."""
    folder = tiny_folder("llama")
    grammar = Grammar("regex", "[a-f]{40}")
    sampling = SamplingParams(max_tokens=40, seed=3, grammar=grammar)
    options = {"tokenizer_file": str(folder / "tokenizer.json")}
    alone = open_tiny(folder, device, **options)
    wanted = decode(alone, [1, 2, 3], 12, sampling)
    alone.close()
    ours, other = open_tiny(folder, device, **options), open_tiny(tiny_folder("qwen3"), device)
    decode(ours, [1, 2, 3], 4, sampling)
    ours.forget(0)
    decode(other, [4, 5, 6], 4)
    made, blocks = [1, 2, 3], list(range(8))
    ours.run(Turn((TurnRow(1, made, 0, 2, blocks, 3, sampling, samples=False),)))
    for _ in range(12):
        ours.launch(Turn((TurnRow(1, list(made), len(made) - 1, 1, blocks, 3, sampling, samples=True),)))
        decode(other, [4, 5, 6], 3)
        made.append(ours.collect().rows[0].token)
    assert made == wanted
    ours.close()
    other.close()
