"""Models served from the host pool: the same bits, no copy, and gone when they are let go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from drive import Engine, logits_of, make_executor, make_request
from store_builders import flat, flip_bit, stored
from test_store_adapters import write_adapter

from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.errors import DamagedCheckpoint
from dovetail.store import Catalogue
from dovetail.store.collect import use_of
from dovetail.store.format.manifest import StoredModel, partition_files
from dovetail.store.host_pool.pool import HostPool
from dovetail.store.loading.loader import Loader, LoaderConfig, Tier
from dovetail.store.loading.pooled import open_pooled, open_pooled_adapter
from dovetail.store.loading.reader import PartitionFile
from dovetail.store.paths import StorePaths

CHUNK = 64 << 10
CONFIG = ExecutorConfig(kv_bytes=1 << 22, block_size=4, dtype="f32")


@pytest.fixture
def loader() -> Iterator[Loader]:
    pool = HostPool.create(64 * CHUNK, CHUNK)
    loader = Loader(pool, LoaderConfig(readers=2, range_bytes=CHUNK))
    yield loader
    loader.close()
    assert pool.stats().pinned_bytes == 0, "somebody still holds a model"
    pool.close()


@pytest.fixture
def model(tiny_folder: Callable[[str], Path], tmp_path: Path) -> StoredModel:
    return stored(tiny_folder("qwen2"), tmp_path)


def test_the_pool_holds_what_the_files_hold(model: StoredModel, loader: Loader) -> None:
    pooled = open_pooled(model.path, loader)
    for name, _ in model.spec.tensors():
        assert np.array_equal(flat(pooled, name), flat(model, name))
    pooled.close()


def test_an_executor_runs_on_the_pool_in_place(model: StoredModel, loader: Loader) -> None:
    pooled = open_pooled(model.path, loader)
    executor = CpuExecutor(pooled, CONFIG)
    executor.resize(executor.max_blocks)
    pooled.close()  # the executor's tensors hold the bytes
    assert executor.copied_bytes == 0
    mapped = make_executor(model.path, kv_bytes=1 << 22)
    tokens = [5, 6, 7, 8, 9]
    for ours, theirs in zip(logits_of(executor, tokens, [3, 2]), logits_of(mapped, tokens, [3, 2]), strict=True):
        assert torch.equal(ours, theirs)
    assert loader.pool.stats().pinned_bytes > 0
    executor.close()
    assert loader.pool.stats().pinned_bytes == 0
    mapped.close()


def test_the_second_start_reads_no_file(model: StoredModel, loader: Loader) -> None:
    open_pooled(model.path, loader).close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartitionFile, "read_into", lambda *_: pytest.fail("read again"))
        again = open_pooled(model.path, loader)
    assert [ticket.tier for ticket in again.tickets] == [Tier.HOST]
    again.close()


def test_a_tensor_can_be_used_as_soon_as_it_has_arrived(model: StoredModel, loader: Loader) -> None:
    pooled = open_pooled(model.path, loader, whole=False)
    for name, _ in model.spec.tensors():
        pooled.wait(name)
        assert np.array_equal(flat(pooled, name), flat(model, name))
    pooled.close()


def test_a_flipped_bit_is_found_while_loading(model: StoredModel, loader: Loader) -> None:
    path, _ = partition_files(model.path)[0]
    flip_bit(path, 5000)
    with pytest.raises(DamagedCheckpoint, match=path.name):
        open_pooled(model.path, loader, verify=True)
    assert loader.pool.stats().used_bytes == 0


def test_tensors_of_a_model_that_was_cut_for_two_devices_come_together(
    tiny_folder: Callable[[str], Path], tmp_path: Path, loader: Loader
) -> None:
    model = stored(tiny_folder("llama"), tmp_path, ranks=2)
    pooled = open_pooled(model.path, loader)
    assert len(pooled.tickets) == 2
    for name, _ in model.spec.tensors():
        assert np.array_equal(flat(pooled, name), flat(model, name))
    pooled.close()


def test_a_model_whose_bytes_are_used_counts_as_in_use(model: StoredModel, loader: Loader, tmp_path: Path) -> None:
    """`gc` spares it, although no file is mapped."""
    model.close()
    paths = StorePaths(tmp_path)
    pooled = open_pooled(model.path, loader)
    tensor = pooled.pieces("embed.weight")
    pooled.close()
    assert use_of(paths, model.path).in_use
    del tensor
    assert not use_of(paths, model.path).in_use


def test_two_executors_of_one_model_share_its_memory(model: StoredModel, loader: Loader) -> None:
    executors = []
    for _ in range(2):
        pooled = open_pooled(model.path, loader)
        executors.append(CpuExecutor(pooled, CONFIG))
        executors[-1].resize(executors[-1].max_blocks)
        pooled.close()
    assert loader.pool.stats().used_bytes < 2 * model.manifest.size_bytes
    answers = [Engine(executor).run(make_request([1, 2, 3])) for executor in executors]
    assert answers[0] == answers[1]
    for executor in executors:
        executor.close()


def test_an_adapter_comes_the_same_way(loader: Loader, tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "store")
    name = catalogue.take(str(write_adapter(tmp_path / "adapter"))).name
    mapped = catalogue.open_adapter(name)
    pooled = open_pooled_adapter(mapped.path, loader, verify=True)
    assert pooled.adapter == mapped.adapter
    assert pooled.names() == mapped.names()
    for tensor in mapped.names():
        assert np.array_equal(flat(pooled, tensor), flat(mapped, tensor))
    pooled.close()
    mapped.close()
