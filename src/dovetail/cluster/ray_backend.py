"""Machines that Ray has joined: who is there, and an actor on each that runs its worker. Nothing else imports ray.

Ray gives membership, restarts and a trusted way to hand keys over; what is served where is the controller's. Tokens do
not go through Ray: a worker connects to the gateway as a local one does, over TCP and encrypted.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from dovetail.cluster.liveness import is_hung
from dovetail.errors import ConfigError, DovetailError
from dovetail.machine import major_faults
from dovetail.messages import KEYS_VARIABLE
from dovetail.pulse import Pulse, StillWatch

NAMESPACE = "dovetail"
RESOURCE = "dovetail"  # what a Ray node has that runs a worker of ours
NODE_VARIABLE = "DOVETAIL_NODE"  # how a node describes itself; the actors there inherit it from Ray's own process
JOIN_VARIABLE = "DOVETAIL_JOIN_PID"  # of the command that joined the machine
OBJECT_STORE_BYTES = 80_000_000  # the least that Ray takes: we put nothing there
WATCH_S = 0.25
TERMINATE_GRACE_S = 5.0
INSTALL = "several machines need Ray: pip install 'dovetail[cluster]'"


class Member(NamedTuple):
    id: str  # Ray's
    address: str


class WorkerEnd(NamedTuple):
    """How a worker came to its end."""

    code: int  # negative = the signal
    suspects: tuple[str, ...] = ()  # requests of the iteration that it died in
    hung_s: float = 0.0


class HostLost(DovetailError):
    """The actor of a node, or its machine, is gone."""


def import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a worker sees the GPUs of its machine
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15: whoever else computes there goes before the answers
    try:
        import ray
    except ImportError as error:
        raise ConfigError(INSTALL) from error
    return ray


def ray_command() -> list[str]:
    """Ray's own command line, of this environment."""
    import_ray()
    return [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]


def start_head(address: str, port: int, output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Ray's head on this machine, for as long as the process lives. It offers no place for a worker itself."""
    options = ["--head", f"--node-ip-address={address}", f"--port={port}", "--include-dashboard=false"]
    return _start_ray(options, {}, output)


def is_reachable(address: str) -> bool:
    """Somebody listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except (OSError, ValueError):
        return False
    return True


def start_member(
    head: str,
    node: dict[str, Any],
    address: str | None = None,
    output: IO[bytes] | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """This machine as one of the cluster, under this address; `node` is what the gateway shall know of it,
    `environment` what the worker here has besides."""
    options = [f"--address={head}", f"--resources={json.dumps({RESOURCE: 1})}"]
    if address is not None:
        options.append(f"--node-ip-address={address}")
    ours = {NODE_VARIABLE: json.dumps(node), JOIN_VARIABLE: str(os.getpid())}
    return _start_ray(options, {**(environment or {}), **ours}, output)


def _start_ray(
    options: Sequence[str], environment: dict[str, str], output: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """Blocking, so that its end is the end of what it started; in a session of its own, so that it can be ended."""
    shared = ["--num-cpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats", "--block"]
    return subprocess.Popen(
        [*ray_command(), "start", *options, *shared],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=output or subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def stop_ray(process: subprocess.Popen[bytes]) -> None:
    """What `_start_ray` started, with everything in its session."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(TERMINATE_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class RayNodes:
    """The cluster as the gateway sees it."""

    def __init__(self, address: str, own_address: str) -> None:
        self._ray = import_ray()
        try:
            self._ray.init(
                address=address,
                namespace=NAMESPACE,
                _node_ip_address=own_address,
                log_to_driver=False,
                logging_level="ERROR",
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise DovetailError(f"no Ray cluster at {address}: {error}") from error

    def close(self) -> None:
        self._ray.shutdown()

    def members(self) -> list[Member]:
        """Machines that are there and shall run a worker."""
        try:
            nodes = self._ray.nodes()
        except (self._ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
            raise HostLost(f"Ray does not answer ({type(error).__name__})") from error
        found = [one for one in nodes if one["Alive"] and one["Resources"].get(RESOURCE)]
        return [Member(one["NodeID"], one["NodeManagerAddress"]) for one in found]

    def host(self, member: Member) -> RayHost:
        """Its actor; one that is there from before the gateway was started is taken over."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {
            "name": f"host-{member.id}",
            "get_if_exists": True,
            "lifetime": "detached",
            "resources": {RESOURCE: 1},
            "num_cpus": 0,
            "max_concurrency": 64,  # each gateway that was killed leaves a call behind, until the worker ends
            "max_restarts": -1,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(member.id, soft=False),
        }
        try:
            return RayHost(self._ray, self._ray.remote(WorkerHost).options(**options).remote())
        except (self._ray.exceptions.RayError, ValueError, RuntimeError) as error:
            raise HostLost(f"Ray gives it no actor ({type(error).__name__})") from error


class RayHost:
    """The actor of one node, asked from the gateway's event loop."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    async def describe(self) -> dict[str, Any]:
        """What the machine said of itself when it joined."""
        described: dict[str, Any] = await self._ask(self._actor.describe.remote())
        return described

    async def run(self, arguments: Sequence[str], keys: str, hang_timeout_s: float) -> WorkerEnd:
        """A worker from its start to its end."""
        end: WorkerEnd = await self._ask(self._actor.run.remote(list(arguments), keys, hang_timeout_s))
        return end

    async def stop(self, *, leaves: bool = False) -> None:
        """End the worker, and the actor with it; `leaves`: and what joined its machine."""
        with suppress(HostLost):
            await self._ask(self._actor.stop.remote(leaves))
        with suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actor)

    async def _ask(self, answer: Any) -> Any:
        try:
            return await asyncio.wrap_future(answer.future())
        except self._ray.exceptions.RayError as error:
            raise HostLost(f"its machine does not answer ({type(error).__name__})") from error


class WorkerHost:
    """An actor: runs the worker of its machine and tells how it ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._order: tuple[list[str], str] | None = None  # arguments and keys of the worker that runs
        self._end: Future[WorkerEnd] = Future()  # its
        self._lock = threading.Lock()  # one worker at a time

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = json.loads(os.environ[NODE_VARIABLE])
        return described

    def run(self, arguments: list[str], keys: str, hang_timeout_s: float) -> WorkerEnd:
        """Asked again by a gateway that was started anew, the worker that is there stays if the new one wants the same
        of it; else it ends first."""
        process = self._process
        if process is not None and process.poll() is None and self._order == (arguments, keys):
            return self._end.result()
        self._end_process()
        with self._lock:
            self._order, self._end = (arguments, keys), Future()
            end = self._run(arguments, keys, hang_timeout_s)
            self._end.set_result(end)
            return end

    def _run(self, arguments: list[str], keys: str, hang_timeout_s: float) -> WorkerEnd:
        with tempfile.TemporaryDirectory(prefix="dovetail-") as folder:
            file = Path(folder) / "pulse"
            pulse = Pulse.create(file)
            command = [sys.executable, "-m", "dovetail.worker", *arguments]
            command += ["--parent", str(os.getpid()), "--pulse", str(file)]
            environment = {**os.environ, KEYS_VARIABLE: keys}
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
            )
            hung_s = self._watch(self._process, pulse, hang_timeout_s)
            suspects = tuple(pulse.in_iteration())
            pulse.close()
            return WorkerEnd(self._process.returncode, suspects, hung_s)

    def _watch(self, process: subprocess.Popen[bytes], pulse: Pulse, timeout_s: float) -> float:
        """Until it ends; one that hangs is killed here, where its heartbeat can be seen. Returns for how long it did
        nothing then."""
        watch = StillWatch(time.monotonic())
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(WATCH_S)
                return 0.0
            stood_s = watch.look(pulse, major_faults(process.pid), time.monotonic())
            if is_hung(stood_s, pulse.expected_s, timeout_s):
                process.kill()
                process.wait()
                return stood_s

    def stop(self, leaves: bool) -> None:
        self._end_process()
        if leaves:
            os.kill(int(os.environ[JOIN_VARIABLE]), signal.SIGTERM)

    def _end_process(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()  # whatever it had to finish was asked of it before
        with self._lock:  # and was reported
            pass
