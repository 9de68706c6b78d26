"""What a worker holds for a model that it serves: the mapped file, the KV cache, and little else."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from dovetail.modelspec import ModelSpec
from dovetail.native import levels
from dovetail.store.format.manifest import read_card
from dovetail_bench.mapped_start import write_model
from dovetail_bench.served_memory import measure, peak_bytes, read_held

MB = 10**6
SCRATCH_BYTES = 24 * MB  # activations of 512 tokens, logits, code that is run for the first time
SPEC = ModelSpec("llama", 65_536, 512, 8, 8, 2, 64, 2048, 2048, tied_embeddings=True)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")


@pytest.mark.skipif(levels() == ["torch"], reason="torch's level unpacks and widens")
@pytest.mark.parametrize("kept", ["bf16", "int8"])
def test_a_served_model_takes_its_weights_its_cache_and_little_else(kept: str, tmp_path: Path) -> None:
    layout, dtype = ("plain", "bf16") if kept == "bf16" else (kept, "f32")
    folder = write_model(SPEC, dtype, tmp_path, layout=layout)
    found = measure(read_card(folder, "random"), prompt=512)
    assert found.kept == kept
    assert found.weight_bytes > 2 * SCRATCH_BYTES, "a copy would go unnoticed"
    assert abs(found.loaded.anonymous - found.idle.anonymous) < SCRATCH_BYTES  # a start maps; who idles keeps nothing
    own = found.served.anonymous - found.idle.anonymous  # may be less than the cache: what a start took is given back
    assert own < found.kv_bytes + SCRATCH_BYTES
    assert 0.9 * found.weight_bytes < found.served.file - found.idle.file < found.weight_bytes + SCRATCH_BYTES
    assert found.growth_bytes < found.weight_bytes + found.kv_bytes + SCRATCH_BYTES


def test_memory_is_told_apart_by_what_is_behind_it(tmp_path: Path) -> None:
    before = read_held(os.getpid())
    own = mmap.mmap(-1, 64 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    own[:] = b"1" * len(own)
    after = read_held(os.getpid())
    assert after.anonymous - before.anonymous > 60 * MB
    assert after.file - before.file < 8 * MB
    assert peak_bytes(os.getpid()) > 60 * MB
    own.close()
    (tmp_path / "file").write_bytes(b"1" * 64 * MB)
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[::4096]) > 0
        assert read_held(os.getpid()).file - before.file > 60 * MB
