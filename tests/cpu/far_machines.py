"""A server whose workers are on "other machines": real worker processes that reach it over TCP, with keys, through a
forwarder that can stop passing bytes. Run by `cluster_live.py` and `test_server_neighbour.py`; commands come in on
standard input, one a line: `join NAME [FOLDER [LIMIT]]`, `cut NAME`, `heal NAME`. FOLDER is where the machine's command
was started and has its store, of LIMIT bytes: what the gateway finds under /proc/self/cwd the machine does not."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.cli.serve import LocalWeights, Plan, listen_for, run_loop, serve_plan
from dovetail.cluster.durable import Durable
from dovetail.cluster.ray_backend import Member, WorkerEnd
from dovetail.config import Config, load_config
from dovetail.gateway.workers.client import WorkerClient
from dovetail.gateway.workers.remote_workers import RemoteWorkers, WeightSources, WireKeys
from dovetail.machine import HOME_VARIABLE
from dovetail.messages import KEYS_VARIABLE, STORE_LIMIT_VARIABLE, weights_token
from dovetail.store.sources.weight_server import WeightServer


class Forwarder:
    """Passes connections on to a port until it is cut: then nothing passes and nobody is told, as without a cable."""

    def __init__(self, target: int) -> None:
        self.passes = threading.Event()
        self.passes.set()
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near = self._listener.accept()[0]
            far = socket.create_connection(("127.0.0.1", self._target))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.passes.wait()
                sink.sendall(data)
        except OSError:
            pass
        for one in (source, sink):
            one.close()


class Machine:
    """A `remote_workers.Host`: a worker process here, which knows the gateway by the forwarder's address only."""

    def __init__(self, name: str, left: Callable[[], None], folder: str = "", limit: str = "") -> None:
        self.name = name
        self._folder = folder
        self._limit = limit
        self.forwarder: Forwarder | None = None
        self._left = left
        self._process: subprocess.Popen[bytes] | None = None

    async def describe(self) -> dict[str, Any]:
        return {"name": self.name, "threads": 1, "memory": "64MiB"}

    async def run(self, arguments: Sequence[str], keys: str, hang_timeout_s: float) -> WorkerEnd:
        arguments = list(arguments)
        at = arguments.index("--connect") + 1
        if self.forwarder is None:
            self.forwarder = Forwarder(int(arguments[at].rpartition(":")[2]))
        arguments[at] = f"tcp://127.0.0.1:{self.forwarder.port}"
        command = [sys.executable, "-m", "dovetail.worker", *arguments, "--parent", str(os.getpid())]
        environment = {**os.environ, KEYS_VARIABLE: keys, STORE_LIMIT_VARIABLE: self._limit}
        if self._folder:
            environment[HOME_VARIABLE] = self._folder
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=2, cwd=self._folder or None
        )
        return WorkerEnd(await asyncio.to_thread(self._process.wait))

    async def stop(self, *, leaves: bool = False) -> None:
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        if leaves:
            self._left()


class FarMachines:
    """A `serve.OtherMachines`."""

    is_front = False

    def __init__(self) -> None:
        self._machines: dict[str, Machine] = {}  # by Ray's id, were there a Ray
        self._count = 0
        self._membership: RemoteWorkers | None = None

    def members(self) -> list[Member]:
        return [Member(id, "127.0.0.1") for id in self._machines]

    def host(self, member: Member) -> Machine:
        return self._machines[member.id]

    def attach(
        self, link: WorkerClient, options: Sequence[str], durable: Durable | None, weights: LocalWeights
    ) -> None:
        keys = WireKeys()
        server = WeightServer(weights.paths, weights_token(keys.for_workers), "127.0.0.1", pool=weights.pool)
        link.close_observers.append(server.close)
        WeightSources(link, server.address)
        port = link.listen(lambda context: keys.bind(context, "tcp://127.0.0.1:*"))
        link.close_observers.append(keys.close)
        self._membership = RemoteWorkers(self, link, keys, f"tcp://127.0.0.1:{port}", options)

    def start(self, is_drained: Callable[[str], bool]) -> None:
        assert self._membership is not None
        self._membership.is_drained = is_drained
        self._membership.start()
        threading.Thread(target=self._obey, daemon=True).start()

    async def close(self) -> None:
        if self._membership is not None:
            await self._membership.close()

    def _obey(self) -> None:
        for line in sys.stdin:
            verb, name, *store = line.split()
            if verb == "join":
                self._count += 1
                id = f"machine-{self._count}"
                left = partial(self._machines.pop, id, None)
                self._machines[id] = Machine(name, left, *store)
                continue
            (machine,) = (one for one in self._machines.values() if one.name == name)
            assert machine.forwarder is not None
            (machine.forwarder.passes.clear if verb == "cut" else machine.forwarder.passes.set)()


def main() -> None:
    def override(config: Config) -> Config:
        server = config.server.model_copy(update={"port": 0})
        return config.model_copy(update={"nodes": (), "server": server})

    settings = override(load_config(Path(sys.argv[1])))
    plan = Plan(settings, (), Path(sys.argv[1]), override, as_json=True)
    run_loop(serve_plan(plan, listen_for(settings), FarMachines()))


if __name__ == "__main__":
    main()
