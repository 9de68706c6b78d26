"""All nodes as one: requests go in, where they are served is the controller's, tokens come back to whoever waits.

The shell around `cluster.remote_cluster`: socket, clock and timer. Makes models known to every node and keeps what
nodes say of them; of a worker's death a client notices nothing, unless the controller gives its request up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dovetail.cluster.controller import Controller
from dovetail.cluster.decisions import GiveUp, Kill, NoNode, Warmed
from dovetail.cluster.open_requests import OpenRequest
from dovetail.cluster.remote_cluster import RemoteCluster, error_of
from dovetail.cluster.retry import RetryRule
from dovetail.config import NodeConfig
from dovetail.errors import EngineFailed, RequestError, WorkerLost
from dovetail.eventlog import open_logs
from dovetail.gateway.hosted import HostedModel
from dovetail.gateway.workers.client import Arrival, Inbox, WorkerClient, WorkerState
from dovetail.gateway.workers.positions import Positions
from dovetail.messages import Hello, Load, Loaded, LoadFailed, Reclaimed, Reply, Said, ToGateway, Tokens, Unload
from dovetail.node.protocol import Offered
from dovetail.policy.compositions import SERVED
from dovetail.policy.placement import DeviceKind, NodeFacts
from dovetail.types import Request, TokenEvent


class RequestStream:
    """Of one request: its events go to the inbox of its job, which may have several."""

    def __init__(self, inbox: Inbox, hosted: HostedModel) -> None:
        self._inbox = inbox
        self._hosted = hosted
        hosted.begin()

    def began(self, placed_s: float) -> None:
        if self._inbox.placed_s is None:
            self._inbox.placed_s = placed_s

    def put(self, event: TokenEvent, now: float) -> None:
        self._inbox.put(Arrival(event, now))

    def fail(self, error: RequestError) -> None:
        self._inbox.fail(error)

    def resumed(self) -> None:
        self._inbox.on_resumed()

    def closed(self) -> None:
        self._hosted.end()


class Cluster:
    def __init__(
        self, link: WorkerClient, find: Callable[[str], Load | None] = lambda _: None, retry: RetryRule | None = None
    ) -> None:
        configs = [node.config for node in link.nodes.values()]
        self.link = link
        self._find = find  # a model that is on offer, by its name
        self.log = open_logs([one.event_log for one in configs if one.event_log is not None])
        self.remote = RemoteCluster(map(_facts_of, configs), SERVED, link.send, self.log, retry)
        self.models: dict[str, HostedModel] = {}
        self.positions = Positions(self.remote)
        self.on_drain: Callable[[str, str], None] = lambda node, how: None  # "drain", "leave", or "" = no longer
        self._timer: asyncio.TimerHandle | None = None
        link.observers.append(self._on_message)
        link.exit_observers.append(self._on_exit)
        link.unreachable_observers.append(self._on_unreachable)
        link.still_observers.append(self._on_still)
        link.close_observers.append(self._close)
        link.join_observers.append(self._on_join)
        link.leave_observers.append(self._on_leave)
        for node in link.nodes.values():
            if node.hello is not None:  # its worker was quicker than this process
                self._greet(node.name, node.hello)

    @property
    def controller(self) -> Controller:
        return self.remote.controller

    # Models

    def offer(self, load: Load) -> HostedModel:
        """The model on every node. Its first request starts it, somewhere."""
        hosted = self.models.get(load.card.name)
        if hosted is None:
            self.link.check_usable()
            hosted = self.models[load.card.name] = HostedModel(load)
            self._tell_all(hosted)
        return hosted

    def _tell_all(self, hosted: HostedModel) -> None:
        for node in self.link.nodes.values():
            if node.hello is not None:
                self._tell(node.name, hosted)

    def _tell(self, node: str, hosted: HostedModel) -> None:
        hosted.told(node)
        self.link.send(node, hosted.load)

    def reconfigure(self, load: Load) -> None:
        """Settings of a model that the nodes know have changed."""
        hosted = self.models[load.card.name]
        hosted.load = load
        self._tell_all(hosted)

    def warm(self, model: str) -> None:
        """Have an instance somewhere; `HostedModel.ready` says what came of it."""
        self.remote.warm(model, time.monotonic())
        self._settle()

    def unload(self, model: str) -> None:
        """Free its memory everywhere."""
        hosted = self.models.pop(model, None)
        if hosted is None:
            return
        hosted.idle.set()  # whoever waits for it looks again
        for node in self.link.nodes.values():
            self.remote.withdraw(node.name, model)
            if node.hello is not None:
                node.unload(model)
                self.link.send(node.name, Unload(model))

    def drop(self, model: str, error: RequestError) -> None:
        """Unload at once; its requests end with this error."""
        self._fail_requests(self.remote.requests.of_model(model), error)
        self.unload(model)

    def nodes_of(self, model: str) -> list[str]:
        """Where it has an instance."""
        return [node.name for node in self.link.nodes.values() if model in node.instances]

    def is_in_use(self, model: str) -> bool:
        hosted = self.models.get(model)
        return hosted is not None and bool(hosted.num_requests or self.nodes_of(model))

    def _fail_requests(self, opened: list[OpenRequest], error: RequestError) -> None:
        for one in opened:
            self.remote.fail(one, error, time.monotonic())

    # Requests

    def submit(self, request: Request, inbox: Inbox, arrived_s: float) -> None:
        stream = RequestStream(inbox, self.models[request.model])
        self.remote.submit(request, stream, arrived_s, time.monotonic())
        self._settle()

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """In this very tick; with no choice named all of them."""
        if request_id in self.remote.requests:
            self.remote.abort(request_id, choice, time.monotonic())
            self._settle()

    # For whoever watches

    def node_of(self, request_id: str) -> WorkerState | None:
        """Where it has its place."""
        name = self.remote.place_of(request_id)
        return None if name is None else self.link.nodes[name]

    # Nodes

    def drain(self, name: str) -> None:
        """Nothing new goes there; what it answers goes on elsewhere."""
        self.remote.drain(name, time.monotonic())
        self.on_drain(name, "leave" if name in self.link.leaving else "drain")
        self._settle()

    def leave(self, name: str) -> None:
        """The same, and a machine that joined leaves when it is empty."""
        self.link.leaving.add(name)
        self.drain(name)

    def is_drained(self, name: str) -> bool:
        drain = self.controller.drains.get(name)
        return drain is not None and drain.is_done

    def undrain(self, name: str) -> None:
        self.link.leaving.discard(name)
        self.remote.undrain(name, time.monotonic())
        self.on_drain(name, "")
        self._settle()

    def _on_join(self, name: str) -> None:
        """A machine; its worker says Hello when it is up."""
        self.remote.add(_facts_of(self.link.nodes[name].config))

    def _on_leave(self, name: str) -> None:
        self.remote.remove(name)

    def _on_message(self, node: str, message: ToGateway) -> None:
        if isinstance(message, Tokens):
            self.remote.received(node, message, time.monotonic())
        elif isinstance(message, Reply | Said):
            self.remote.received(node, message, time.monotonic())
            if isinstance(message, Said):
                self._note_offers(node, message)
        elif isinstance(message, Hello):
            self._greet(node, message)
        elif isinstance(message, Loaded):
            if message.model in self.models:
                self.models[message.model].became_ready(message)
        elif isinstance(message, Reclaimed):
            self._not_ready(message.model)
        elif isinstance(message, LoadFailed):
            self._load_failed(node, message)
        self._settle()

    def _greet(self, node: str, hello: Hello) -> None:
        """What its worker has from before is used if it is on offer, else it goes."""
        self.remote.joined(node, hello)
        for hosted in list(self.models.values()):
            self._tell(node, hosted)
        for name in hello.models:
            load = self._find(name)
            if name not in self.models and load is not None:
                self.offer(load)
            elif name not in self.models:
                self.link.nodes[node].unload(name)
                self.link.send(node, Unload(name))

    def _note_offers(self, node: str, message: Said) -> None:
        for notice in message.notices:
            if isinstance(notice, Offered) and self.link.nodes[node].is_current(notice.model):
                hosted = self.models.get(notice.model)
                if hosted is not None:
                    hosted.offered(node)

    def _not_ready(self, model: str) -> None:
        hosted = self.models.get(model)
        if hosted is not None and not any(model in node.loaded for node in self.link.nodes.values()):
            hosted.no_longer_ready()

    def _load_failed(self, node: str, message: LoadFailed) -> None:
        """What cannot be loaded anywhere ends whoever waits for it; else they go to where it can."""
        self.remote.withdraw(node, message.model)
        if any(one.up and one.offer_of(message.model) is not None for one in self.remote.nodes.values()):
            return
        self._fail_model(message.model, message.error)

    def _fail_model(self, model: str, error: str) -> None:
        failure = EngineFailed(f"'{model}' cannot be loaded: {error}")
        hosted = self.models.pop(model, None)
        if hosted is not None:
            hosted.fail(failure)
            hosted.idle.set()
        self._fail_requests(self.remote.requests.of_model(model), failure)

    def _on_exit(self, node: str, lost: WorkerLost) -> None:
        self.remote.lost(node, time.monotonic(), lost)
        for model, hosted in self.models.items():
            hosted.not_there(node)
            self._not_ready(model)
        self._settle()

    def _on_unreachable(self, node: str) -> None:
        if node in self.remote.nodes:
            self.remote.unreachable(node, time.monotonic())
            self._set_timer()

    def _on_still(self, node: str, stood_s: float, expected_s: float, limit_s: float) -> None:
        self.remote.stands_still(node, stood_s, expected_s, limit_s, time.monotonic())
        self._settle()

    def _fail_all(self, error: RequestError) -> None:
        self._fail_requests(self.remote.requests.all(), error)
        for hosted in self.models.values():
            hosted.fail(error)
            hosted.idle.set()
        self.models.clear()

    def _close(self) -> None:
        """The workers are gone for good."""
        if self._timer is not None:
            self._timer.cancel()
        self._fail_all(EngineFailed("the server is shutting down"))
        if self._timer is not None:
            self._timer.cancel()
        if self.log is not None:
            self.log.close()

    # What comes of it

    def _settle(self) -> None:
        while self.remote.outbox:
            said = self.remote.outbox.popleft()
            if isinstance(said, GiveUp):
                self.link.cut(said.node.name)
            elif isinstance(said, Kill):
                self.link.kill(said.node.name, said.stood_s)
            elif isinstance(said, NoNode):
                self._fail_all(error_of(said))
            elif said.node is None:
                self._fail_model(said.model, self._why_not(said))
        self._set_timer()

    def _why_not(self, warmed: Warmed) -> str:
        """It could not be started on the roomiest of those who offer it."""
        nodes = [node for node in self.remote.nodes.values() if node.up and node.offer_of(warmed.model) is not None]
        if "memory" not in warmed.refusals or not nodes:
            return f"{warmed.model}: {', '.join(warmed.refusals) or 'no worker is up'}"
        node = max(nodes, key=lambda one: one.view.free_bytes if one.view is not None else 0)
        offer = node.offer_of(warmed.model)
        free_bytes = node.view.free_bytes if node.view is not None else node.memory_bytes
        assert offer is not None
        return (
            f"{warmed.model}: its weights take {offer.weight_bytes / 1e9:.2f} GB, {free_bytes / 1e9:.2f} of the node's "
            f"{node.memory_bytes / 1e9:.2f} GB are free"
        )

    def _set_timer(self) -> None:
        """The controller is woken when it has something to do."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self.remote.next_wake_s()
        if due_s is not None:
            delay_s = max(due_s - time.monotonic(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.remote.wake(time.monotonic())
        self._settle()


def _facts_of(config: NodeConfig) -> NodeFacts:
    return NodeFacts(config.name, DeviceKind.CPU if config.device == "cpu" else DeviceKind.GPU)
