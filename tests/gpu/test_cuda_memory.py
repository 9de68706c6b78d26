"""What loading, closing and resizing one model on a GPU asks of the others: nothing that they would wait for."""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.engine.executor import ExecutorConfig
from dovetail.sched.turn import Turn, TurnRow
from dovetail.store import open_checkpoint
from dovetail.types import Grammar, SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
if torch.cuda.is_available():
    from dovetail.engine.devices.cuda.arena import CudaArena, wait_for_memory
    from dovetail.engine.devices.cuda.copier import RegisteredPool
    from dovetail.engine.devices.cuda.device import CudaDevice
    from dovetail.engine.devices.cuda.transfer import copy_words, to_device, to_host

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
    wait_for_memory()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free - (64 << 20)


def test_loading_and_closing_again_and_again_takes_no_more_memory(
    tiny_folder: Callable[[str], Path], device: Any
) -> None:
    """Graphs included: a closed model's addresses and graphs are the next one's of its shape."""
    reserved, texts = [], []
    for _ in range(200):
        executor = open_tiny(tiny_folder("llama"), device)
        texts.append(decode(executor, [1, 2, 3], 6))
        assert len(executor._steps) > 0
        executor.close()
        reserved.append(torch.cuda.memory_reserved())
    wait_for_memory()
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


def test_a_model_of_the_same_shape_goes_on_with_the_graphs_of_the_one_before(
    tiny_folder: Callable[[str], Path], device: Any, tmp_path: Path
) -> None:
    """Its own weights, its own text, nothing of the other's: neither sequences nor cached keys and values."""
    other = other_weights(tiny_folder("llama"), tmp_path / "other")
    drawn = SamplingParams(max_tokens=1000, seed=7, presence_penalty=0.5)
    alone = open_tiny(other, device, kv_bytes=1 << 25)  # of another shape than what is parked
    wanted = decode(alone, [1, 2, 3], 12), decode_anew(alone, [5, 6], 12, drawn)
    alone._device._parked.clear()
    first = open_tiny(tiny_folder("llama"), device)
    unlike = decode(first, [1, 2, 3], 12), decode_anew(first, [5, 6], 12, drawn)
    graphs = set(first._steps._graphs)
    first.close()
    second = open_tiny(other, device)
    assert second is first
    assert graphs <= set(second._steps._graphs)
    assert (decode(second, [1, 2, 3], 12), decode_anew(second, [5, 6], 12, drawn)) == wanted
    assert unlike != wanted
    second.close()


def decode_anew(executor: Any, tokens: list[int], count: int, sampling: SamplingParams) -> list[int]:
    executor.forget(0)
    made = decode(executor, tokens, count, sampling)
    executor.forget(0)
    return made


def other_weights(folder: Path, target: Path) -> Path:
    """The same model, every matrix turned round."""
    shutil.copytree(folder, target)
    path = target / "model.safetensors"
    save_file({name: value.flip(0).contiguous() for name, value in load_file(path).items()}, path)
    return target


def test_memory_that_was_lent_goes_back_unless_it_is_used_again() -> None:
    arena = CudaArena(256 << 20, torch.device("cuda:0"))
    arena.resize(256 << 20)
    arena.lend()
    arena.resize(256 << 20)  # in time
    wait_for_memory()
    assert arena.committed_bytes >= 256 << 20
    arena.lend()
    wait_for_memory()
    assert arena.committed_bytes == 0
    arena.resize(64 << 20)
    view = arena.tensor(torch.uint8, (64 << 20,))
    view.fill_(3)
    assert int(view[-1]) == 3
    arena.close()


def test_graphs_that_are_captured_ahead_compute_what_the_first_requests_would(
    tiny_folder: Callable[[str], Path], device: Any
) -> None:
    device._streams._parked.clear()
    executor = open_tiny(tiny_folder("llama"), device)
    wanted = decode(executor, [1, 2, 3], 8)
    executor.forget(0)
    while executor.prepare_next():
        pass
    known = set(executor._steps._graphs)
    assert len(known) > 2 * len(executor._decode.buckets)
    assert decode(executor, [1, 2, 3], 8) == wanted
    assert set(executor._steps._graphs) == known
    executor.close()


def test_the_pool_is_registered_ahead_of_its_models() -> None:
    chunk = 4 << 20
    with mmap.mmap(-1, 8 * chunk) as memory:
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        pool = RegisteredPool(whole.data_ptr(), 8 * chunk, chunk)
        pool.expect(3 * chunk - 5)
        assert pool._ahead is not None
        pool._ahead.join()
        assert pool.registered_bytes == 3 * chunk
        assert all(whole[at * chunk :].is_pinned() for at in range(3))
        for pinned in pool._pinned.values():
            pinned.close()
        del whole


def test_small_copies_by_a_kernel_bring_every_byte_in_both_directions() -> None:
    for count, dtype in ((1, torch.int32), (1023, torch.int32), (5000, torch.int64)):
        host = torch.randint(-(1 << 30), 1 << 30, (count,), dtype=dtype)
        there = to_device(host.pin_memory(), torch.device("cuda:0"))
        back = to_host(there)
        part = copy_words(there[count // 3 :], torch.empty(count - count // 3, dtype=dtype, pin_memory=True))
        torch.cuda.current_stream().synchronize()
        assert torch.equal(there.cpu(), host)
        assert torch.equal(back, host)
        assert torch.equal(part, host[count // 3 :])
