"""Function processes seen from the dispatcher: start one under a CPU limit, call it, notice its death, end it."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from contextlib import suppress

from dovetail.errors import EngineFailed
from dovetail.plan.frames import Answer, Call, FunctionDied, Spec, read, write
from dovetail.plan.limits import CpuLimit

_STOP_S = 5.0
# A start has a whole vCPU at least: at half of one it takes twice as long, and a request may wait for it.
START_VCPUS = 1.0


class FunctionProcess:
    """Owns a process, its socket and its CPU limit, until close()."""

    def __init__(self, process: asyncio.subprocess.Process, limit: CpuLimit, reader: asyncio.StreamReader,
                 writer: asyncio.StreamWriter) -> None:  # fmt: skip
        self._process = process
        self._limit = limit
        self._reader = reader
        self._writer = writer
        self.start_s = 0.0
        self.memory_bytes = 0
        self.hardware = ""
        self._turn = asyncio.Lock()  # one call at a time

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def limit(self) -> CpuLimit:
        return self._limit

    @classmethod
    async def start(cls, spec: Spec, vcpus: float) -> FunctionProcess:
        """Ready to be called when it returns."""
        started = time.perf_counter()
        limit = CpuLimit(max(vcpus, START_VCPUS))
        ours, theirs = socket.socketpair()
        command = (sys.executable, "-m", "dovetail.plan.function", str(theirs.fileno()))
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(*command, pass_fds=[theirs.fileno()])
        except OSError:
            ours.close()
            limit.close()
            raise
        limit.add(process.pid)
        reader, writer = await asyncio.open_connection(sock=ours)
        function = cls(process, limit, reader, writer)
        try:
            await write(writer, spec)
            ready, _ = await function._answer()
        except (FunctionDied, ConnectionError, asyncio.CancelledError):
            await function.close()
            raise
        if ready.error:
            await function.close()
            raise EngineFailed(ready.error)
        limit.resize(vcpus)
        function.start_s = time.perf_counter() - started
        function.memory_bytes, function.hardware = ready.memory_bytes, ready.hardware
        return function

    async def call(self, call: Call, payload: bytes | memoryview = b"") -> tuple[Answer, bytes]:
        async with self._turn:
            try:
                await write(self._writer, call, payload)
            except (ConnectionError, BrokenPipeError) as error:
                raise FunctionDied(f"process {self.pid} is gone") from error
            answer, output = await self._answer()
        self.memory_bytes = max(self.memory_bytes, answer.memory_bytes)
        return answer, output

    async def _answer(self) -> tuple[Answer, bytes]:
        try:
            return await read(self._reader)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise FunctionDied(f"process {self.pid} is gone") from error

    async def ended(self) -> None:
        await self._process.wait()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """It ends when its socket does; if not, it is killed."""
        self._writer.close()
        with suppress(ConnectionError, BrokenPipeError):
            await self._writer.wait_closed()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        self._limit.close()
