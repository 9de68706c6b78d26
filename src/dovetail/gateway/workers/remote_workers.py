"""Workers on other machines: who joins and leaves by what Ray says, one watcher per machine, keys for the wire.

Knows Ray only through `cluster.ray_backend`'s plain names, which a test may put something else in place of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import zmq
from pydantic import ValidationError
from zmq.auth.thread import ThreadAuthenticator

from dovetail.cluster.durable import Durable
from dovetail.cluster.ray_backend import HostLost, Member, WorkerEnd
from dovetail.config import NodeConfig
from dovetail.errors import WorkerLost
from dovetail.gateway.workers.client import WorkerClient, router_socket
from dovetail.gateway.workers.supervisor import (
    LEFT_CODE,
    LOST_CODE,
    STABLE_S,
    WorkerExit,
    pause_after,
    until_restart_s,
    worker_arguments,
)
from dovetail.messages import Hello, Neighbours, ToGateway

logger = logging.getLogger("dovetail.gateway")

LOOK_S = 0.5  # how often it is looked who is there
MAX_RETRY_S = 10.0  # between two tries of a machine that cannot be used
WIRE = "wire"  # of facts that are kept
OUTLIVE_S = 60.0  # how long a worker waits for its gateway, out of reach or started anew
ZAP_DOMAIN = b"dovetail"
MAX_NEIGHBOURS = 8  # that a machine asks for weights before the head


class Host(Protocol):
    """A machine that runs a worker for us."""

    async def describe(self) -> dict[str, Any]: ...

    async def run(self, arguments: Sequence[str], keys: str, hang_timeout_s: float) -> WorkerEnd: ...

    async def stop(self, *, leaves: bool = False) -> None: ...


class ClusterMembers(Protocol):
    def members(self) -> list[Member]: ...

    def host(self, member: Member) -> Host: ...


class WireKeys:
    """One pair for the gateway, one for all workers: whoever has the second may connect, and reads only what the first
    has signed. They live as long as the server's state, so that workers that outlive a gateway find the next one."""

    def __init__(self, keys: tuple[bytes, ...] | None = None) -> None:
        self._keys = keys or (*zmq.curve_keypair(), *zmq.curve_keypair())
        self.public, self._secret, self._worker_public, self._worker_secret = self._keys
        self._authenticator: ThreadAuthenticator | None = None

    @classmethod
    def kept(cls, durable: Durable) -> WireKeys:
        before = durable.get(WIRE, "keys")
        keys = cls(None if before is None else tuple(key.encode() for key in before))
        durable.put(WIRE, "keys", [key.decode() for key in keys._keys])
        return keys

    @property
    def for_workers(self) -> str:
        return b" ".join((self.public, self._worker_public, self._worker_secret)).decode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Asked by ZeroMQ for every connection."""
        return key == self._worker_public

    def bind(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=ZAP_DOMAIN.decode(), credentials_provider=self)
        socket = router_socket(context)
        # A machine whose plug was pulled says nothing: the connection ends after this long without a word from it.
        for option, value in ((zmq.HEARTBEAT_IVL, 1000), (zmq.HEARTBEAT_TIMEOUT, 5000), (zmq.HEARTBEAT_TTL, 5000)):
            socket.setsockopt(option, value)
        socket.zap_domain = ZAP_DOMAIN
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public, self._secret
        try:
            socket.bind(address)
        except zmq.ZMQError:
            socket.close()
            self.close()
            raise
        return socket

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


def listen_as_before(link: WorkerClient, keys: WireKeys, host: str, durable: Durable) -> int:
    """Where the last gateway did, so that its workers find this one, if nobody else is there; returns the port."""
    before = durable.get(WIRE, "port")
    try:
        port = link.listen(lambda context: keys.bind(context, f"tcp://{host}:{before or '*'}"))
    except zmq.ZMQError:
        port = link.listen(lambda context: keys.bind(context, f"tcp://{host}:*"))
    durable.put(WIRE, "port", port)
    return port


class WeightSources:
    """Tells every machine that joined where weights can be had: from a few others, each of which has others in front,
    and last from the head, which has everything."""

    def __init__(self, link: WorkerClient, own: str) -> None:
        self._link = link
        self._own = own  # host:port of the head
        link.observers.append(self._on_message)
        link.exit_observers.append(self._on_exit)

    def _on_message(self, node: str, message: ToGateway) -> None:
        if isinstance(message, Hello):
            self._tell_all()

    def _on_exit(self, node: str, lost: WorkerLost) -> None:
        self._tell_all()

    def _tell_all(self) -> None:
        known = {name: node.hello.weights for name, node in self._link.nodes.items() if node.hello is not None}
        ring = sorted(name for name, address in known.items() if address)
        for at, name in enumerate(ring):
            others = [known[one] for one in (*ring[at + 1 :], *ring[:at])][:MAX_NEIGHBOURS]
            self._link.send(name, Neighbours((*others, self._own)))


class RemoteWorker:
    """A `client.Watcher`: keeps the worker of one machine running while the machine is there."""

    def __init__(
        self,
        config: NodeConfig,
        host: Host,
        find: Callable[[], Host],
        arguments: Sequence[str],
        keys: str,
        on_exit: Callable[[str, WorkerExit], None],
    ) -> None:
        self.starts = 0
        self.unusable: str | None = None  # another machine's worker says so in its own log
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.name = config.name
        self._config = config
        self._host = host
        self._find = find  # it again, when it was lost and its machine is there
        self._arguments = list(arguments)
        self._keys = keys
        self._on_exit = on_exit
        self._pid: int | None = None
        self._is_running = self._is_lost = False
        self._resume_at: float | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """On its own machine; None while it has not said Hello."""
        return self._pid

    @property
    def retry_after_s(self) -> float | None:
        return until_restart_s(self._resume_at)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"remote-{self._config.name}")

    def expects(self, hello: Hello) -> bool:
        self._pid = hello.pid
        return self._is_running

    def on_hello(self) -> None:
        if not self.greeted.done():
            self.greeted.set_result(None)

    async def stop(self) -> None:
        """The worker ends, and with it what Ray keeps for it."""
        await self._end(leaves=False)

    async def leave(self) -> None:
        """The same, and its machine leaves."""
        await self._end(leaves=True)

    async def _end(self, *, leaves: bool) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._host.stop(leaves=leaves)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            started, self._is_running = loop.time(), True
            self.starts += 1
            end = await self._run_once()
            self._is_running, self._pid = False, None
            self._on_exit(self._config.name, end)
            failures = 0 if loop.time() - started > STABLE_S else failures + 1
            pause_s = pause_after(failures, is_on_requests=bool(end.suspects))
            if pause_s:
                self._resume_at = loop.time() + pause_s
                await asyncio.sleep(pause_s)
                self._resume_at = None

    async def _run_once(self) -> WorkerExit:
        try:
            if self._is_lost:
                self._host, self._is_lost = await asyncio.to_thread(self._find), False
            end = await self._host.run(self._arguments, self._keys, self._config.hang_timeout)
        except HostLost as error:
            logger.error("node %s: %s", self._config.name, error)
            self._is_lost = True  # it is looked for when its end has been told
            return WorkerExit(LOST_CODE)
        return WorkerExit(end.code, frozenset(end.suspects), end.hung_s)


class RemoteWorkers:
    """Machines come and go; each is a node of the link for as long as it is there."""

    def __init__(
        self, members: ClusterMembers, link: WorkerClient, keys: WireKeys, address: str, options: Sequence[str]
    ) -> None:
        self.is_drained: Callable[[str], bool] = lambda name: False  # nothing is left on the node, and nothing comes
        self._members = members
        self._link = link
        self._keys = keys
        self._address = address  # where workers find the gateway
        self._options = list(options)  # of every worker
        self._workers: dict[str, RemoteWorker | None] = {}  # by Ray's id; None = it is not used, or has left
        self._joining: dict[str, asyncio.Task[None]] = {}  # by Ray's id: those that are not among them yet
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="membership")

    async def close(self) -> None:
        tasks = [*self._joining.values()] + ([] if self._task is None else [self._task])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            try:
                await self._look(await asyncio.to_thread(self._members.members))
            except HostLost as error:
                logger.error("it is not known who is there: %s", error)
            await asyncio.sleep(LOOK_S)

    async def _look(self, members: list[Member]) -> None:
        there = {one.id: one for one in members}
        for id, member in there.items():
            if id not in self._workers and id not in self._joining:
                self._joining[id] = asyncio.create_task(self._join(member), name=f"join-{member.address}")
        for id in self._joining.keys() - there.keys():
            self._joining.pop(id).cancel()
        for id, worker in list(self._workers.items()):
            if id not in there:
                del self._workers[id]
                await self._gone(worker, LOST_CODE)
            elif worker is not None and worker.name in self._link.leaving and self.is_drained(worker.name):
                self._workers[id] = None
                await self._gone(worker, LEFT_CODE)

    async def _join(self, member: Member) -> None:
        """Until it is a node. Ray may refuse a machine that has only just come, and who comes back after a fall finds
        its name taken until that is noticed."""
        told, pause_s = "", LOOK_S
        while True:
            try:
                self._workers[member.id] = await self._try(member)
                self._joining.pop(member.id, None)
                return
            except HostLost as error:
                if str(error) != told:
                    told = str(error)
                    logger.error("the machine %s cannot be used yet: %s", member.address, told)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def _try(self, member: Member) -> RemoteWorker | None:
        host = await asyncio.to_thread(self._members.host, member)
        try:
            config = NodeConfig.model_validate(await host.describe())
        except ValidationError as error:
            logger.error("the machine %s cannot be used: %s", member.address, error)
            return None
        if config.name in self._link.nodes:
            raise HostLost(f"a node '{config.name}' is there already")
        arguments = [*worker_arguments(config, self._address, parent=None), *self._options]
        arguments += ["--outlive", str(OUTLIVE_S)]
        find = partial(self._members.host, member)
        worker = RemoteWorker(config, host, find, arguments, self._keys.for_workers, self._link.on_exit)
        self._link.add(config, worker)
        logger.info("node %s has joined from %s", config.name, member.address)
        return worker

    async def _gone(self, worker: RemoteWorker | None, code: int) -> None:
        """It has left as it was asked to, or its machine is gone."""
        if worker is None:
            return
        await worker.leave()
        if self._link.nodes[worker.name].hello is not None:  # else its end was told
            self._link.on_exit(worker.name, WorkerExit(code))
        self._link.remove(worker.name)
        logger.info("node %s has left", worker.name)
