"""`doctor`: what this machine has, how fast its disk reads, what is missing, and what follows from it."""

from __future__ import annotations

import importlib.util
import mmap
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from dovetail import __version__
from dovetail.cli.output import human_bytes, print_json
from dovetail.errors import ConfigError
from dovetail.machine import (
    NODE_SHARE,
    Cpu,
    Gpu,
    list_gpus,
    memory_bytes,
    preferred_dtype,
    read_cpu,
    read_gpus,
    usable_gpus,
)
from dovetail.types import ModelCard

_TOLD_FEATURES = (
    *("amx_bf16", "avx512f", "avx512_vnni", "avx512_bf16", "avx2", "avx_vnni"),
    *("bf16", "i8mm", "sve", "asimddp", "asimdhp"),
)
_READ_BYTES = 128 * 2**20
_READ_SECONDS = 2.0
_CHUNK_BYTES = 4 * 2**20
_IMPORT_TORCH = "import time; s = time.perf_counter(); import torch; print(torch.__version__, time.perf_counter() - s)"


class Torch(msgspec.Struct, frozen=True):
    version: str
    import_s: float  # in a process of its own, as a worker would


class Report(msgspec.Struct, frozen=True):
    version: str
    python: str
    cpu: Cpu
    memory_total_bytes: int
    memory_available_bytes: int
    gpus: tuple[Gpu, ...]
    store: str
    store_free_bytes: int
    store_read_bytes_per_s: float | None  # None: could not be measured
    torch: Torch | None
    dtype: str  # what `auto` means here
    kernels: str  # level that `auto` means here
    kernels_why: str
    notes: list[str]  # what follows from the above
    missing: list[str]  # what must be there to serve and is not


def doctor(
    store: Annotated[Path | None, typer.Option(help="Folder whose disk is measured.  [default: the store]")] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Compile GPU kernels for the models that are here, ahead of their use.")
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(help="Look at this running server instead, as http://127.0.0.1:8000.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Look at this machine: what it has, what follows from it. Exit code 1 if serving cannot work.

    With --server: look at a running server, and say which sections of the runbook apply (exit code 1 if any does).

    Example: dovetail doctor --server http://127.0.0.1:8000
    """
    from dovetail.machine import default_root

    if server is not None:
        if prepare or store is not None:
            raise ConfigError("--server looks at a running server; leave out --prepare and --store")
        from dovetail.cli.doctor_server import diagnose_and_print

        diagnose_and_print(server, as_json)
        return
    if prepare:
        _prepare(store)
    report = examine(store or default_root())
    if as_json:
        print_json(report)
    else:
        _print(report)
    if report.missing:
        raise typer.Exit(1)


def _prepare(store: Path | None) -> None:
    """Compile GPU kernels for the shapes of all models that are here, once for each GPU of another kind."""
    from dovetail.cli.gpu_kernels import prepare_kernels
    from dovetail.store import Catalogue

    usable = usable_gpus()
    if not usable:
        raise ConfigError("--prepare: there is no GPU here that models could run on")
    prepare_kernels(usable[0], Catalogue(store).cards())


def examine(store: Path) -> Report:
    from dovetail.store import Catalogue

    cpu, gpus, torch = read_cpu(), read_gpus(), _read_torch()
    kernels, kernels_why = _read_kernels() if torch is not None else ("none", "torch cannot be imported")
    total, available = memory_bytes()
    existing = next(folder for folder in (store, *store.parents) if folder.exists())
    read = measure_read(existing)
    return Report(
        version=__version__,
        python=platform.python_version(),
        cpu=cpu,
        memory_total_bytes=total,
        memory_available_bytes=available,
        gpus=gpus,
        store=str(store),
        store_free_bytes=shutil.disk_usage(existing).free,
        store_read_bytes_per_s=read,
        torch=torch,
        dtype=preferred_dtype(),
        kernels=kernels,
        kernels_why=kernels_why,
        notes=[*_notes(cpu, gpus, existing), *explain_large(Catalogue(store).cards(), total, read)],
        missing=[] if torch is not None else ["torch cannot be imported: nothing can be served"],
    )


def explain_large(cards: Sequence[ModelCard], memory: int, read_bytes_per_s: float | None) -> list[str]:
    """Models that a CPU node of this machine has no room for: what becomes of them there."""
    notes, room = [], int(memory * NODE_SHARE)
    for card in cards:
        if card.size_bytes > room:
            left = card.size_bytes - room
            seconds = f", about {left / read_bytes_per_s:.1f} s at this disk's speed" if read_bytes_per_s else ""
            notes.append(
                f"{card.name} ({human_bytes(card.size_bytes)}) is larger than a CPU node here ({human_bytes(room)}): "
                f"{human_bytes(left)} and more of it are read from the disk for each token{seconds}"
            )
    return notes


def measure_read(folder: Path) -> float | None:
    """Bytes per second past the page cache, from a file of our own that is gone afterwards."""
    path = folder / f".dovetail-read-test-{os.getpid()}"
    try:
        with path.open("wb") as file:
            block = os.urandom(2**20)
            for _ in range(_READ_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return _timed_read(path)
    except OSError:
        return None
    finally:
        path.unlink(missing_ok=True)


def _timed_read(path: Path) -> float:
    descriptor = _open_past_cache(path)
    buffer = mmap.mmap(-1, _CHUNK_BYTES)  # page-aligned, as direct reads want it
    try:
        done, start = 0, time.perf_counter()
        while time.perf_counter() - start < _READ_SECONDS and (count := os.readv(descriptor, [buffer])):
            done += count
        return done / (time.perf_counter() - start)
    finally:
        os.close(descriptor)
        buffer.close()


def _open_past_cache(path: Path) -> int:
    """Direct where the file system can, otherwise with the file's cached pages dropped."""
    with suppress(OSError, AttributeError):
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    descriptor = os.open(path, os.O_RDONLY)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return descriptor


def _read_kernels() -> tuple[str, str]:
    from dovetail.native import explain  # brings torch along

    return explain()


def _read_torch() -> Torch | None:
    command = [sys.executable, "-c", _IMPORT_TORCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        version, seconds = done.stdout.split()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return Torch(version, float(seconds))


def _notes(cpu: Cpu, gpus: tuple[Gpu, ...], folder: Path) -> list[str]:
    notes = []
    if not cpu.has_fast_bf16:
        notes.append(f"no bf16 matrix instructions: floats are multiplied in {preferred_dtype()} on this CPU")
    elif not cpu.has_amx and cpu.architecture == "x86_64":
        notes.append("no AMX: bf16 is multiplied by AVX-512, several times slower than AMX would")
    if not gpus:
        notes.append("no NVIDIA GPU: models run on the CPU")
    elif not usable_gpus():
        if "CUDA_VISIBLE_DEVICES" in os.environ and not list_gpus():
            notes.append("CUDA_VISIBLE_DEVICES hides all GPUs: models run on the CPU")
        else:
            notes.append(
                "torch was built without CUDA here, or Triton is missing: models run on the CPU (dovetail[cuda])"
            )
    if importlib.util.find_spec("huggingface_hub") is None:
        notes.append("huggingface_hub is not installed: `pull hf:…` does not work (install dovetail[convert])")
    if importlib.util.find_spec("pip") is None:
        notes.append("pip is not installed here: `pull pypi:…` does not work (with uv: `uv tool install --with pip …`)")
    if not os.access(folder, os.W_OK):
        notes.append(f"{folder} is not writable: nothing can be pulled")
    return notes


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    cpu, read = report.cpu, report.store_read_bytes_per_s
    has = [feature for feature in _TOLD_FEATURES if feature in cpu.features]
    memory = f"{human_bytes(report.memory_total_bytes)}, {human_bytes(report.memory_available_bytes)} available"
    gpus = ", ".join(f"{gpu.name} ({human_bytes(gpu.memory_bytes)})" for gpu in report.gpus) or "none"
    torch = (
        "not importable"
        if report.torch is None
        else f"{report.torch.version}, imports in {report.torch.import_s:.1f} s"
    )
    rows = {
        "dovetail": f"{report.version} on Python {report.python}",
        "CPU": f"{cpu.model} ({cpu.architecture}), {cpu.cores} cores",
        "features": ", ".join(has) or "none that matter here",
        "memory": memory,
        "GPUs": gpus,
        "store": f"{report.store}, {human_bytes(report.store_free_bytes)} free",
        "disk reads": "could not be measured" if read is None else f"{human_bytes(read)}/s",
        "torch": torch,
        "kernels": f"{report.kernels}: {report.kernels_why}",
        "weights": f"computed in {report.dtype} unless told otherwise",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for key, value in rows.items():
        table.add_row(key, value)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for note in report.notes:
        console.print(f"· {note}")
    for problem in report.missing:
        console.print(f"! {problem}")
