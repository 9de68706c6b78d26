"""One worker process: started, watched, killed when the controller says so, started again with growing pauses.

Knows the worker's command line and its pulse, and nothing of what is said to it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.config import NodeConfig
from dovetail.errors import EngineFailed, Unusable
from dovetail.gateway.workers.adopted import AdoptedProcess, WorkerRecords
from dovetail.machine import major_faults
from dovetail.messages import Hello
from dovetail.pulse import LOOK_S, UNUSABLE_CODE, Pulse, StillWatch, reason_file

logger = logging.getLogger("dovetail.gateway")

HELLO_TIMEOUT_S = 120.0  # importing torch from a cold network disk is slow, but not this slow
STABLE_S = 30.0  # a worker that lived this long starts again without a pause
MAX_PAUSE_S = 30.0
SHUTDOWN_GRACE_S = 5.0
TERMINATE_GRACE_S = 2.0
LEFT_CODE, LOST_CODE = 124, 125  # of a worker whose machine was asked to leave, or is gone
QUICK_RESTARTS = 3  # of a worker that computes and dies: its requests are to blame and are few, each of them counted
_STDERR = 2  # what a worker prints must not get into the output of a command


def worker_command(*options: str) -> list[str]:
    return [sys.executable, "-m", "dovetail.worker", *options]


def worker_arguments(config: NodeConfig, address: str, parent: int | None) -> list[str]:
    values = {
        "node": config.name,
        "connect": address,
        "device": config.device,
        "threads": config.threads,
        "max-batch": config.max_batch,
        "max-turn-tokens": config.max_turn_tokens,
        "max-adapters": config.max_adapters,
        "block-size": config.block_size,
        "kv-bytes": config.kv_cache,
        "memory-bytes": config.memory,
        "max-stall": config.max_stall,
        "event-log": config.event_log or "",
    }
    if parent is not None:
        values["parent"] = parent  # the worker ends itself when the gateway is gone
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


@dataclass(frozen=True)
class WorkerExit:
    """How a worker came to its end."""

    code: int  # negative = the signal
    suspects: frozenset[str] = frozenset()  # requests of the iteration that it died in; empty = it died between two
    hung_s: float = 0.0  # it did nothing for this long and was killed; 0 = it ended by itself

    @property
    def reason(self) -> str:
        if self.hung_s:
            return f"did nothing for {self.hung_s:.0f} s and was killed"
        if self.code in (LEFT_CODE, LOST_CODE):
            return "has left" if self.code == LEFT_CODE else "is gone with its machine"
        return f"was killed by signal {-self.code}" if self.code < 0 else f"ended with code {self.code}"


def pause_after(failures: int, *, is_on_requests: bool) -> float:
    """Before the next start, after so many ends in a row. The first failure is answered at once, so that one bad
    request costs the others no more than a restart."""
    quick = QUICK_RESTARTS if is_on_requests else 1
    return 0.0 if failures <= quick else min(2.0 ** (failures - quick - 1), MAX_PAUSE_S)


def until_restart_s(resume_at: float | None) -> float | None:
    """From now, by the loop's clock; None if nothing is paused."""
    if resume_at is None:
        return None
    return max(resume_at - asyncio.get_running_loop().time(), 0.0) + 1.0


class Supervisor:
    """Keeps one worker running until `stop`."""

    def __init__(
        self,
        config: NodeConfig,
        address: str,
        command: Sequence[str] | None,
        on_exit: Callable[[str, WorkerExit], None],
        directory: Path,
        pass_fds: Sequence[int] = (),
        records: WorkerRecords | None = None,
        outlive_s: float = 0.0,
        on_still: Callable[[str, float, float, float], None] = lambda name, stood_s, expected_s, limit_s: None,
    ) -> None:
        self._name = config.name
        self._on_still = on_still  # its heartbeat stands still
        self._pulse_file = directory / f"pulse-{config.name.encode().hex()}"
        parent = os.getpid() if records is None else None  # else it may outlive this process
        self._argv = [*(command or worker_command()), *worker_arguments(config, address, parent)]
        self._argv += ["--pulse", str(self._pulse_file)]
        if records is not None:
            self._argv += ["--outlive", str(outlive_s)]
        self._records = records
        self._hang_timeout_s = config.hang_timeout
        self._on_exit = on_exit
        self._pass_fds = tuple(pass_fds)
        self._process: asyncio.subprocess.Process | AdoptedProcess | None = None
        self._adopted: Pulse | None = None  # of a process that is there from before, until it is watched
        self._task: asyncio.Task[None] | None = None
        self._hello = asyncio.Event()
        self._is_spawning = False
        self._resume_at: float | None = None
        # The first worker's Hello, or how it ended instead: a server whose workers never came up does not start.
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.starts = 0
        self.unusable: str | None = None  # why it is not started again
        self._hung_s = 0.0  # it did nothing for so long and was killed
        self.failures = 0  # ends in a row before a worker was stable

    @property
    def pid(self) -> int | None:
        """None between two workers."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def retry_after_s(self) -> float | None:
        """Seconds until the next start while pausing after failures; None when a worker is up or on its way."""
        return until_restart_s(self._resume_at)

    def start(self) -> None:
        # In the tick in which the socket is bound: a Hello that is read before its process is known would be lost.
        self._adopted = self._adopt()
        self._task = asyncio.create_task(self._run(), name=f"supervisor-{self._name}")

    def expects(self, hello: Hello) -> bool:
        """Else it is a late word of a process that is gone. One that is being started may be heard of before its number
        is known, on a machine that stands still for a moment: it would be taken for silent and ended."""
        if self._is_spawning:
            return self._process is None or hello.pid != self._process.pid
        return hello.pid == self.pid

    def on_hello(self) -> None:
        self._hello.set()
        if not self.greeted.done():
            self.greeted.set_result(None)

    async def stop(self) -> None:
        """The Shutdown message has been sent; what does not follow it is terminated, then killed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._records is not None:
            self._records.ended(self._name)
        process = self._process
        if process is None or process.returncode is not None:
            return
        if not self._hello.is_set():  # nobody there yet to read the message, and nothing to lose
            process.kill()
        for grace_s, action in ((SHUTDOWN_GRACE_S, process.terminate), (TERMINATE_GRACE_S, process.kill)):
            try:
                await asyncio.wait_for(process.wait(), grace_s)
                return
            except TimeoutError:
                action()
        await process.wait()

    def kill(self, stood_s: float) -> None:
        """It has done nothing for so long."""
        if self._process is not None and self._process.returncode is None:
            self._hung_s = stood_s
            self._process.kill()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            end = await self._run_once()
            if end.code == UNUSABLE_CODE:
                self._give_up()
            self._on_exit(self._name, end)
            if self.unusable is not None:
                return
            if not self.greeted.done():
                self.greeted.set_exception(EngineFailed(f"the worker '{self._name}' {end.reason} before it was ready"))
            self.failures = 0 if loop.time() - started > STABLE_S else self.failures + 1
            pause_s = pause_after(self.failures, is_on_requests=bool(end.suspects))
            if pause_s:
                self._resume_at = loop.time() + pause_s
                await asyncio.sleep(pause_s)
                self._resume_at = None

    def _give_up(self) -> None:
        """No retry mends what is wrong."""
        try:
            reason = reason_file(self._pulse_file).read_text()
        except OSError:
            reason = "its worker cannot be used; the log says why"
        self.unusable = " ".join(reason.split())
        if self.greeted.done():
            logger.error("node %s: %s; it is not started again", self._name, self.unusable)
        else:
            self.greeted.set_exception(Unusable(f"node {self._name}: {self.unusable}"))

    async def _run_once(self) -> WorkerExit:
        self.starts += 1
        self._hung_s = 0.0
        watch: asyncio.Task[None] | None = None
        try:
            pulse, self._adopted = self._adopted or await self._spawn(), None
        except OSError as error:
            logger.error("worker %s cannot be started: %s", self._name, error)
            return WorkerExit(127)
        assert self._process is not None
        exit_wait = asyncio.create_task(self._process.wait())
        hello_wait = asyncio.create_task(self._hello.wait())
        await asyncio.wait({exit_wait, hello_wait}, timeout=HELLO_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not hello_wait.done():
            hello_wait.cancel()
            if not exit_wait.done():
                logger.error("worker %s said nothing for %.0f s and is ended", self._name, HELLO_TIMEOUT_S)
                self._process.kill()
        elif self._hang_timeout_s:
            watch = asyncio.create_task(self._watch(self._process, pulse))
        code = await exit_wait
        if watch is not None:
            watch.cancel()
        suspects = pulse.in_iteration()
        pulse.close()
        self._hello.clear()
        if self._records is not None:
            self._records.ended(self._name)
        return WorkerExit(code, suspects, self._hung_s)

    def _adopt(self) -> Pulse | None:
        """A worker that has outlived another gateway is taken over, with what it has loaded."""
        self._process = self._records.adopt(self._name, self._argv) if self._records is not None else None
        if self._process is None:
            return None
        logger.info("worker %s (pid %d) is there from before", self._name, self._process.pid)
        return Pulse(self._pulse_file)

    async def _spawn(self) -> Pulse:
        pulse = Pulse.create(self._pulse_file)
        # In this session: Linux divides a core among sessions before it looks at priorities (sched_autogroup), and a
        # worker in one of its own had half of what each helper had. It takes a process group of its own when it starts.
        self._is_spawning = True
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=_STDERR,
                pass_fds=self._pass_fds,
            )
        finally:
            self._is_spawning = False
        if self._records is not None:
            self._records.started(self._name, self._process.pid, self._argv)
        return pulse

    async def _watch(self, process: asyncio.subprocess.Process | AdoptedProcess, pulse: Pulse) -> None:
        """Until it is killed."""
        loop = asyncio.get_running_loop()
        watch = StillWatch(loop.time())
        while not self._hung_s:
            await asyncio.sleep(LOOK_S)
            stood_s = watch.look(pulse, major_faults(process.pid), loop.time())
            if stood_s:
                self._on_still(self._name, stood_s, pulse.expected_s, self._hang_timeout_s)
