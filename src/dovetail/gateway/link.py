"""The gateway's end of the wire: messages to the workers, their answers to whoever waits for them.

Keeps, per node, which models were asked for and which requests are unfinished, so that a worker's death ends each of
them exactly once. Starting and restarting processes is `supervisor`'s; what the tokens mean is `service`'s.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import zmq

from dovetail.config import NodeConfig
from dovetail.errors import EngineFailed, Overloaded, RequestError, WorkerLost
from dovetail.gateway.supervisor import Supervisor, WorkerExit
from dovetail.messages import (
    Abort,
    Hello,
    Load,
    Loaded,
    LoadFailed,
    Reclaimed,
    Shutdown,
    Stats,
    Submit,
    ToGateway,
    Tokens,
    ToWorker,
    Unload,
    Unloaded,
    decode_for_gateway,
    encode,
)
from dovetail.modelspec import KvKind
from dovetail.types import ModelCard, Request, TokenEvent

logger = logging.getLogger("dovetail.gateway")

MAX_FRAMES = 64  # taken in at once
_MAX_DIRECTORY_CHARS = 80  # the address of a Unix socket has at most 107, on some systems 103


class Arrival(NamedTuple):
    event: TokenEvent
    at: float  # monotonic clock; a client that reads slowly does not make the worker late


class Inbox:
    """Where the events of one job arrive. Several requests may share it."""

    def __init__(self) -> None:
        self._arrivals: list[Arrival] = []
        self._error: RequestError | None = None
        self._arrived = asyncio.Event()

    def put(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)
        self._arrived.set()

    def fail(self, error: RequestError) -> None:
        self._error = error
        self._arrived.set()

    async def get(self) -> list[Arrival]:
        """Everything that has arrived, at least one event. Raises once the worker is lost, after what came before."""
        await self._arrived.wait()
        self._arrived.clear()
        arrivals, self._arrivals = self._arrivals, []
        if self._error is not None:
            if not arrivals:
                raise self._error
            self._arrived.set()
        return arrivals


@dataclass
class Instance:
    """A model that a node was asked to load."""

    card: ModelCard
    ready: asyncio.Future[Loaded]  # fails with the error that the waiting requests get
    requests: set[str] = field(default_factory=set)  # unfinished
    has_served: bool = False
    was_waited_for: bool = False  # a request came before it was loaded: a cold start
    is_reclaimed: bool = False  # the node has taken its memory back since it was last loaded
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while `requests` is empty

    def __post_init__(self) -> None:
        self.idle.set()

    def begin(self, request_id: str) -> None:
        self.requests.add(request_id)
        self.has_served = True
        self.idle.clear()

    def end(self, request_id: str) -> None:
        self.requests.discard(request_id)
        if not self.requests:
            self.idle.set()

    @property
    def loaded(self) -> Loaded | None:
        done = self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None
        return self.ready.result() if done else None


class NodeLink:
    """One worker as the gateway sees it."""

    def __init__(self, config: NodeConfig, send: Callable[[str, ToWorker], None]) -> None:
        self.config = config
        self.name = config.name
        self.hello: Hello | None = None
        self.stats: Stats | None = None
        self.instances: dict[str, Instance] = {}
        self.inboxes: dict[str, tuple[Inbox, str]] = {}  # by request: where its events go, and its model
        self._send = send
        self._outbox: list[ToWorker] = []  # until the worker has said Hello
        self._unloading: Counter[str] = Counter()  # Unload messages that the worker has not confirmed

    def send(self, message: ToWorker) -> None:
        if self.hello is None:
            self._outbox.append(message)
        else:
            self._send(self.name, message)

    def greet(self, hello: Hello) -> None:
        self.hello = hello
        outbox, self._outbox = self._outbox, []
        for message in outbox:
            self._send(self.name, message)

    def load(
        self, card: ModelCard, dtype: str, keep_alive_s: float = -1.0, *, kv: KvKind = "auto", start: bool = False
    ) -> Instance:
        """The model on this node. Its first request starts it, unless it shall be started before."""
        instance = self.instances.get(card.name)
        is_new = instance is None
        if instance is None:
            instance = self.instances[card.name] = Instance(card, _future())
        if is_new or (start and instance.loaded is None):
            self.send(Load(card, dtype, self.config.kv_cache, keep_alive_s, start, kv))
        return instance

    def reconfigure(self, model: str, dtype: str, keep_alive_s: float, kv: KvKind = "auto") -> None:
        self.send(Load(self.instances[model].card, dtype, self.config.kv_cache, keep_alive_s, start=False, kv=kv))

    def reclaimed(self, model: str) -> None:
        """The worker has let go of an idle model."""
        instance = self.instances.get(model)
        if instance is not None:
            instance.ready = _future()
            instance.is_reclaimed = True
            self._drop_reclaimed(instance)

    def _drop_reclaimed(self, instance: Instance) -> None:
        """Not while there are requests: some may wait for it to come back, of others the end was not read yet."""
        if instance.is_reclaimed and not instance.requests:
            self.instances.pop(instance.card.name, None)

    def unload(self, model: str) -> None:
        instance = self.instances.pop(model, None)
        if instance is not None:
            instance.idle.set()  # whoever waits for it looks again
            self._unloading[model] += 1
            self.send(Unload(model))

    def confirm_unload(self, model: str) -> None:
        if self._unloading[model]:
            self._unloading[model] -= 1

    def is_current(self, model: str) -> bool:
        """Whether what the worker says of loading this model is about the last Load. Messages keep their order, so all
        that comes before the answer to an Unload is about an instance that is given up."""
        return not self._unloading[model]

    def submit(self, request: Request, inbox: Inbox, arrived_s: float) -> None:
        instance = self.instances[request.model]
        instance.was_waited_for |= instance.loaded is None
        instance.begin(request.id)
        self.inboxes[request.id] = (inbox, request.model)
        self.send(Submit(request, arrived_s))

    def finish(self, request_id: str) -> None:
        """The request is over, for whatever reason. Later events for it are dropped."""
        entry = self.inboxes.pop(request_id, None)
        instance = self.instances.get(entry[1]) if entry else None
        if instance is not None:
            instance.end(request_id)
            self._drop_reclaimed(instance)

    def fail_model(self, model: str, error: RequestError) -> None:
        """The instance is gone, and with it its requests."""
        instance = self.instances.pop(model, None)
        if instance is not None:
            if not instance.ready.done():
                instance.ready.set_exception(error)
            instance.requests.clear()
            instance.idle.set()
        self._fail_requests(model, error)

    def drop(self, model: str, error: RequestError) -> None:
        """Unload at once; its requests end with this error."""
        self.unload(model)
        self._fail_requests(model, error)

    def _fail_requests(self, model: str, error: RequestError) -> None:
        for request_id in [key for key, (_, owner) in self.inboxes.items() if owner == model]:
            self.inboxes.pop(request_id)[0].fail(error)

    def reset(self, error: RequestError) -> None:
        """The worker is gone, and with it its models and requests."""
        self.hello, self.stats = None, None
        self._outbox.clear()
        self._unloading.clear()
        for model in list(self.instances):
            self.fail_model(model, error)
        for inbox, _ in self.inboxes.values():  # of models that were unloaded under them
            inbox.fail(error)
        self.inboxes.clear()


def _future() -> asyncio.Future[Loaded]:
    ready: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
    ready.add_done_callback(_retrieve)
    return ready


def _retrieve(future: asyncio.Future[Loaded]) -> None:
    """A load that nobody waits for may fail without asyncio complaining that nobody looked."""
    if not future.cancelled():
        future.exception()


Observer = Callable[[str, ToGateway], None]


class Link:
    """All nodes behind one socket."""

    def __init__(
        self, nodes: Sequence[NodeConfig], command: Sequence[str] | None = None, pass_fds: Sequence[int] = ()
    ) -> None:
        self._directory = _private_directory()
        self._address = f"ipc://{self._directory}/gateway.sock"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # a send never waits: what is in flight is bounded by max_queue
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a restarted worker takes its name over
        self.nodes = {config.name: NodeLink(config, self._send) for config in nodes}
        self.supervisors = {
            config.name: Supervisor(config, self._address, command, self._on_exit, self._directory, pass_fds)
            for config in nodes
        }
        self.observers: list[Observer] = []
        self.exit_observers: list[Callable[[str], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # while it is open

    def start(self) -> None:
        """Needs a running loop. Returns at once; the workers say Hello when they have imported what they need."""
        self._socket.bind(self._address)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.getsockopt(zmq.FD), self._receive)
        for supervisor in self.supervisors.values():
            supervisor.start()

    async def close(self) -> None:
        """Shutdown message, then terminate, then kill; the directory goes last."""
        for node in self.nodes.values():
            if node.hello is not None:
                self._send(node.name, Shutdown())
        await asyncio.gather(*(supervisor.stop() for supervisor in self.supervisors.values()))
        for node in self.nodes.values():
            node.reset(EngineFailed("the server is shutting down"))
        if self._loop is not None:
            self._loop.remove_reader(self._socket.getsockopt(zmq.FD))
            self._loop = None
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)

    def node_of(self, model: str) -> NodeLink:
        """Where this model runs, or where it shall: on the node with the fewest models."""
        nodes = list(self.nodes.values())
        for node in nodes:
            if model in node.instances:
                return node
        usable = [node for node in nodes if self.supervisors[node.name].retry_after_s is None]
        if not usable:
            soonest = min(supervisor.retry_after_s or 0.0 for supervisor in self.supervisors.values())
            raise Overloaded("the worker failed and is about to be restarted", retry_after_s=soonest)
        return min(usable, key=lambda node: len(node.instances))

    def is_up(self) -> bool:
        return all(node.hello is not None for node in self.nodes.values())

    def state_of(self, node: NodeLink) -> Literal["starting", "up", "down"]:
        if node.hello is not None:
            return "up"
        return "starting" if self.supervisors[node.name].retry_after_s is None else "down"

    def _send(self, node: str, message: ToWorker) -> None:
        self._socket.send_multipart([node.encode(), encode(message)], zmq.NOBLOCK)
        self._look_again()

    def _look_again(self) -> None:
        """ZeroMQ's descriptor tells of changes only, and a call may have taken a change in: look whether it did."""
        if self._loop is not None and self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        """A few frames, so that others have their turn. zmq.asyncio would do the same at three times the price."""
        if self._loop is None:
            return
        for _ in range(MAX_FRAMES):
            try:
                identity, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._read(identity.decode(errors="replace"), frame)
        self._look_again()

    def _read(self, name: str, frame: bytes) -> None:
        try:
            message = decode_for_gateway(frame)
        except msgspec.MsgspecError as error:
            logger.error("worker %s sent what cannot be read: %s", name, error)
            return
        node = self.nodes.get(name)
        if node is not None:
            self._dispatch(node, message)

    def _dispatch(self, node: NodeLink, message: ToGateway) -> None:
        if isinstance(message, Hello):
            if message.pid != self.supervisors[node.name].pid:
                return  # a late word of a process that is gone
            self.supervisors[node.name].on_hello()
            node.greet(message)
        elif node.hello is None:
            return
        elif isinstance(message, Tokens):
            _deliver(node, message)
        elif isinstance(message, Loaded | LoadFailed):
            if node.is_current(message.model):
                _settle(node, message)
        elif isinstance(message, Stats):
            node.stats = message
        elif isinstance(message, Reclaimed):
            if node.is_current(message.model):
                node.reclaimed(message.model)
        else:
            assert isinstance(message, Unloaded)
            node.confirm_unload(message.model)
        for observer in self.observers:
            observer(node.name, message)

    def _on_exit(self, name: str, end: WorkerExit) -> None:
        during = f" while it computed {len(end.suspects)} requests" if end.suspects else ""
        logger.error("worker %s %s%s", name, end.reason, during)
        self.nodes[name].reset(WorkerLost(f"the worker '{name}' {end.reason}", end.suspects))
        for observer in self.exit_observers:
            observer(name)


def _private_directory() -> Path:
    """Mode 0700: nobody else may speak to the workers."""
    directory = Path(tempfile.mkdtemp(prefix="dovetail-"))
    if len(str(directory)) <= _MAX_DIRECTORY_CHARS:
        return directory
    directory.rmdir()
    return Path(tempfile.mkdtemp(prefix="dovetail-", dir="/tmp"))


def _deliver(node: NodeLink, message: Tokens) -> None:
    now = time.monotonic()
    for event in message.events:
        entry = node.inboxes.get(event.request_id)
        if entry is not None:
            entry[0].put(Arrival(event, now))


def _settle(node: NodeLink, message: Loaded | LoadFailed) -> None:
    if isinstance(message, LoadFailed):
        node.fail_model(message.model, EngineFailed(f"'{message.model}' cannot be loaded: {message.error}"))
        return
    instance = node.instances.get(message.model)
    if instance is not None and not instance.ready.done():
        instance.is_reclaimed = False
        instance.ready.set_result(message)


def abort(node: NodeLink, request_id: str, choice: int | None = None) -> None:
    """Tell the worker in this very tick; with no choice named the request is over here as well."""
    if request_id in node.inboxes:
        node.send(Abort(request_id, choice))
        if choice is None:
            node.finish(request_id)
