"""The gateway's end of the wire: messages to the workers, and their answers to whoever observes.

Keeps, per node, what its worker last said of itself. Starting and restarting processes is `supervisor`'s; where
requests go is `cluster`'s; what the tokens mean is `service`'s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec
import zmq

from dovetail.cluster.durable import Durable
from dovetail.config import NodeConfig
from dovetail.errors import Overloaded, RequestError, WorkerLost
from dovetail.eventlog import clear_logs
from dovetail.gateway.workers.adopted import WorkerRecords
from dovetail.gateway.workers.private_folder import PrivateFolder
from dovetail.gateway.workers.supervisor import LEFT_CODE, Supervisor, WorkerExit
from dovetail.messages import (
    ClockAsked,
    ClockTold,
    Hello,
    Loaded,
    LoadFailed,
    Loading,
    Probe,
    Reclaimed,
    Said,
    Shutdown,
    Stats,
    ToGateway,
    ToWorker,
    Unloaded,
    decode_for_gateway,
    encode,
)
from dovetail.node.protocol import NodeView
from dovetail.pulse import UNUSABLE_CODE
from dovetail.types import TokenEvent

logger = logging.getLogger("dovetail.gateway")

MAX_FRAMES = 64  # taken in at once
PROBE_S = 1.0


class Arrival(NamedTuple):
    event: TokenEvent
    at: float  # monotonic clock; a client that reads slowly does not make the worker late


class Inbox:
    """Where the events of one job arrive. Several requests may share it."""

    def __init__(self, on_resumed: Callable[[], None] = lambda: None) -> None:
        self.on_resumed = on_resumed  # the worker of a request died, and it goes on
        self._arrivals: list[Arrival] = []
        self._error: RequestError | None = None
        self._arrived = asyncio.Event()
        self.placed_s: float | None = None  # when the first of them got a place on a node

    def put(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)
        self._arrived.set()

    def fail(self, error: RequestError) -> None:
        self._error = error
        self._arrived.set()

    async def get(self) -> list[Arrival]:
        """Everything that has arrived, at least one event. Raises what ends the job, after what came before."""
        await self._arrived.wait()
        self._arrived.clear()
        arrivals, self._arrivals = self._arrivals, []
        if self._error is not None:
            if not arrivals:
                raise self._error
            self._arrived.set()
        return arrivals


class WorkerState:
    """One worker as the gateway sees it."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.name = config.name
        self.hello: Hello | None = None
        self.stats: Stats | None = None
        self.view: NodeView | None = None
        self.loaded: dict[str, Loaded] = {}  # models that have an instance which is ready
        self.loading: dict[str, Loading] = {}  # models on their way, as far as the worker has said
        self._unloading: Counter[str] = Counter()  # Unload messages that the worker has not confirmed

    @property
    def instances(self) -> dict[str, Loaded | None]:
        """Models that have an instance; None while it is loading."""
        known = [one.model for one in self.view.instances] if self.view is not None else []
        return {model: self.loaded.get(model) for model in dict.fromkeys([*known, *self.loaded])}

    def unload(self, model: str) -> None:
        self.loaded.pop(model, None)
        self.loading.pop(model, None)
        self._unloading[model] += 1

    def is_current(self, model: str) -> bool:
        """Whether what the worker says of loading this model is about the last Load. Messages keep their order, so all
        that comes before the answer to an Unload is about an instance that is given up."""
        return not self._unloading[model]

    def take(self, message: ToGateway) -> bool:
        """Note what the worker says of itself; False if it is about something that is given up."""
        if isinstance(message, Loaded | LoadFailed | Reclaimed):
            if not self.is_current(message.model):
                return False
            self.loading.pop(message.model, None)
            if isinstance(message, Loaded):
                self.loaded[message.model] = message
            else:
                self.loaded.pop(message.model, None)
        elif isinstance(message, Loading):
            self.loading[message.model] = message
        elif isinstance(message, Stats):
            self.stats = message
        elif isinstance(message, Unloaded):
            self._unloading[message.model] -= 1
        elif isinstance(message, Said):
            for notice in message.notices:
                if isinstance(notice, NodeView):
                    self.view = notice
        return True

    def reset(self) -> None:
        """The worker is gone, and with it its models."""
        self.hello = self.stats = self.view = None
        self.loaded.clear()
        self.loading.clear()
        self._unloading.clear()


class Watcher(Protocol):
    """Whoever keeps a worker running, on this machine or on another (`supervisor`, `remote_workers`)."""

    starts: int
    unusable: str | None  # why it is not started again: what no retry mends
    greeted: asyncio.Future[None]

    @property
    def pid(self) -> int | None: ...

    @property
    def retry_after_s(self) -> float | None: ...

    def start(self) -> None: ...

    def expects(self, hello: Hello) -> bool: ...

    def on_hello(self) -> None: ...

    async def stop(self) -> None: ...


Observer = Callable[[str, ToGateway], None]


class WorkerClient:
    """All nodes behind one socket."""

    def __init__(
        self,
        nodes: Sequence[NodeConfig],
        command: Sequence[str] | None = None,
        pass_fds: Sequence[int] = (),
        durable: Durable | None = None,
        outlive_s: float = 0.0,
    ) -> None:
        self._private: PrivateFolder | None = None
        if durable is not None:
            self._directory = durable.folder
        else:
            self._private = PrivateFolder()
            self._directory = self._private.path
        records = None if durable is None else WorkerRecords(durable)
        if records is not None:
            records.end_others([config.name for config in nodes])
        self._address = f"ipc://{self._directory}/gateway.sock"
        self._context = zmq.Context()
        self._socket = router_socket(self._context)
        self.nodes = {config.name: WorkerState(config) for config in nodes}
        self.supervisors: dict[str, Watcher] = {
            config.name: Supervisor(
                config,
                self._address,
                command,
                self.on_exit,
                self._directory,
                pass_fds,
                records,
                outlive_s,
                self._on_still,
            )
            for config in nodes
        }
        self._sockets = {"local": self._socket}
        self._socket_of: dict[str, zmq.Socket[bytes]] = {}  # of workers on other machines
        self.leaving: set[str] = set()  # nodes that are given up when nothing is left on them
        self.join_observers: list[Callable[[str], None]] = []
        self.leave_observers: list[Callable[[str], None]] = []
        self.observers: list[Observer] = []
        self.exit_observers: list[Callable[[str, WorkerLost], None]] = []
        self.close_observers: list[Callable[[], None]] = []
        # Of a node: its connection is lost; its heartbeat stands still (how long, expected, limit).
        self.unreachable_observers: list[Callable[[str], None]] = []
        self.still_observers: list[Callable[[str, float, float, float], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # while it is open

    def start(self) -> None:
        """Needs a running loop. Returns at once; the workers say Hello when they have imported what they need."""
        clear_logs([node.config.event_log for node in self.nodes.values() if node.config.event_log is not None])
        self._socket.bind(self._address)
        self._loop = asyncio.get_running_loop()
        for socket in self._sockets.values():
            self._loop.add_reader(_option(socket, zmq.FD), self._receive, socket)
        for supervisor in self.supervisors.values():
            supervisor.start()
        if "remote" in self._sockets:
            self._probe()

    async def close(self) -> None:
        """Shutdown message, then terminate, then kill; the directory goes last."""
        for node in self.nodes.values():
            if node.hello is not None:
                self.send(node.name, Shutdown())
        await asyncio.gather(*(supervisor.stop() for supervisor in self.supervisors.values()))
        for observer in self.close_observers:
            observer()
        for socket in self._sockets.values():
            if self._loop is not None:
                self._loop.remove_reader(_option(socket, zmq.FD))
            socket.close()
        self._loop = None
        self._context.term()
        if self._private is not None:
            self._private.remove()

    # Workers on other machines

    def listen(self, make: Callable[[zmq.Context[zmq.Socket[bytes]]], zmq.Socket[bytes]]) -> int:
        """On one more socket, before `start`; returns its port, 0 if it has none."""
        socket = self._sockets["remote"] = make(self._context)
        port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        return int(port) if port.isdigit() else 0

    def add(self, config: NodeConfig, watcher: Watcher) -> None:
        """A machine has joined."""
        assert config.name not in self.nodes, f"node {config.name} is there already"
        self.nodes[config.name] = WorkerState(config)
        self.supervisors[config.name] = watcher
        self._socket_of[config.name] = self._sockets["remote"]
        for observer in self.join_observers:
            observer(config.name)
        watcher.start()

    def remove(self, name: str) -> None:
        """The machine is gone for good; its worker has ended."""
        for observer in self.leave_observers:
            observer(name)
        self.leaving.discard(name)
        self.nodes.pop(name)
        self.supervisors.pop(name)
        self._socket_of.pop(name)

    def check_usable(self) -> None:
        """Some worker is up or on its way."""
        if not self.supervisors:
            raise Overloaded("no node has joined yet", code="no_node", retry_after_s=5.0)
        usable = [supervisor for supervisor in self.supervisors.values() if supervisor.unusable is None]
        if not usable:
            raise Overloaded("no node can serve: all have failed", code="no_node", retry_after_s=60.0)
        pauses = [supervisor.retry_after_s for supervisor in usable]
        if all(pause_s is not None for pause_s in pauses):
            soonest = min(pause_s or 0.0 for pause_s in pauses)
            what = "the worker failed and is about to be restarted"
            raise Overloaded(what, code="worker_restarting", retry_after_s=soonest)

    def is_up(self) -> bool:
        """Every node is, but for those that have failed for good."""
        usable = [node for node in self.nodes.values() if self.supervisors[node.name].unusable is None]
        return all(node.hello is not None for node in usable) and (bool(usable) or not self.nodes)

    def pid_of(self, node: WorkerState) -> int | None:
        return self.supervisors[node.name].pid

    def state_of(self, node: WorkerState) -> Literal["starting", "up", "down", "failed"]:
        if node.hello is not None:
            return "up"
        if self.supervisors[node.name].unusable is not None:
            return "failed"
        return "starting" if self.supervisors[node.name].retry_after_s is None else "down"

    def send(self, node: str, message: ToWorker) -> None:
        """To a worker that has said Hello; one that is gone needs nothing more."""
        if self.nodes[node].hello is None:
            return
        self._send(self._socket_of.get(node, self._socket), node, message)

    def _send(self, socket: zmq.Socket[bytes], node: str, message: ToWorker) -> None:
        try:
            socket.send_multipart([node.encode(), encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._missed(node)
        self._look_again(socket)

    def _look_again(self, socket: zmq.Socket[bytes]) -> None:
        """ZeroMQ's descriptor tells of changes only, and a call may have taken a change in: look whether it did."""
        if self._loop is not None and _option(socket, zmq.EVENTS) & zmq.POLLIN:
            self._loop.call_soon(self._receive, socket)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        """A few frames, so that others have their turn. zmq.asyncio would do the same at three times the price."""
        if self._loop is None:
            return
        try:
            for _ in range(MAX_FRAMES):
                identity, frame = socket.recv_multipart(zmq.NOBLOCK)
                self._read(socket, identity.decode(errors="replace"), frame)
        except zmq.Again:
            return
        finally:  # an error of ours costs its own frame: those after it would never be told of again
            self._look_again(socket)

    def _read(self, socket: zmq.Socket[bytes], name: str, frame: bytes) -> None:
        try:
            message = decode_for_gateway(frame)
        except msgspec.MsgspecError as error:
            logger.error("worker %s sent what cannot be read: %s", name, error)
            return
        node = self.nodes.get(name)
        if node is None or self._socket_of.get(name, self._socket) is not socket:
            return  # nobody of ours, or not where it belongs
        if isinstance(message, ClockAsked):
            self._send(socket, name, ClockTold(message.sent_s, time.monotonic()))
        else:
            self._dispatch(node, message)

    def _dispatch(self, node: WorkerState, message: ToGateway) -> None:
        if isinstance(message, Hello):
            if not self.supervisors[node.name].expects(message):
                return
            if node.hello is not None:  # it has come back before anybody missed it
                self.cut(node.name)
            self.supervisors[node.name].on_hello()
            node.hello = message
        elif node.hello is None or not node.take(message):
            return
        if isinstance(message, Loaded):
            seconds = message.times.open_s + message.times.build_s
            logger.info("%s: %s is loaded, from %s, in %.2f s", node.name, message.model, message.tier, seconds)
        elif isinstance(message, Reclaimed):
            logger.info("%s: %s has left memory", node.name, message.model)
        for observer in self.observers:
            observer(node.name, message)

    # Workers that live but cannot be reached

    def _probe(self) -> None:
        """A send to whoever ZeroMQ has no connection with fails: that is how a broken one is noticed in silence."""
        if self._loop is not None:
            for name in self._socket_of:
                self.send(name, Probe())
            self._loop.call_later(PROBE_S, self._probe)

    def _missed(self, name: str) -> None:
        """Told in a tick of its own: what could not be sent may be a part of a decision."""
        if self._loop is not None and name in self._socket_of:
            for observer in self.unreachable_observers:
                self._loop.call_soon(observer, name)

    def _on_still(self, name: str, stood_s: float, expected_s: float, limit_s: float) -> None:
        for observer in self.still_observers:
            observer(name, stood_s, expected_s, limit_s)

    def kill(self, name: str, stood_s: float) -> None:
        """It hangs. Workers of other machines are watched there."""
        supervisor = self.supervisors[name]
        if isinstance(supervisor, Supervisor):
            supervisor.kill(stood_s)

    def cut(self, name: str) -> None:
        """What it was asked for goes on elsewhere; it comes back with Hello."""
        logger.error("worker %s cannot be reached", name)
        self.nodes[name].reset()
        lost = WorkerLost(f"the worker '{name}' cannot be reached", is_cut=True)
        for observer in self.exit_observers:
            observer(name, lost)

    def on_exit(self, name: str, end: WorkerExit) -> None:
        during = f" while it computed {len(end.suspects)} requests" if end.suspects else ""
        if end.code not in (UNUSABLE_CODE, LEFT_CODE):  # whose supervisor has the reason; who was asked to leave
            logger.error("worker %s %s%s", name, end.reason, during)
        self.nodes[name].reset()
        lost = WorkerLost(f"the worker '{name}' {end.reason}", end.suspects)
        for observer in self.exit_observers:
            observer(name, lost)


def router_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """The gateway's end towards workers, not bound yet."""
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)  # a send never waits: what is in flight is bounded by max_queue
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # what finds nobody is an error
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted worker takes its name over
    return socket


class Frames:
    """Has `receive` called in the running loop for as long as it finds something in a socket."""

    def __init__(self, socket: zmq.Socket[bytes], receive: Callable[[], bool]) -> None:
        self._socket = socket
        self._receive = receive
        self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        self._loop.add_reader(_option(socket, zmq.FD), self._take)

    def look_again(self) -> None:
        """ZeroMQ's descriptor tells of changes only, and a send may have taken a change in."""
        if self._loop is not None and _option(self._socket, zmq.EVENTS) & zmq.POLLIN:
            self._loop.call_soon(self._take)

    def _take(self) -> None:
        for _ in range(MAX_FRAMES):
            if self._loop is None or not self._receive():
                return
        self.look_again()

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(_option(self._socket, zmq.FD))
            self._loop = None


def _option(socket: zmq.Socket[bytes], name: int) -> int:
    value = socket.getsockopt(name)
    assert isinstance(value, int)
    return value
