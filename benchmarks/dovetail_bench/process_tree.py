"""Memory and CPU time of a server and all of its processes, looked at every so often from a thread."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import psutil


class Sample(msgspec.Struct, frozen=True):
    at_s: float  # since the sampler began
    pss_bytes: int  # resident, shared pages divided among those who map them
    rss_bytes: int
    cpu_s: float  # used since the sampler began, by processes that have ended too
    processes: int


class TreeSampler:
    """Between entering and leaving. A sample walks the page tables of the processes, so do not take many a second."""

    def __init__(self, pid: int, interval_s: float = 2.0) -> None:
        self.samples: list[Sample] = []
        self._process = psutil.Process(pid)
        self._interval_s = interval_s
        self._cpu_s: dict[int, float] = {}  # by process, those that ended included
        self._before_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="sampler")

    def __enter__(self) -> TreeSampler:
        self._began = time.monotonic()
        self._before_s = self._read_cpu()
        self.take()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.take()

    def take(self) -> Sample:
        processes = self._tree()
        used_s = self._read_cpu() - self._before_s
        pss, rss = (sum(sizes) for sizes in zip(*(memory_of(one.pid) for one in processes), (0, 0), strict=True))
        sample = Sample(time.monotonic() - self._began, pss, rss, used_s, len(processes))
        self.samples.append(sample)
        return sample

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.take()

    def _tree(self) -> list[psutil.Process]:
        try:
            return [self._process, *self._process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _read_cpu(self) -> float:
        for process in self._tree():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            self._cpu_s[process.pid] = times.user + times.system
        return sum(self._cpu_s.values())


def held_bytes(pid: int | str) -> dict[str, int]:
    """What the kernel counts of a process's memory, by its own names: Rss, Pss, Anonymous, Private_Dirty, …"""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}


def memory_of(pid: int) -> tuple[int, int]:
    """PSS and RSS in bytes; nothing for a process that has gone."""
    try:
        sizes = held_bytes(pid)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0, 0
    return sizes.get("Pss", 0), sizes.get("Rss", 0)


class Use(msgspec.Struct, frozen=True):
    """Of a stretch of time: what was held at its end, what was used during it."""

    pss_bytes: int
    rss_bytes: int
    cpu_share: float  # of one core


def watch(pid: int, seconds: float) -> Use:
    with TreeSampler(pid, interval_s=max(seconds, 0.1)) as sampler:
        time.sleep(seconds)
        last = sampler.take()
    return Use(last.pss_bytes, last.rss_bytes, last.cpu_s / max(last.at_s, 1e-9))
