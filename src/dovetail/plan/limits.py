"""CPU limits of a function process: a control group with a quota where this process may make one, else its own cores.

A quota gives any share of the machine; cores only whole ones, so 1.5 vCPUs without control groups are 2 cores. A group
also goes before what has none: vCPUs that are billed are there when the machine is busy.
"""

from __future__ import annotations

import itertools
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

SHARES_PER_VCPU = 65_536  # a process without a group has 1,024, or 100 where the weights are of the second version
WEIGHT_PER_VCPU = 5_000
# Short, so that a run is not stopped for long; not shorter, because the kernel hands out a quota in slices of 5 ms,
# core by core, and threads that wait for each other must be stopped together: with 20 ms, 1.5 vCPUs took 25 % longer.
PERIOD_US = 50_000
_ROOT = Path("/sys/fs/cgroup")
_numbers = itertools.count()


def threads_of(vcpus: float) -> int:
    """As many as can run at once."""
    return min(math.ceil(vcpus), len(os.sched_getaffinity(0)))


class CpuLimit:
    """Owns its control group until close()."""

    def __init__(self, vcpus: float, root: Path = _ROOT) -> None:
        assert vcpus > 0
        self.vcpus = vcpus
        self._group = _make_group(vcpus, root)

    @property
    def kind(self) -> Literal["cgroup", "affinity"]:
        return "cgroup" if self._group is not None else "affinity"

    def add(self, pid: int) -> None:
        if self._group is not None:
            try:
                (self._group / "cgroup.procs").write_text(str(pid))
                return
            except PermissionError:  # a group may be made, and processes not be moved: a container's part of a tree
                self.close()
        cores = sorted(os.sched_getaffinity(0))[: threads_of(self.vcpus)]
        os.sched_setaffinity(pid, cores)

    def resize(self, vcpus: float) -> None:
        """Of a quota; processes that are limited by cores keep them."""
        self.vcpus = vcpus
        if self._group is not None:
            _write_quota(self._group, vcpus)

    def close(self) -> None:
        """After the processes have ended."""
        if self._group is not None:
            with suppress(OSError):
                self._group.rmdir()
            self._group = None


def _make_group(vcpus: float, root: Path) -> Path | None:
    """None where there is no controller, or no right to use it."""
    for controller in (root / "cpu", root):  # of the first version, of the second
        if not (controller / "cgroup.procs").exists():
            continue
        _remove_left(controller)
        group = controller / f"dovetail-{os.getpid()}-{next(_numbers)}"
        try:
            group.mkdir()
            _write_quota(group, vcpus)
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        return group
    return None


def _remove_left(controller: Path) -> None:
    """Groups of processes that were killed before they could remove theirs."""
    for group in controller.glob("dovetail-*-*"):
        if not Path(f"/proc/{group.name.split('-')[1]}").exists():
            with suppress(OSError):
                group.rmdir()


def _write_quota(group: Path, vcpus: float) -> None:
    quota_us = int(vcpus * PERIOD_US)
    if (group / "cpu.cfs_quota_us").exists():
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        (group / "cpu.shares").write_text(str(min(int(SHARES_PER_VCPU * vcpus), 262_144)))
    else:
        (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        (group / "cpu.weight").write_text(str(min(int(WEIGHT_PER_VCPU * vcpus), 10_000)))
