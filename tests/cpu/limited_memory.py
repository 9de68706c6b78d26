"""Many models in bursts under a control group's limit of memory: nothing is killed, and how much came in time.

Run by `make limited`: python tests/cpu/limited_memory.py [MODELS] [GIB] [MINUTES]. Needs the right to make a group.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dovetail.machine import default_root

ROOT = Path("/sys/fs/cgroup")
DOVETAIL = [sys.executable, "-m", "dovetail", "bench", "many", "--contenders", "dovetail", "--json"]


class Group:
    """One control group, of either version."""

    def __init__(self, limit_bytes: int) -> None:
        self.is_second = (ROOT / "cgroup.controllers").exists()
        self.folder = (ROOT if self.is_second else ROOT / "memory") / f"dovetail-limited-{os.getpid()}"
        self.folder.mkdir()
        (self.folder / ("memory.max" if self.is_second else "memory.limit_in_bytes")).write_text(str(limit_bytes))

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak_bytes(self) -> int:
        return int((self.folder / ("memory.peak" if self.is_second else "memory.max_usage_in_bytes")).read_text())

    def kills(self) -> int:
        lines = (self.folder / ("memory.events" if self.is_second else "memory.oom_control")).read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


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


def main(models: int = 32, gib: float = 4.0, minutes: float = 3.0) -> int:
    options = ["--models", str(models), "--cv", "8", "--share", "1"]  # none need go for want of a budget
    first = [*DOVETAIL, *options, "--minutes", "0.02"]  # leaves the models behind
    subprocess.run(first, check=True, stdout=subprocess.DEVNULL)
    for path in (default_root() / "bench" / "many").rglob("*"):
        if path.is_file():
            forget(path)
    try:
        with limited(int(gib * 2**30)) as group:
            command = [*DOVETAIL, *options, "--minutes", str(minutes)]
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, preexec_fn=group.enter)
            kills, peak = group.kills(), group.peak_bytes()
    except PermissionError as error:
        print(f"not run: {error}")
        return 0
    print(f"{models} models in {gib:g} GiB: {kills} processes killed, peak {peak / 2**30:.2f} GiB with the page cache")
    if run.returncode == 0:
        (ours,) = json.loads(run.stdout)["outcomes"]
        print(json.dumps(ours["figures"], indent=1))
    return 1 if kills or run.returncode else 0


if __name__ == "__main__":
    sys.exit(main(*[kind(text) for kind, text in zip((int, float, float), sys.argv[1:], strict=False)]))
