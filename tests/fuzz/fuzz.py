"""`python tests/fuzz/fuzz.py [TARGET …] [--inputs N] [--seconds S]`: fuzzes the readers and the engine.

Input i of a target follows from the number i alone, so that a find is told by it, and a run goes on where the last one
ended (`build/fuzz/<target>/progress.json`). Each target runs in a child: what ends it, or takes longer than a second of
processor time, is a find too. With `--replay TARGET FILE` one input is run here.
"""

from __future__ import annotations

import argparse
import importlib.util
import mmap
import os
import random
import resource
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
BUILD = HERE.parent.parent / "build" / "fuzz"
SLOW_S = 1.0  # of processor time
HUNG_S = 30.0  # of any time
MEMORY_BYTES = 6 << 30
_FIELDS = "<QQQd"  # next input, accepted, refused, processor seconds
_KEPT = 50


def main() -> None:
    from targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=[], choices=[*TARGETS, []])
    parser.add_argument("--inputs", type=int, default=1_000_000, help="in all, with those of earlier runs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each target")
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "FILE"))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--prepare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare:
        TARGETS[options.prepare](_folder(options.prepare)).prepare()
    elif options.child:
        _child(options.child[0], int(options.child[1]), float(options.child[2]))
    elif options.replay:
        target = _loaded(options.replay[0])
        print("accepted" if target.run(Path(options.replay[1]).read_bytes()) else "refused")
    else:
        finds = [_fuzz(name, options.inputs, options.seconds) for name in options.targets or TARGETS]
        sys.exit(1 if any(finds) else 0)


def _folder(name: str) -> Path:
    memory = Path("/dev/shm")
    root = memory / f"dovetail-fuzz-{os.getuid()}" if memory.is_dir() else BUILD / "work"
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _loaded(name: str) -> Any:
    from targets import TARGETS

    if not (_folder(name) / "seeds").is_dir():
        subprocess.run([sys.executable, __file__, "--prepare", name], check=True)
    if TARGETS[name].wants_sanitizer and os.environ.get("DOVETAIL_SANITIZED"):
        _use_kernels(Path(os.environ["DOVETAIL_SANITIZED"]))
    target = TARGETS[name](_folder(name))
    target.load()
    return target


def _use_kernels(path: Path) -> None:
    spec = importlib.util.spec_from_file_location("dovetail.native._kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


# The child


def _child(name: str, count: int, seconds: float) -> None:
    """Inputs from where the shared memory says, until there are `count` or the time is up."""
    target = _loaded(name)
    if "LD_PRELOAD" not in os.environ:  # a sanitizer's own tables are larger than any limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with (BUILD / name / "shared").open("r+b") as file:
        shared = mmap.mmap(file.fileno(), struct.calcsize(_FIELDS))
    finds = BUILD / name / "finds"
    ends, began = time.monotonic() + seconds, time.process_time()
    index, accepted, refused, spent = struct.unpack_from(_FIELDS, shared)
    while index < count and time.monotonic() < ends:
        struct.pack_into(_FIELDS, shared, 0, index, accepted, refused, spent + time.process_time() - began)
        data = make_input(target, index)
        started = time.process_time()
        try:
            if target.run(data):
                accepted += 1
            else:
                refused += 1
        except BaseException as error:  # a panic of Rust's is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            _note(finds, index, data, f"{type(error).__module__}.{type(error).__name__}: {error}")
        if time.process_time() - started > SLOW_S:
            _note(finds, index, data, f"slow: {time.process_time() - started:.1f} s")
        index += 1
    struct.pack_into(_FIELDS, shared, 0, index, accepted, refused, spent + time.process_time() - began)


def make_input(target: Any, index: int) -> bytes:
    data: bytes = target.make(random.Random(f"{target.name}-{index}"))
    return data


def _note(finds: Path, index: int, data: bytes, what: str) -> None:
    finds.mkdir(parents=True, exist_ok=True)
    if len(list(finds.iterdir())) < 2 * _KEPT:
        (finds / f"{index}.input").write_bytes(data)
        (finds / f"{index}.txt").write_text(what[:4000])
    with (finds.parent / "finds.log").open("a") as log:
        log.write(f"{index} {' '.join(what.split())[:300]}\n")


# The parent


def _fuzz(name: str, count: int, seconds: float) -> int:
    """Returns how many finds there are, from earlier runs too."""
    from targets import TARGETS

    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    shared = folder / "shared"
    if not shared.exists():
        shared.write_bytes(struct.pack(_FIELDS, 0, 0, 0, 0.0))
    environment = dict(os.environ, RUST_BACKTRACE="0")
    if TARGETS[name].wants_sanitizer:
        environment |= _sanitizer()
    ends = time.monotonic() + seconds
    while _progress(shared)[0] < count and time.monotonic() < ends:
        _one_child(name, count, min(ends - time.monotonic(), 1e6), environment, shared)
    index, accepted, refused, spent = _progress(shared)
    log = folder / "finds.log"
    finds = len(log.read_text().splitlines()) if log.exists() else 0
    sanitized = ", under AddressSanitizer" if "LD_PRELOAD" in environment else ""
    print(
        f"{name}: {index:,} inputs in {spent:,.0f} s of processor time{sanitized}: {accepted:,} accepted, "
        f"{refused:,} refused, {finds} finds" + (f" (see {log})" if finds else ""),
        flush=True,
    )
    return finds


def _one_child(name: str, count: int, seconds: float, environment: dict[str, str], shared: Path) -> None:
    command = [sys.executable, __file__, "--child", name, str(count), str(seconds)]
    with (shared.parent / "child.err").open("w") as errors:
        child = subprocess.Popen(command, env=environment, stderr=errors)
        last, since = -1, time.monotonic() + HUNG_S  # it has to import first
        while child.poll() is None:
            time.sleep(0.2)
            index = _progress(shared)[0]
            if index != last:
                last, since = index, max(since, time.monotonic())
            elif time.monotonic() - since > HUNG_S:
                child.kill()
    if child.wait() != 0:
        index, accepted, refused, spent = _progress(shared)
        ending = (shared.parent / "child.err").read_text()[-3000:]
        _skip(name, index, f"the process ended with {child.returncode}: {ending}")
        shared.write_bytes(struct.pack(_FIELDS, index + 1, accepted, refused, spent))


def _skip(name: str, index: int, what: str) -> None:
    target = _loaded(name)
    _note(BUILD / name / "finds", index, make_input(target, index), what)


def _progress(shared: Path) -> tuple[int, int, int, float]:
    index, accepted, refused, spent = struct.unpack(_FIELDS, shared.read_bytes())
    return index, accepted, refused, spent


def _sanitizer() -> dict[str, str]:
    """The kernels of `make fuzz`, and the runtime that must be there before Python is."""
    kernels = sorted((BUILD.parent / "fuzz-kernels").glob("_kernels*.so"))
    if not kernels:
        print("the sanitized kernels are not built (see the Makefile): the engine runs without", file=sys.stderr)
        return {}
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    return {
        "DOVETAIL_SANITIZED": str(kernels[0]),
        "LD_PRELOAD": found.stdout.strip(),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:abort_on_error=1",
    }


if __name__ == "__main__":
    main()
