"""A worker that another gateway has started, before it was killed: found again, watched and ended by its id."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil

from dovetail.cluster.durable import Durable

KIND = "worker"  # of facts: by node
UNKNOWN_CODE = 126  # how somebody else's child has ended is not known
_OWN = ("--pool", "--parent")  # options that say nothing of what the worker does


class AdoptedProcess:
    """As much of `asyncio.subprocess.Process` as a supervisor needs."""

    def __init__(self, pid: int, file: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._file = file  # of the process: its number may be somebody else's one day, this is not
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(file, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._file)
        os.close(self._file)
        self.returncode = UNKNOWN_CODE
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        return UNKNOWN_CODE

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._file, number)


class WorkerRecords:
    """Which process is which node's worker, kept on disk."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._kind = KIND + durable.machine  # processes of another machine say nothing here

    def started(self, node: str, pid: int, arguments: Sequence[str]) -> None:
        with suppress(psutil.NoSuchProcess):
            fact = {"pid": pid, "started": psutil.Process(pid).create_time(), "arguments": list(arguments)}
            self._durable.put(self._kind, node, fact)

    def ended(self, node: str) -> None:
        self._durable.drop(self._kind, node)

    def adopt(self, node: str, arguments: Sequence[str]) -> AdoptedProcess | None:
        """The worker of this node if it lives and does what is asked of it; one that does something else is ended."""
        fact = self._durable.get(self._kind, node)
        file = _open(fact) if fact is not None else None
        if fact is None or file is None:
            return None
        if _essence(fact["arguments"]) == _essence(arguments):
            return AdoptedProcess(fact["pid"], file)
        _end(file)
        return None

    def end_others(self, nodes: Sequence[str]) -> None:
        """Workers of nodes that are no more."""
        for node, fact in self._durable.all(self._kind).items():
            if node not in nodes:
                file = _open(fact)
                if file is not None:
                    _end(file)
                self._durable.drop(self._kind, node)

    def host_pool(self) -> int | None:
        """The memory in which workers that live keep models, as a file of ours; None: nobody has any."""
        for fact in self._durable.all(self._kind).values():
            file = _open(fact)
            if file is None:
                continue
            os.close(file)
            with suppress(OSError, ValueError, IndexError):
                number = int(fact["arguments"][fact["arguments"].index("--pool") + 1])
                return os.open(f"/proc/{fact['pid']}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        return None


def _open(fact: dict[str, Any]) -> int | None:
    """The process, if it is still the same one."""
    try:
        file = os.pidfd_open(fact["pid"])
    except OSError:
        return None
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(fact["pid"])
        if process.create_time() == fact["started"] and process.status() != psutil.STATUS_ZOMBIE:
            return file
    os.close(file)
    return None


def _end(file: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(file, signal.SIGKILL)
    os.close(file)


def _essence(arguments: Sequence[str]) -> list[str]:
    left, kept = iter(arguments), []
    for one in left:
        if one in _OWN:
            next(left, None)
        else:
            kept.append(one)
    return kept
