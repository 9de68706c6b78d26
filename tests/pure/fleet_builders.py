"""Several workers' drivers behind one gateway's controller, in virtual time: every message is coded as on the wire and
waits until it is delivered, so that a test decides what happens before what, and who dies in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec
from driver_builders import BLOCK, KV_BYTES, SPEC, WEIGHT_BYTES, CheckedExecutor, Clock, Listener, expected, hash_of
from sim_builders import make_latency

from dovetail import messages
from dovetail.cluster.controller import Controller
from dovetail.cluster.remote_cluster import RemoteCluster
from dovetail.errors import WorkerLost
from dovetail.node.events import StartLoad
from dovetail.policy.compositions import SERVED, Composition
from dovetail.policy.placement import DeviceKind, Hosting, NodeFacts
from dovetail.profiles.live import LiveLatency
from dovetail.sched.scheduler import SchedulerConfig
from dovetail.types import ModelCard, Request, SamplingParams
from dovetail.worker.driver import NodeDriver
from dovetail.worker.rejoin import say_again, withdraw_all
from dovetail.worker.runner import ModelRunner

MAX_TOKENS = 400


class Peer:
    """One worker: handles a message as `worker.process` does, tokens told before anything else."""

    def __init__(
        self, name: str, composition: Composition, clock: Clock, models: str, memory: int, load_s: float = 0.0
    ) -> None:
        self.name = name
        self.inbox: deque[bytes] = deque()
        self.outbox: deque[bytes] = deque()
        self.loads: deque[StartLoad] = deque()
        self.clock = clock
        self.driver = NodeDriver(name, DeviceKind.CPU, memory, composition, self, clock, on_pause=self._pause)
        self.pauses = 0  # messages that are taken in between the chunks of a prefill
        for model in models:
            latency = LiveLatency(make_latency())
            hosting = Hosting(
                WEIGHT_BYTES,
                KV_BYTES,
                latency,
                block_tokens=BLOCK,
                max_kv_tokens=MAX_TOKENS,
                keep_alive_s=60.0,
                load_s=load_s,
            )
            self.driver.register(model, hosting)
        self.tell()

    def load(self, command: StartLoad) -> None:
        self.loads.append(command)

    def finish_load(self) -> None:
        command = self.loads.popleft()
        executor = CheckedExecutor(self.clock, MAX_TOKENS // BLOCK)
        limits = SchedulerConfig(4096, 8, max_turn_tokens=16, max_tokens=MAX_TOKENS - BLOCK)
        self.driver.loaded(
            command.instance, ModelRunner(ModelCard(command.model, "", SPEC, ""), executor, limits, BLOCK)
        )

    def _pause(self) -> None:
        while self.pauses and self.inbox:
            self.pauses -= 1
            self.handle_one()

    def tell(self) -> None:
        report = self.driver.take_report()
        for model, events in report.tokens.items():
            self._send(messages.Tokens(model, tuple(events)))
        if report.notices:
            self._send(messages.Said(tuple(report.notices)))

    def _send(self, message: messages.ToGateway) -> None:
        self.outbox.append(messages.encode(message))

    def handle_one(self) -> None:
        self.tell()
        message = messages.decode_for_worker(self.inbox.popleft())
        if isinstance(message, messages.Ask):
            self._send(messages.Reply(message.number, self.driver.ask(message.question, message.request)))
        else:
            assert isinstance(message, messages.Command)
            self.driver.obey(message.order, message.tokens)
        self.driver.carry_out()

    def take_turn(self) -> bool:
        moved = self.driver.take_turn() or self.driver.home.is_touched
        self.tell()
        return moved


class Fleet:
    def __init__(
        self,
        names: str = "AB",
        models: str = "m",
        *,
        memory: int = 10_000_000,
        load_s: Mapping[str, float] | None = None,
        **parameters: Any,
    ) -> None:
        self.load_s = load_s or {}  # by node
        self.clock = Clock()
        self.composition = SERVED.having(**parameters)
        self.models, self.memory = models, memory
        self.requests: dict[str, Request] = {}
        self.text: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.cancelled: set[str] = set()
        self.peers: dict[str, Peer] = {}
        self.listener = Listener()
        self.cluster = RemoteCluster([NodeFacts(name, DeviceKind.CPU) for name in names], self.composition, self._send)
        for name in names:
            self.join(name)

    @property
    def controller(self) -> Controller:
        return self.cluster.controller

    @property
    def migrations(self) -> Any:
        return self.controller.migrations

    def join(self, name: str) -> None:
        load_s = self.load_s.get(name, 0.0)
        self.peers[name] = Peer(name, self.composition, self.clock, self.models, self.memory, load_s)
        self.cluster.joined(name, messages.Hello(name, 1, "virtual", 0.0, DeviceKind.CPU, self.memory))
        self.take()
        while self.peers[name].outbox:  # what it offers
            self.receive(name)

    def _send(self, name: str, message: messages.ToWorker) -> None:
        if name in self.peers:
            self.peers[name].inbox.append(messages.encode(message))

    # What clients do

    def submit(self, id: str, model: str = "m", prompt: int = 20, tokens: int = 30) -> None:
        content = tuple((hash_of(id) + i) % 90 for i in range(prompt))
        self.requests[id] = Request(id, model, content, SamplingParams(max_tokens=tokens, seed=0, temperature=0.0), 1)
        self.text[id] = []
        self._submit(id)

    def _submit(self, id: str) -> None:
        request, said = self.requests[id], self.text[id]
        if said:
            request = msgspec.structs.replace(request, generated=(tuple(said),))
        self.cluster.submit(request, self.listener, self.clock.now, self.clock.now)
        self.take()

    def cancel(self, id: str) -> None:
        if id not in self.ended:
            self.cancelled.add(id)
            self.cluster.abort(id, None, self.clock.now)
            self.ended[id] = "cancelled"
            self.take()

    def take(self) -> None:
        for event in self.listener.take():
            id = event.request_id
            assert id not in self.ended, f"{id} goes on after its end"
            if event.token is not None:
                self.text[id].append(event.token)
            if event.finish is not None:
                self.ended[id] = event.finish.value

    # What the world does

    def kill(self, name: str) -> None:
        """The worker is gone."""
        if self.peers.pop(name, None) is not None:
            self.cluster.lost(name, self.clock.now, WorkerLost("it died"))
            self.take()

    def cut(self, name: str) -> None:
        """The connection breaks: what is under way is lost, the worker gives up what it was asked for and comes back
        with its models."""
        peer = self.peers.pop(name)
        self.cluster.lost(name, self.clock.now, WorkerLost("it cannot be reached", is_cut=True))
        self.take()
        self._come_back(peer)

    def _come_back(self, peer: Peer) -> None:
        peer.inbox.clear()
        peer.outbox.clear()
        withdraw_all(peer.driver)
        self.peers[peer.name] = peer
        hello = messages.Hello(peer.name, 1, "virtual", 0.0, DeviceKind.CPU, self.memory, tuple(self.models))
        self.cluster.joined(peer.name, hello)
        for model in self.models:  # as the gateway tells of it
            say_again(peer.driver)
            peer.driver.register(model, peer.driver.hostings[model])
        peer.tell()
        self.take()

    def kill_controller(self) -> None:
        """Another takes its place and knows nothing; the workers outlive it, and whoever has the clients submits what
        is left."""
        names = list(self.peers)
        self.cluster = RemoteCluster([NodeFacts(name, DeviceKind.CPU) for name in names], self.composition, self._send)
        for name in names:
            self._come_back(self.peers[name])
            while self.peers[name].outbox:
                self.receive(name)
        for id in self.requests:
            if id not in self.ended:
                self._submit(id)

    def choice(self, id: str) -> int:
        opened = self.cluster.requests.get(id)
        assert opened is not None
        return opened.group

    def place(self, id: str) -> str:
        place = self.controller.works[self.choice(id)].place
        assert place is not None
        return place.node.name

    def migrate(self, id: str) -> bool:
        if id in self.ended:
            return False
        began = self.controller.migrate(self.choice(id), "test", self.clock.now)
        self.take()
        return began

    def receive(self, name: str) -> None:
        """One message of a node reaches the gateway."""
        message = messages.decode_for_gateway(self.peers[name].outbox.popleft())
        assert isinstance(message, messages.Reply | messages.Said | messages.Tokens)
        self.cluster.received(name, message, self.clock.now)
        self.take()

    def steps(self) -> list[tuple[str, str]]:
        """Everything that could happen next."""
        found: list[tuple[str, str]] = []
        for name, peer in self.peers.items():
            found += [("receive", name)] * bool(peer.outbox)
            found += [("handle", name)] * bool(peer.inbox)
            found += [("load", name)] * bool(peer.loads)
            found += [("turn", name)] * bool(
                peer.driver.home.is_touched or any(one.has_turns for one in peer.driver.home.node.instances.values())
            )
        return found

    def do(self, step: tuple[str, str]) -> None:
        kind, name = step
        peer = self.peers[name]
        if kind == "receive":
            self.receive(name)
        elif kind == "handle":
            peer.handle_one()
        elif kind == "load":
            peer.finish_load()
            peer.tell()
        else:
            peer.take_turn()
        self.check()

    def advance(self) -> bool:
        """Time passes until something is due; False if nothing is."""
        dues = [self.cluster.next_wake_s(), *(peer.driver.next_due_s() for peer in self.peers.values())]
        known = [due for due in dues if due is not None]
        if not known:
            return False
        self.clock.now = max(self.clock.now, min(known)) + 1e-6
        self.cluster.wake(self.clock.now)
        self.take()
        for peer in self.peers.values():
            peer.driver.run_timers()
            peer.tell()
        return True

    @property
    def is_done(self) -> bool:
        return len(self.ended) == len(self.requests)

    def run(self, rng: Random | None = None, limit: int = 20_000) -> None:
        """Until every request has ended; in turn, or as the dice fall."""
        for count in range(limit):
            steps = self.steps()
            if self.is_done and not any(kind in ("receive", "handle", "load") for kind, _ in steps):
                return
            if steps and (rng is None or rng.random() < 0.98):
                self.do(rng.choice(steps) if rng is not None else steps[count % len(steps)])
            elif not self.advance() and not steps:
                break
        raise AssertionError(f"it never came to an end: {self.ended}")

    # What must be so

    def check(self) -> None:
        for peer in self.peers.values():
            node = peer.driver.home.node
            node.device.ledger.check()
            for id, runner in peer.driver.runners.items():
                runner.scheduler.pool.check()
                instance = node.instances[id]
                assert runner.scheduler.pool.num_held * BLOCK <= instance.kv_tokens, (
                    "more blocks than the node knows of"
                )

    def check_end(self) -> None:
        for id, request in self.requests.items():
            whole = expected(id, len(request.prompt), request.sampling.max_tokens)
            said = self.text[id]
            assert said == whole[: len(said)], f"{id} says something else"
            assert id in self.cancelled or said == whole, f"{id} ended as {self.ended[id]} with {len(said)} tokens"
        assert not len(self.migrations)
        assert not len(self.controller.displacements)
        assert not self.controller.seeker.placer.leaving
        assert not self.controller.works
        for peer in self.peers.values():
            assert not peer.driver.states, f"{peer.name} still has {list(peer.driver.states)}"
            for runner in peer.driver.runners.values():
                assert runner.scheduler.pool.num_held == 0, f"{peer.name} still holds blocks"
