"""Fuzzes the readers and the engine: `python tests/fuzz/fuzz.py [TARGET …] [--inputs N] [--jobs J] [--seconds S]`.

Input i of a target follows from the number i alone, so that a find is told by it, and a run goes on where the last one
ended (`journal`). Inputs run in children, thousands in each: what ends a child, or takes longer than a second of
processor time, is a find too. With `--replay TARGET FILE` one input is run here.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from journal import Journal, Share, note_find  # noqa: E402

BUILD = HERE.parent.parent / "build"
SLOW_S = 1.0  # of processor time
HUNG_S = 30.0  # of any time
MEMORY_BYTES = 6 << 30


def main() -> None:
    from targets import TARGETS

    options = _parser(list(TARGETS)).parse_args()
    work = Path(options.work) if options.work else Path(tempfile.mkdtemp(prefix="dovetail-fuzz-", dir=_memory()))
    try:
        if options.prepare:
            TARGETS[options.prepare](_folder(work, options.prepare)).prepare()
        elif options.child:
            _child(options.child[0], Share(Path(options.child[1])), float(options.child[2]), work)
        elif options.make:
            name, index, file = options.make
            Path(file).write_bytes(make_input(_loaded(name, work), int(index)))
        elif options.replay:
            target = _loaded(options.replay[0], work)
            print("accepted" if target.run(Path(options.replay[1]).read_bytes()) else "refused")
        else:
            sys.exit(_fuzz(options, work))
    finally:
        if not options.work:
            shutil.rmtree(work, ignore_errors=True)


def _parser(targets: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=[], choices=[*targets, []])
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of each target, with those of earlier runs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all targets together")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--json", metavar="FILE", help="the summary, for a program")
    parser.add_argument("--build", default=str(BUILD / "fuzz"), help="where journal and finds are kept")
    parser.add_argument("--work", help="where seeds are prepared, or have been (default: in memory, and removed)")
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "FILE"))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--prepare", help=argparse.SUPPRESS)
    return parser


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _folder(work: Path, name: str) -> Path:
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _loaded(name: str, work: Path) -> Any:
    from targets import TARGETS

    _prepare(name, work)
    if TARGETS[name].wants_sanitizer and os.environ.get("DOVETAIL_SANITIZED"):
        _use_kernels(Path(os.environ["DOVETAIL_SANITIZED"]))
    target = TARGETS[name](_folder(work, name))
    target.load()
    return target


def _prepare(name: str, work: Path) -> None:
    if not (work / name / "seeds").is_dir():
        command = [sys.executable, __file__, "--work", str(work), "--prepare", name]
        subprocess.run(command, check=True, env=_without_sanitizer())


def _use_kernels(path: Path) -> None:
    spec = importlib.util.spec_from_file_location("dovetail.native._kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


def make_input(target: Any, index: int) -> bytes:
    data: bytes = target.make(random.Random(f"{target.name}-{index}"))
    return data


# The child


def _child(name: str, share: Share, seconds: float, work: Path) -> None:
    """Goes on with the share until it is done or the time is up."""
    target, parent = _loaded(name, work), os.getppid()
    if "LD_PRELOAD" not in os.environ:  # a sanitizer's own tables are larger than any limit
        limit = _mapped_bytes() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    share.path.with_suffix(".ready").touch()
    gc.freeze()  # what was imported is there to stay
    ends, began = time.monotonic() + seconds, time.process_time()
    position, accepted, refused, spent = share.counts
    for index in share.rest():
        started = time.process_time()
        share.counts = position, accepted, refused, spent + started - began
        if time.monotonic() >= ends or os.getppid() != parent:
            return
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
            note_find(share.target_folder, index, data, f"{type(error).__module__}.{type(error).__name__}: {error}")
        if time.process_time() - started > SLOW_S:
            note_find(share.target_folder, index, data, f"slow: {time.process_time() - started:.1f} s")
        position += 1
    share.counts = position, accepted, refused, spent + time.process_time() - began


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


# The parent


class Pool:
    """Threads that each wait for one child, and take the next share when it is done."""

    def __init__(self, work: Path, ends: float) -> None:
        self.failure = ""  # of children before their first input
        self._work = work
        self._ends = ends
        self._lock = threading.Lock()

    def run(self, shares: list[tuple[str, Share]], jobs: int) -> None:
        waiting = iter(shares)
        threads = [threading.Thread(target=self._take, args=(waiting,), daemon=True) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _take(self, waiting: Iterator[tuple[str, Share]]) -> None:
        while self._goes_on():
            with self._lock:
                found = next(waiting, None)
            if found is None:
                return
            name, share = found
            while share.position < len(share) and self._goes_on():
                self._one_child(name, share)

    def _goes_on(self) -> bool:
        return time.monotonic() < self._ends and not self.failure

    def _one_child(self, name: str, share: Share) -> None:
        seconds = min(self._ends - time.monotonic(), 1e6)
        command = [sys.executable, __file__, "--work", str(self._work)]
        errors, ready = share.path.with_suffix(".err"), share.path.with_suffix(".ready")
        ready.unlink(missing_ok=True)
        with errors.open("w") as file:
            arguments = ["--child", name, str(share.path), str(seconds)]
            child = subprocess.Popen([*command, *arguments], env=environment_of(name), stderr=file)
            _watch(child, share)
        if child.returncode == 0:
            return
        ending = errors.read_text(errors="replace")[-3000:]
        if not ready.exists():
            self.failure = f"{name}: a child ended with {child.returncode} before its first input: {ending}"
            return
        index, made = next(share.rest()), share.path.with_suffix(".input")
        subprocess.run([*command, "--make", name, str(index), str(made)], check=True, env=_without_sanitizer())
        note_find(share.target_folder, index, made.read_bytes(), f"the process ended with {child.returncode}: {ending}")
        position, accepted, refused, spent = share.counts
        share.counts = position + 1, accepted, refused, spent


def _watch(child: subprocess.Popen[bytes], share: Share) -> None:
    """Until it ended; kills it where nothing moves."""
    last, since = -1, time.monotonic() + HUNG_S  # it has to import first
    while child.poll() is None:
        time.sleep(0.1)
        if share.position != last:
            last, since = share.position, max(since, time.monotonic())
        elif time.monotonic() - since > HUNG_S:
            child.kill()


def _fuzz(options: argparse.Namespace, work: Path) -> int:
    """Returns 1 if there are finds, from earlier runs too."""
    from targets import TARGETS

    names = options.targets or list(TARGETS)
    started = time.monotonic()
    for name in names:
        _prepare(name, work)
    journals = {name: Journal(Path(options.build) / name) for name in names}
    shares = {name: journals[name].begin_run(options.inputs, TARGETS[name].share_size) for name in names}
    in_turns = chain.from_iterable(zip_longest(*([(name, share) for share in shares[name]] for name in names)))
    pool = Pool(work, started + options.seconds)
    pool.run([share for share in in_turns if share is not None], options.jobs)
    for journal in journals.values():
        journal.end_run()
    if pool.failure:
        sys.exit(pool.failure)
    summary = {name: _summary(name, journal) for name, journal in journals.items()}
    for name, row in summary.items():
        print(_line(name, row), flush=True)
    if options.json:
        facts = {"machine": platform.machine(), "jobs": options.jobs, "seconds": round(time.monotonic() - started, 1)}
        Path(options.json).write_text(json.dumps(facts | {"targets": summary}, indent=1))
    return 1 if any(row["finds"] for row in summary.values()) else 0


def _summary(name: str, journal: Journal) -> dict[str, Any]:
    return {
        "inputs": journal.inputs,
        "accepted": journal.accepted,
        "refused": journal.refused,
        "processor_s": round(journal.processor_s, 1),
        "inputs_per_processor_s": round(journal.inputs / journal.processor_s) if journal.processor_s else 0,
        "sanitizer": "address" if "LD_PRELOAD" in environment_of(name) else "",
        "finds": len(journal.finds),
        "first_finds": journal.finds[:20],
    }


def _line(name: str, row: dict[str, Any]) -> str:
    sanitized = ", under AddressSanitizer" if row["sanitizer"] else ""
    return (
        f"{name}: {row['inputs']:,} inputs in {row['processor_s']:,.0f} s of processor time{sanitized} "
        f"({row['inputs_per_processor_s']:,} a second): {row['accepted']:,} accepted, {row['refused']:,} refused, "
        f"{row['finds']} finds"
    )


def environment_of(name: str) -> dict[str, str]:
    """One thread in each child, and the sanitizer's runtime before Python where the target wants it."""
    from targets import TARGETS

    threads = dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    plain = {**os.environ, **threads, "RUST_BACKTRACE": "0", "CUDA_VISIBLE_DEVICES": ""}
    return plain | _sanitizer() if TARGETS[name].wants_sanitizer else plain


def _without_sanitizer() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD", "DOVETAIL_SANITIZED")}


def _library(name: str) -> str:
    found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def _sanitizer() -> dict[str, str]:
    """The kernels of `make fuzz`, or those that DOVETAIL_SANITIZED names. Python keeps its own allocator for small
    objects (a third of the time); what kernels get is from torch and numpy, and checked."""
    built = sorted((BUILD / "fuzz-kernels").glob("_kernels*.so"))
    kernels = os.environ.get("DOVETAIL_SANITIZED") or (str(built[0]) if built else "")
    if not kernels:
        return {}  # and the summary says so
    return {
        "DOVETAIL_SANITIZED": kernels,
        "LD_PRELOAD": " ".join(map(_library, ("libasan.so", "libstdc++.so"))),  # it looks for exceptions when it starts
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:abort_on_error=1:hard_rss_limit_mb=6144"
        ":protect_shadow_gap=0",  # which CUDA's libraries map
    }


if __name__ == "__main__":
    main()
