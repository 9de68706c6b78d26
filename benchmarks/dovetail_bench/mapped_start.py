"""How long a model takes from host memory to ready on a CPU, and whether a byte was copied (L3, mapped start).

A random model of a known shape is written to a store of its own and loaded into a pool. Another process, as a worker
would, inherits the pool and builds an executor upon it, again and again. Its private memory is looked at before and
after, since copies would be there; the pool's before and after, since it must not grow either.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from dovetail.engine.executor import CpuExecutor, ExecutorConfig
from dovetail.errors import DovetailError
from dovetail.layouts import NUMPY
from dovetail.machine import preferred_dtype
from dovetail.modelspec import DTYPE_BYTES, ModelSpec
from dovetail.node.ports import HostTensor
from dovetail.sched.turn import Turn, TurnRow
from dovetail.store.convert import Conversion
from dovetail.store.format.arrange import arrange
from dovetail.store.format.manifest import FORMAT, VERSION, Manifest
from dovetail.store.host_pool.pool import CHUNK_BYTES, HostPool
from dovetail.store.loading.loader import Loader
from dovetail.store.loading.pooled import open_pooled
from dovetail.store.paths import StorePaths
from dovetail.store.publish import publish
from dovetail.types import SamplingParams
from dovetail_bench import shapes
from dovetail_bench.process_tree import held_bytes

SHAPES = {
    "0.5b": shapes.SHAPES["0.5B"],
    "1b": shapes.SHAPES["1B"],
    "tiny": ModelSpec("llama", 256, 64, 2, 4, 2, 16, 96, 256, tied_embeddings=True),  # to try the bench itself
}
_SLAB_BYTES = 64 << 20
_CHILD = "import sys; from dovetail_bench.mapped_start import run_child; run_child(*sys.argv[1:])"


class ChildFailed(DovetailError):
    pass


class Start(msgspec.Struct, frozen=True):
    """One start in the child."""

    seconds: float
    cpu_s: float  # of it, computing: what is left of the figure on a busy machine
    checkpoint_s: float  # of it, until the tensors are views of the pool
    copied_bytes: int
    private_bytes_before: int  # memory that only this process has
    private_bytes_after: int
    first_token_s: float  # afterwards: a prompt of one token, which touches every weight


class Result(msgspec.Struct, frozen=True):
    model: str
    dtype: str
    weight_bytes: int
    disk_to_pool_s: float
    runs: int
    start_s_median: float
    start_s_worst: float
    start_cpu_s_median: float
    checkpoint_s_median: float
    copied_bytes: int  # the most of any run
    private_growth_bytes: int  # the most of any run
    pool_growth_bytes: int  # resident memory of the pool, over all runs
    first_token_s_median: float


class RandomModel:
    """A convert.Source without files: one slab of random values, again and again."""

    def __init__(self, spec: ModelSpec, dtype: str) -> None:
        self.spec = spec
        values = np.random.default_rng(0).standard_normal(_SLAB_BYTES // 4, np.float32) * np.float32(0.02)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else values.astype(NUMPY[dtype])
        self._slab = bits.view(np.uint8).reshape(-1).data.toreadonly()
        self._dtype = dtype
        self._shapes = dict(spec.tensors())

    @property
    def in_place(self) -> bool:
        return False

    def pieces(self, name: str) -> Sequence[HostTensor]:
        rows, *rest = self._shapes[name]
        row_bytes = int(np.prod(rest, dtype=np.int64)) * DTYPE_BYTES[self._dtype]
        step = len(self._slab) // row_bytes
        counts = [min(step, rows - at) for at in range(0, rows, step)]
        return [HostTensor(self._dtype, (count, *rest), self._slab[: count * row_bytes]) for count in counts]

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


def write_model(
    spec: ModelSpec,
    dtype: str,
    root: Path,
    report: Callable[[int, int], None] | None = None,
    layout: str = "plain",
) -> Path:
    """A model of random weights in a store of its own; returns its folder. It has no tokenizer: it speaks tokens."""
    paths = StorePaths(root)
    paths.create()
    staging = paths.staging / "random"
    staging.mkdir()
    arrangement = arrange(spec, dtype, layout)
    conversion = Conversion(staging, "random")
    partitions = conversion.run(RandomModel(spec, dtype), arrangement, report)
    manifest = Manifest(
        format=FORMAT,
        version=VERSION,
        checksum="",
        kind="model",
        source="random",
        created=int(time.time()),
        dtype=dtype,
        layout=layout,
        partitions=tuple(partitions),
        tensors=tuple(share for tensor in arrangement.tensors for share in tensor.shares),
        files={},
        spec=spec,
    )
    publish(paths, "random", manifest, {}, [(conversion.path(0), partitions[0])])
    return paths.folder("random")


def measure(
    model: str,
    runs: int,
    folder: Path | None = None,
    dtype: str = "auto",
    report: Callable[[int, int], None] | None = None,
) -> Result:
    """`folder` is where the temporary store is made."""
    dtype = preferred_dtype() if dtype == "auto" else dtype
    with _temporary_folder(folder) as root:
        stored = write_model(SHAPES[model], dtype, root, report)
        size = arrange(SHAPES[model], dtype).sizes[0]
        pool = HostPool.create(size + CHUNK_BYTES, CHUNK_BYTES)
        loader = Loader(pool)
        try:
            began = time.perf_counter()
            held = open_pooled(stored, loader)
            load_s = time.perf_counter() - began
            before = pool.stats().resident_bytes
            starts = _run_in_child(pool, stored, runs)
            growth = pool.stats().resident_bytes - before
            held.close()
        finally:
            loader.close()
            pool.close()
    return Result(
        model=model,
        dtype=dtype,
        weight_bytes=size,
        disk_to_pool_s=load_s,
        runs=runs,
        start_s_median=statistics.median(start.seconds for start in starts),
        start_s_worst=max(start.seconds for start in starts),
        start_cpu_s_median=statistics.median(start.cpu_s for start in starts),
        checkpoint_s_median=statistics.median(start.checkpoint_s for start in starts),
        copied_bytes=max(start.copied_bytes for start in starts),
        private_growth_bytes=max(start.private_bytes_after - start.private_bytes_before for start in starts),
        pool_growth_bytes=growth,
        first_token_s_median=statistics.median(start.first_token_s for start in starts),
    )


def run_child(file: str, folder: str, runs: str) -> None:
    """In the process that inherits the pool."""
    pool = HostPool(int(file))
    loader = Loader(pool)
    starts = [start_once(Path(folder), loader) for _ in range(int(runs) + 1)]
    loader.close()
    sys.stdout.buffer.write(msgspec.json.encode(starts[1:]))  # the first one pays for imports


def start_once(folder: Path, loader: Loader) -> Start:
    before = _private_bytes()
    began, began_cpu = time.perf_counter(), time.thread_time()
    checkpoint = open_pooled(folder, loader)
    opened = time.perf_counter()
    executor = CpuExecutor(checkpoint, ExecutorConfig(kv_bytes=64 << 20))
    ready, ready_cpu = time.perf_counter(), time.thread_time()
    after = _private_bytes()
    executor.resize(1)
    ran = time.perf_counter()
    executor.run(_one_token())
    first_s = time.perf_counter() - ran
    copied = executor.copied_bytes
    executor.close()
    checkpoint.close()
    return Start(ready - began, ready_cpu - began_cpu, opened - began, copied, before, after, first_s)


def _run_in_child(pool: HostPool, folder: Path, runs: int) -> list[Start]:
    command = [sys.executable, "-c", _CHILD, str(pool.file), str(folder), str(runs)]
    done = subprocess.run(command, pass_fds=[pool.file], capture_output=True)
    if done.returncode != 0:
        raise ChildFailed(f"the measuring process: {done.stderr.decode().strip().splitlines()[-1]}")
    return msgspec.json.decode(done.stdout, type=list[Start])


def _one_token() -> Turn:
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    return Turn((TurnRow(0, [1], 0, 1, [0], samples=True, num_prompt=1, sampling=sampling),))


def _private_bytes() -> int:
    """Pages that no other process maps; a copy of weights would be among them."""
    return sum(size for name, size in held_bytes("self").items() if name.startswith("Private_"))


@contextmanager
def _temporary_folder(parent: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-", dir=parent) as name:
        yield Path(name)
