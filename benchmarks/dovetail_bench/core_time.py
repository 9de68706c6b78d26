"""What processes have had of the cores, and how long they waited for one: the kernel's own count (`schedstat`), so that
a load generator that shares a small machine with what it measures is told apart from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple


class Had(NamedTuple):
    """Seconds of one thread."""

    ran_s: float = 0.0
    waited_s: float = 0.0  # it could have run and did not


class Look(NamedTuple):
    """By thread, since it began."""

    attackers: Mapping[int, Had]
    workers: Mapping[int, Had]
    passing: Mapping[int, Had]  # the loops that a token passes after the worker


def threads_of(pid: int) -> dict[int, Had]:
    """Nothing of a process that is gone."""
    found: dict[int, Had] = {}
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{name}/schedstat", "rb") as file:
                ran, waited, _ = file.read().split()
                found[int(name)] = Had(int(ran) / 1e9, int(waited) / 1e9)
    return found


def taken_s(before: Look, after: Look) -> float:
    """At most so much of the time between the two was lost to the attackers' own computing: so long they ran, and so
    long others waited for a core, of the workers' threads the slowest, which the iteration waits for."""
    ran_s = sum(one.ran_s for one in _since(before.attackers, after.attackers))
    waited_s = max((one.waited_s for one in _since(before.workers, after.workers)), default=0.0)
    waited_s += sum(one.waited_s for one in _since(before.passing, after.passing))
    return min(ran_s, waited_s)


def _since(before: Mapping[int, Had], after: Mapping[int, Had]) -> list[Had]:
    """Of each thread that is there now."""
    pairs = [(one, before.get(thread, Had())) for thread, one in after.items()]
    return [Had(one.ran_s - old.ran_s, one.waited_s - old.waited_s) for one, old in pairs]


class Cores:
    """Asked again and again, it says what attackers took since it was last asked."""

    def __init__(self, attackers: int, gateway: int, *workers: int) -> None:
        self._attackers, self._gateway, self._workers = attackers, gateway, workers
        self._last = self._look()

    def taken_s(self) -> float:
        last, self._last = self._last, self._look()
        return taken_s(last, self._last)

    def _look(self) -> Look:
        passing = {pid: threads_of(pid).get(pid, Had()) for pid in (self._gateway, os.getpid())}
        workers = [threads_of(pid) for pid in self._workers]
        return Look(threads_of(self._attackers), {id: had for one in workers for id, had in one.items()}, passing)
