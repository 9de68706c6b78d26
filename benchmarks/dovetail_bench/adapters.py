"""Adapters of one model against as many merged models: the same requests, cores and memory for each.

What merging would write has the base's size and precision and costs what the base costs, so that copies of the base
stand for merged models. Adapters are random, for every matrix of every layer.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from dovetail.modelspec import ModelSpec
from dovetail.sched.turn import Turn
from dovetail.sim.trace import Arrival
from dovetail.store import Catalogue, open_checkpoint
from dovetail.store.format.manifest import (
    MANIFEST,
    Partition,
    blob_path,
    encode_manifest,
    is_stored,
    partition_digest,
    partition_files,
    read_card,
    read_manifest,
    store_root,
)
from dovetail.store.hf.adapter_parts import open_adapter, target_rows_of
from dovetail.types import ModelCard
from dovetail_bench.fleet import STEP, FleetModel, Report, check_distinct
from dovetail_bench.many import Outcome, Step, run_one
from dovetail_bench.safetensors_writer import write_safetensors
from dovetail_bench.servers import Contender, Settings, dovetail, running, with_adapters

STRENGTH = 0.05  # of a random adapter's second matrix


class StepTime(msgspec.Struct, frozen=True):
    """A decoding iteration of `batch` rows at a context of `context` tokens."""

    batch: int
    adapters: int  # different ones among the rows
    context: int
    seconds: float  # median
    over_none: float  # times what it takes without adapters


class AdapterContest(msgspec.Struct, frozen=True):
    adapters: int
    rank_from: int
    rank_to: int
    adapter_bytes: int  # of all of them, in memory
    cores: int
    requests: int
    steps: list[StepTime]
    outcomes: list[Outcome]


def write_adapter(folder: Path, spec: ModelSpec, rank: int, seed: int) -> Path:
    """In PEFT's form, float16. What is there from an earlier run is used again."""
    weights = folder / "adapter_model.safetensors"
    if weights.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_bytes(msgspec.json.encode(config))
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for module, target in target_rows_of(spec).items():
        prefix = f"base_model.model.model.{module}"
        shapes[f"{prefix}.lora_A.weight"] = "f16", (rank, target.columns)
        shapes[f"{prefix}.lora_B.weight"] = "f16", (target.rows, rank)
    write_safetensors(weights, shapes, _draw([shape for _, shape in shapes.values()], seed))
    return folder


def _draw(shapes: Sequence[tuple[int, ...]], seed: int) -> Iterator[bytes]:
    """Many numbers, again and again: drawing each would take longer than all the rest."""
    some = np.random.default_rng(seed).standard_normal(max(map(math.prod, shapes)), np.float32)
    for index, shape in enumerate(shapes):
        scale = shape[1] ** -0.5 if index % 2 == 0 else STRENGTH
        values = np.roll(some, index)[: math.prod(shape)] * np.float32(scale)
        yield values.astype("<f2").tobytes()


def make_adapters(
    catalogue: Catalogue, folder: Path, base: ModelCard, names: Sequence[str], ranks: tuple[int, int], report: Report
) -> dict[str, str]:
    """One for each name, in the store; ranks from the first to the second and again."""
    span = ranks[1] - ranks[0] + 1
    found = {}
    for index, name in enumerate(names):
        rank = ranks[0] + index % span
        report(f"making the adapter {name}", index, len(names))
        written = write_adapter(folder / f"{name}-r{rank}", base.spec, rank, index)
        found[name] = catalogue.take(str(written), name=f"adapter-{name}-r{rank}").name
    return found


def make_copies(catalogue: Catalogue, base: ModelCard, count: int, report: Report) -> list[FleetModel]:
    """Models of the base's form and cost that are no two the same file: each has another final norm."""
    models = []
    for number in range(count):
        report(f"making model {number}", number, count)
        folder = catalogue.paths.folder(f"copy-{number:02d}")
        if not is_stored(folder):
            _copy_stored(Path(base.path), folder, number)
        card = read_card(folder, folder.name)
        models.append(FleetModel(card, partition_files(folder)[0][0]))
    check_distinct(models)
    return models


def _copy_stored(base: Path, folder: Path, number: int) -> None:
    manifest = read_manifest(base)
    ((path, partition),) = partition_files(base, manifest)
    data = bytearray(path.read_bytes())
    norm = next(entry for entry in manifest.tensors if entry.name == "final_norm.weight")
    values = np.frombuffer(data, "<f4", norm.size // 4, norm.offset)
    values *= np.float32(1 + STEP * (number + 1))
    size = partition.chunk_bytes
    chunks = tuple(hashlib.sha256(data[at : at + size]).hexdigest() for at in range(0, len(data), size))
    digest = partition_digest(len(data), size, chunks)
    blob = blob_path(store_root(folder), digest)
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    folder.mkdir(parents=True, exist_ok=True)
    for name in manifest.files:
        shutil.copyfile(base / name, folder / name)
    other = msgspec.structs.replace(manifest, partitions=(Partition(digest, len(data), size, chunks),))
    (folder / MANIFEST).write_bytes(encode_manifest(other))


def compete(
    models: Sequence[FleetModel],
    base: ModelCard,
    adapters: dict[str, str],
    arrivals: Sequence[Arrival],
    settings: Settings,
    seed: int,
    step: Step,
    contenders: Sequence[str],
) -> list[Outcome]:
    makers: dict[str, Callable[[], Contender]] = {
        "adapters": lambda: with_adapters(models, settings, base, adapters),
        "one": lambda: with_adapters(models, settings, base, adapters, at_once=1),
        "merged": lambda: msgspec.structs.replace(dovetail(models, settings), name="merged models"),
    }
    outcomes = []
    for name in contenders:
        with running(makers[name](), settings.folder / f"{name}.log") as server:
            outcomes.append(run_one(server, models, arrivals, settings, seed, step))
    return outcomes


def measure_steps(
    base: ModelCard, folders: Sequence[Path], batches: Sequence[int], rounds: int = 15
) -> tuple[list[StepTime], int]:
    """What adapters cost an iteration: none, one for all rows, one for each. Returns the bytes of one, too."""
    from dovetail.engine.adapters import read_matrices
    from dovetail.engine.executor import CpuExecutor, ExecutorConfig
    from dovetail_bench.iterations import CONTEXT, decode

    executor = CpuExecutor(open_checkpoint(base.path), ExecutorConfig(kv_bytes=1 << 30))
    executor.resize(min(executor.max_blocks, max(batches) * (CONTEXT // 16 + 2)))
    sizes = []
    for index, folder in enumerate(folders[: max(batches)]):
        weights = open_adapter(folder, base.spec)
        matrices = read_matrices(weights)
        executor.add_adapter(str(index), matrices)
        sizes.append(matrices.num_bytes)
        weights.close()
    found: list[StepTime] = []
    for batch in batches:
        plain = decode(batch).rows
        turns = {0: plain}
        for count in sorted({1, min(batch, len(sizes))}):
            named = [msgspec.structs.replace(row, adapter=str(at % count)) for at, row in enumerate(plain)]
            turns[count] = tuple(named)
        times: dict[int, list[float]] = {count: [] for count in turns}
        for _ in range(rounds + 1):  # one after another: what else the machine does meets all alike
            for count, rows in turns.items():
                started = time.perf_counter()
                executor.run(Turn(rows))
                times[count].append(time.perf_counter() - started)
        medians = {count: statistics.median(each[1:]) for count, each in times.items()}
        found += [StepTime(batch, count, CONTEXT, took, took / medians[0]) for count, took in medians.items()]
    executor.close()
    return found, round(statistics.mean(sizes))
