"""Models of which some layers are read from the disk with every iteration: the same bits as of one in memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drive import Engine, logits_of, make_executor, make_request
from store_builders import flat, stored, writable_blob

from dovetail.engine.devices.cpu import CpuDevice
from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.errors import DamagedCheckpoint, DovetailError, OutOfMemory, UnsupportedModel
from dovetail.store.format.manifest import StoredModel, partition_files
from dovetail.store.loading.layer_reader import DiskThreads, LayerReader, Range, measure_speed
from dovetail.store.loading.loader import LoaderConfig
from dovetail.store.loading.reader import PartitionFile
from dovetail.store.loading.streamed import disk_speed, open_streamed

CONFIG = ExecutorConfig(kv_bytes=1 << 22, block_size=4, dtype="f32")
FILES = LoaderConfig(readers=3)
TOKENS = [5, 6, 7, 8, 9, 10, 11]
PAGE = 4096


@pytest.fixture
def model(tiny_folder: Callable[[str], Path], tmp_path: Path) -> StoredModel:
    return stored(tiny_folder("gemma2"), tmp_path)  # four layers


def streamed(folder: Path, layers: Sequence[int], num_slots: int = 2, **options: Any) -> CpuExecutor:
    executor = CpuDevice(1).executor(open_streamed(folder, layers, num_slots, FILES), CONFIG)
    assert isinstance(executor, CpuExecutor)
    executor.resize(executor.max_blocks)
    return executor


def threads() -> int:
    return sum(thread.name.startswith("layer-reader") for thread in threading.enumerate())


@pytest.mark.parametrize("layers", [(0,), (3,), (1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_logits_are_those_of_the_model_in_memory(model: StoredModel, layers: Sequence[int], num_slots: int) -> None:
    ours, theirs = streamed(model.path, layers, num_slots), make_executor(model.path, kv_bytes=1 << 22)
    for one, other in zip(logits_of(ours, TOKENS, [3, 2, 1, 1]), logits_of(theirs, TOKENS, [3, 2, 1, 1]), strict=True):
        assert torch.equal(one, other)
    assert ours.copied_bytes < ours.weight_bytes / 10
    ours.close()
    assert not threads()


@pytest.mark.parametrize(("name", "options"), [
    ("qwen2", {}),
    ("qwen2", {"layout": "int8"}),
    ("qwen2", {"layout": "int4"}),
    ("llama_bias", {"dtype": "bf16"}),
    ("mixtral", {}),
    ("opt", {}),
])  # fmt: skip
def test_so_are_greedy_texts_of_every_form(
    name: str, options: dict[str, Any], tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = stored(tiny_folder(name), tmp_path, **options).path
    requests = [make_request([5, 6, 7], "a", max_tokens=12), make_request([9, 8], "b", max_tokens=9)]
    ours, theirs = streamed(folder, (0, 1, 2)), make_executor(folder, kv_bytes=1 << 22)
    assert Engine(ours).run(*requests) == Engine(theirs).run(*requests)
    ours.close()


def test_the_torch_level_waits_for_layers_too(model: StoredModel) -> None:
    config = ExecutorConfig(kv_bytes=1 << 22, block_size=4, dtype="f32", level="torch")
    ours = CpuExecutor(open_streamed(model.path, (1, 2), 1, FILES), config)
    ours.resize(ours.max_blocks)
    theirs = make_executor(model.path, kv_bytes=1 << 22, level="torch")
    for one, other in zip(logits_of(ours, TOKENS, [4, 3]), logits_of(theirs, TOKENS, [4, 3]), strict=True):
        assert torch.equal(one, other)
    ours.close()


def test_what_stays_is_what_the_file_holds_and_slots_have_one_layer_after_another(model: StoredModel) -> None:
    opened = open_streamed(model.path, (0, 1, 2, 3), 2, FILES)
    for layer in (0, 1, 2, 3, 0, 1):
        assert opened.reader.wait(layer)
        for name, _ in model.spec.tensors():
            if not opened.is_in_slot(name) or name.startswith(f"layers.{layer}."):
                assert np.array_equal(flat(opened, name), flat(model, name))
        opened.reader.release(layer)
    opened.reader.close()
    opened.close()


def test_an_iteration_that_broke_off_leaves_the_next_one_its_layers(model: StoredModel) -> None:
    opened = open_streamed(model.path, (0, 1, 2, 3), 2, FILES)
    for last in (3, 1, 2, 4, 1):
        for layer in range(last):
            assert opened.reader.wait(layer)
            assert np.array_equal(flat(opened, f"layers.{layer}.out.weight"), flat(model, f"layers.{layer}.out.weight"))
            opened.reader.release(layer)
    opened.reader.close()


def test_nothing_of_the_layers_goes_through_the_page_cache_where_reads_are_direct(model: StoredModel) -> None:
    ((path, partition),) = partition_files(model.path)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("no direct reads on this file system")
    file = PartitionFile(path, partition.size, "on")
    threads = DiskThreads(file, 2)
    reader = LayerReader(threads, {0: Range(0, PAGE), 1: Range(PAGE, 3 * PAGE)}, 1)
    reader.start()
    whole = path.read_bytes()
    for _ in range(3):
        for layer, (begin, end) in ((0, (0, PAGE)), (1, (PAGE, 3 * PAGE))):
            assert reader.wait(layer)
            assert bytes(reader.memory_of(layer)[1]) == whole[begin:end]
            reader.release(layer)
    assert reader.speed
    assert reader.num_bytes == 3 * PAGE
    reader.close()


def test_a_layer_that_cannot_be_read_ends_the_iteration_and_not_the_reader(
    model: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = open_streamed(model.path, (0, 1, 2, 3), 2, FILES)
    for layer in (0, 1):  # both slots are full
        assert opened.reader.wait(layer)
    path = writable_blob(model.path)
    size = path.stat().st_size
    content = path.read_bytes()
    os.truncate(path, PAGE)
    opened.reader.release(0)
    opened.reader.release(1)
    with pytest.raises(DovetailError):
        opened.reader.wait(2)
    path.write_bytes(content)
    assert path.stat().st_size == size
    assert opened.reader.wait(2), "it is read again"
    assert np.array_equal(flat(opened, "layers.2.out.weight"), flat(model, "layers.2.out.weight"))
    opened.reader.close()


def test_a_blob_that_is_streamed_is_in_use(model: StoredModel) -> None:
    import fcntl

    model.close()
    ((path, _),) = partition_files(model.path)
    executor = streamed(model.path, (1, 2))
    with path.open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    executor.close()
    with path.open("rb") as file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_weights_that_are_not_stored_as_they_are_computed_with_are_refused(model: StoredModel) -> None:
    config = ExecutorConfig(kv_bytes=1 << 22, block_size=4, dtype="bf16")
    with pytest.raises(UnsupportedModel, match="pull the model again"):
        CpuDevice(1).executor(open_streamed(model.path, (1, 2), 2, FILES), config)
    assert not threads()


def test_a_model_that_does_not_open_leaves_no_threads(model: StoredModel) -> None:
    with pytest.raises(OutOfMemory):
        CpuDevice(1).executor(open_streamed(model.path, (1, 2), 2, FILES), ExecutorConfig(kv_bytes=1, dtype="f32"))
    assert not threads()
    writable_blob(model.path).write_bytes(b"short")
    with pytest.raises(DamagedCheckpoint):
        open_streamed(model.path, (1, 2), 2, FILES)
    assert not threads()


def test_the_speed_of_a_disk_is_measured(model: StoredModel, tmp_path: Path) -> None:
    speed = disk_speed(model.path, FILES)
    assert speed is not None
    assert speed > 1e5
    assert measure_speed(tmp_path / "absent", PAGE, "auto", 1) is None
