"""Arena, KV cache, weights and several models in one process."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from drive import Engine, make_executor, make_request, make_row

from dovetail.engine.arena import HostArena
from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.engine.kv_cache import KVCache
from dovetail.errors import ConfigError, OutOfMemory
from dovetail.layouts import unpack
from dovetail.modelspec import ModelSpec
from dovetail.native import levels
from dovetail.node.ports import HostTensor
from dovetail.sched.turn import Turn
from dovetail.store import open_checkpoint
from dovetail_bench.iterations import RandomCheckpoint
from dovetail_bench.served_memory import forget_peak, peak_bytes

MIB = 1 << 20


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def test_reserving_costs_no_memory_and_releasing_gives_it_back() -> None:
    before = resident_bytes()
    arena = HostArena(64 << 30)
    view = arena.tensor(torch.uint8, (64 << 30,))
    arena.resize(256 * MIB)
    assert resident_bytes() - before < 16 * MIB
    view[: 256 * MIB].fill_(1)
    assert resident_bytes() - before > 240 * MIB
    arena.resize(16 * MIB)
    assert resident_bytes() - before < 40 * MIB
    assert int(view[: 16 * MIB].min()) == 1, "what stays is untouched"
    arena.resize(32 * MIB)
    assert int(view[16 * MIB : 32 * MIB].max()) == 0, "fresh pages are zero"
    del view
    arena.close()
    assert arena.committed_bytes == 0
    arena.close()


def test_an_impossible_reservation_is_an_error() -> None:
    with pytest.raises(OutOfMemory, match="cannot reserve"):
        HostArena(1 << 60)


def test_memory_beyond_the_committed_part_cannot_be_touched() -> None:
    """In a child process, because the access is a segmentation fault."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        arena = HostArena(MIB)
        arena.resize(4096)
        view = arena.tensor(torch.uint8, (MIB,))
        view[0] = 1
        view[MIB - 1] = 1
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status)


def test_mapped_weights_are_used_in_place(tiny_folder: Callable[[str], Path]) -> None:
    mapped = make_executor(tiny_folder("llama"), weights="mapped")
    resident = make_executor(tiny_folder("llama"), weights="resident")
    assert mapped.copied_bytes == 0
    assert resident.copied_bytes == resident.weight_bytes == mapped.weight_bytes
    request = make_request(list(range(20)))
    assert Engine(mapped).run(request) == Engine(resident).run(request)


@pytest.mark.skipif(levels() == ["torch"], reason="the native kernels were not built")
def test_native_kernels_read_bf16_in_place_and_lose_nothing(tiny_folder: Callable[[str], Path]) -> None:
    spec = open_checkpoint(tiny_folder("llama")).spec
    stored = RandomCheckpoint(spec, "bf16")
    widened = RandomCheckpoint(spec, "f32")
    widened._tensors = {name: _widened(tensor) for name, tensor in stored._tensors.items()}
    request = make_request(list(range(20)), max_tokens=24)
    texts = []
    for checkpoint in (stored, widened):
        executor = CpuExecutor(checkpoint, ExecutorConfig(kv_bytes=1 << 22, dtype="f32"))
        executor.resize(executor.max_blocks)
        texts.append(Engine(executor).run(request))
        assert executor.copied_bytes == 0
    assert texts[0] == texts[1]


def _widened(tensor: HostTensor) -> HostTensor:
    values = unpack(tensor.layout, tensor.dtype, tensor.shape, tensor.data)
    return HostTensor("f32", tensor.shape, memoryview(values.reshape(-1).view(np.uint8)))


def test_a_pool_that_cannot_hold_one_block_is_refused(tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(OutOfMemory, match="less than one block"):
        make_executor(tiny_folder("llama"), kv_bytes=10)


def test_an_unknown_dtype_or_kernel_level_is_named(tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="int3"):
        make_executor(tiny_folder("llama"), dtype="int3")
    with pytest.raises(ConfigError, match="fpga"):
        make_executor(tiny_folder("llama"), level="fpga")


def test_models_in_one_process_do_not_know_of_each_other(tiny_folder: Callable[[str], Path]) -> None:
    """Three families with different block sizes, iterating in turns, give what each gives alone."""
    names = {"llama": 4, "gemma2": 8, "opt": 16}
    requests = [make_request(list(range(5 * i, 5 * i + 11)), id=str(i), max_tokens=12) for i in range(3)]
    wanted = {}
    for name, size in names.items():
        executor = make_executor(tiny_folder(name), block_size=size)
        wanted[name] = Engine(executor).run(*requests)
        executor.close()
    engines = {name: Engine(make_executor(tiny_folder(name), block_size=size)) for name, size in names.items()}
    made: dict[str, dict[tuple[str, int], list[int]]] = {name: {} for name in names}
    for engine in engines.values():
        for request in requests:
            engine.scheduler.add(request)
    for _ in range(100):
        for name, engine in engines.items():
            for event in engine.step() if engine.scheduler.has_work else []:
                made[name].setdefault((event.request_id, event.choice), []).append(event.token)
    assert made == wanted


def test_closing_frees_the_memory_of_an_instance(tiny_folder: Callable[[str], Path]) -> None:
    executor = make_executor(tiny_folder("llama"), kv_bytes=256 * MIB)
    executor._cache.layer(0)[:].fill_(1)  # touch every block
    before = resident_bytes()
    executor.close()
    assert before - resident_bytes() > 60 * MIB


def test_a_pool_that_shrinks_moves_its_blocks_without_a_copy_of_all_of_them(tiny_folder: Callable[[str], Path]) -> None:
    spec = open_checkpoint(tiny_folder("llama")).spec
    half = 32 * MIB // KVCache(spec, torch.float32, 16, 1).block_bytes
    cache = KVCache(spec, torch.float32, 16, 2 * half)
    cache.resize(2 * half)
    blocks = cache.usable().view(2 * half, -1)
    blocks[:] = torch.arange(2 * half)[:, None]
    forget_peak(os.getpid())
    before = resident_bytes()
    cache.move([(half + i, half - 1 - i) for i in range(half)])
    assert peak_bytes(os.getpid()) - before < 8 * MIB
    assert torch.equal(blocks[:half].amin(dim=1), torch.arange(half, 2 * half).flip(0).float())
    assert torch.equal(blocks[:half].amin(dim=1), blocks[:half].amax(dim=1))
    del blocks
    cache.close()


@pytest.mark.skipif(levels() == ["torch"], reason="the native kernels were not built")
def test_activations_of_a_long_prompt_are_gone_some_tokens_later() -> None:
    spec = ModelSpec("llama", 512, 512, 2, 8, 2, 64, 2048, 1024, tied_embeddings=True)
    executor = CpuExecutor(RandomCheckpoint(spec, "f32"), ExecutorConfig(kv_bytes=8 * MIB, dtype="f32"))
    executor.resize(executor.max_blocks)
    tokens, blocks = [7] * 1024, list(range(64))
    outcomes, sizes = [], []
    for _ in range(2):
        executor.run(Turn((make_row(0, tokens, 0, 1016, blocks),)))
        for place in range(1016, 1024):
            sizes.append(resident_bytes())
            outcome = executor.run(Turn((make_row(0, tokens, place, 1, blocks),)))
        outcomes.append(outcome)
        assert sizes[-1] - resident_bytes() > 8 * MIB
        assert sizes[-8] - sizes[-1] < MIB, "the next part of a prompt may come after a few"
    assert outcomes[0] == outcomes[1]
    executor.close()
