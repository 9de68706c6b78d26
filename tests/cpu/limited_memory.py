"""Many models in bursts under a control group's limit of memory that they do not fit into: models make way and are read
again, nothing is killed, and how much came in time.

Run by `make limited`: python tests/cpu/limited_memory.py [MODELS] [GIB] [MINUTES]. Needs the right to make a group, and
disk for the models twice. Fails if anything was killed, or if memory was never nearly full.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dovetail.machine import NODE_SHARE, default_root
from dovetail_bench.node_log import read_starts

ROOT = Path("/sys/fs/cgroup")
DOVETAIL = [sys.executable, "-m", "dovetail", "bench", "many", "--contenders", "dovetail", "--json"]
LARGE = 8  # one of so many models has half a billion parameters, a GiB; the others have 98 MB
FILLED = 0.8  # of the limit: below, this run says nothing of a full machine
SAMPLE_S = 0.2


class Group:
    """One control group, of either version."""

    def __init__(self, limit_bytes: int) -> None:
        self.is_second = (ROOT / "cgroup.controllers").exists()
        self.folder = (ROOT if self.is_second else ROOT / "memory") / f"dovetail-limited-{os.getpid()}"
        self.folder.mkdir()
        (self.folder / ("memory.max" if self.is_second else "memory.limit_in_bytes")).write_text(str(limit_bytes))

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def used_bytes(self) -> int:
        return int((self.folder / ("memory.current" if self.is_second else "memory.usage_in_bytes")).read_text())

    def held_bytes(self) -> int:
        """Of that, what only its owners can give back: the page cache goes by itself."""
        lines = (self.folder / "memory.stat").read_text().splitlines()
        stat = {name: int(value) for name, value in (line.split() for line in lines)}
        return stat["anon" if self.is_second else "rss"] + stat["shmem"]

    def kills(self) -> int:
        lines = (self.folder / ("memory.events" if self.is_second else "memory.oom_control")).read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


class Watch(threading.Thread):
    """The most that a group had in use."""

    def __init__(self, group: Group) -> None:
        super().__init__(daemon=True)
        self.used = self.held = 0
        self._group = group
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            self.used = max(self.used, self._group.used_bytes())
            self.held = max(self.held, self._group.held_bytes())

    def end(self) -> None:
        self._is_over.set()
        self.join()


@contextmanager
def limited(limit_bytes: int) -> Iterator[Group]:
    group = Group(limit_bytes)
    try:
        yield group
    finally:
        with suppress(OSError):
            group.folder.rmdir()


def forget(path: Path) -> None:
    """Out of the page cache: whoever reads it next is charged for it."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def measure(group: Group, command: list[str]) -> tuple[subprocess.CompletedProcess[str], Watch, int]:
    """The run, the most that it had in use, and how many of its processes were killed."""
    watch = Watch(group)
    watch.start()
    try:
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=group.enter)
    finally:
        watch.end()
    return run, watch, group.kills()


def main(models: int = 32, gib: float = 4.0, minutes: float = 3.0) -> int:
    large, limit = max(models // LARGE, 1), int(gib * 2**30)
    # Every model is asked for, in bursts and with prompts that need KV, and none goes by itself.
    options = ["--models", str(models - large), "--shapes", str(large), "--no-targets", "--keep-alive", "600"]
    options += ["--cv", "8", "--zipf", "0", "--rate", "1", "--input", "64-256"]
    first = [*DOVETAIL, *options, "--share", "1", "--minutes", "0.02"]  # leaves the models behind
    made = json.loads(subprocess.run(first, check=True, stdout=subprocess.PIPE, text=True).stdout)
    all_bytes = made["outcomes"][0]["memory_budget_bytes"]
    folder = default_root() / "bench" / "many"
    for path in folder.rglob("*"):
        if path.is_file():
            forget(path)
    try:
        with limited(limit) as group:
            options += ["--share", str(min(NODE_SHARE * limit / all_bytes, 1.0)), "--minutes", str(minutes)]
            run, peak, kills = measure(group, [*DOVETAIL, *options])
    except PermissionError as error:
        print(f"not run: {error}")
        return 0
    total = f"{all_bytes / 2**30:.1f} GiB with 1,024 tokens of KV each"
    print(f"{models} models, {large} of them of 0.5B, {total}, in {gib:g} GiB: {kills} processes killed")
    print(f"at most {peak.used / 2**30:.2f} GiB in use, {peak.used / limit:.0%} of the limit; without the page cache")
    print(f"{peak.held / 2**30:.2f} GiB, {peak.held / limit:.0%}")
    if run.returncode:
        return 1
    (ours,) = json.loads(run.stdout)["outcomes"]
    loads = Counter(start.model for start in read_starts(Path(ours["event_log"])))
    again = sum(count - 1 for count in loads.values())
    print(f"{len(loads)} models were loaded, {again} loads were of one that had made way")
    print(json.dumps(ours["figures"], indent=1))
    if peak.used < FILLED * limit or not again:
        print("memory was never nearly full, or nobody had to make way: this says nothing")
        return 1
    return 1 if kills else 0


if __name__ == "__main__":
    sys.exit(main(*[kind(text) for kind, text in zip((int, float, float), sys.argv[1:], strict=False)]))
