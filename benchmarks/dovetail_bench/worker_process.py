"""A worker process of one's own, with a controller over it alone: for measuring it without a gateway in between."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import zmq

from dovetail import messages
from dovetail.cluster.remote_cluster import RemoteCluster
from dovetail.errors import DovetailError, RequestError
from dovetail.policy.compositions import SERVED
from dovetail.policy.placement import DeviceKind, NodeFacts
from dovetail.types import ModelCard, Request, TokenEvent

Message = TypeVar("Message", bound=messages.ToGateway)


class WorkerDied(DovetailError):
    pass


class _Client:
    """Of every request (`cluster.open_requests.Stream`)."""

    def __init__(self) -> None:
        self._events: list[TokenEvent] = []

    def began(self, placed_s: float) -> None: ...

    def put(self, event: TokenEvent, now: float) -> None:
        self._events.append(event)

    def fail(self, error: RequestError) -> None: ...

    def resumed(self) -> None: ...

    def closed(self) -> None: ...

    def take(self) -> list[TokenEvent]:
        events, self._events = self._events, []
        return events


class WorkerProcess:
    """Starts a worker on entering, ends it on leaving. Every receive is bounded in time."""

    def __init__(self, *options: str, node: str = "bench", pass_fds: Sequence[int] = ()) -> None:
        self._options = options
        self._pass_fds = tuple(pass_fds)
        self._node = node
        self._cluster = RemoteCluster([NodeFacts(node, DeviceKind.CPU)], SERVED, lambda _, said: self.send(said))
        self._client = _Client()
        self._kept: deque[messages.ToGateway] = deque()  # received while something else was waited for

    def __enter__(self) -> WorkerProcess:
        self._folder = tempfile.TemporaryDirectory(prefix="dovetail-")
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        address = f"ipc://{Path(self._folder.name) / 'worker.sock'}"
        self._socket.bind(address)
        arguments = ["--node", self._node, "--connect", address, "--parent", str(os.getpid()), *self._options]
        self.started = time.monotonic()
        self.process = subprocess.Popen([sys.executable, "-m", "dovetail.worker", *arguments], pass_fds=self._pass_fds)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.send(messages.Shutdown())
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._socket.close(linger=0)
        self._context.term()
        self._folder.cleanup()

    def send(self, message: messages.ToWorker) -> None:
        self._socket.send_multipart([self._node.encode(), messages.encode(message)])

    def load(self, card: ModelCard, **options: Any) -> None:
        """Make the model known and have an instance of it; Loaded follows."""
        self.offer(card, **options)
        self._cluster.warm(card.name, time.monotonic())

    def offer(self, card: ModelCard, **options: Any) -> None:
        """Make the model known; returns when the node has said so."""
        self._cluster.withdraw(self._node, card.name)
        self.send(messages.Load(card, **options))
        node, kept = self._cluster.nodes[self._node], []
        while node.offer_of(card.name) is None:
            kept.append(self.receive())
        self._kept.extend(kept)

    def submit(self, request: Request) -> None:
        now = time.monotonic()
        self._cluster.submit(request, self._client, now, now)

    def abort(self, request_id: str) -> None:
        self._cluster.abort(request_id, None, time.monotonic())

    def receive(self, timeout_s: float = 60.0) -> messages.ToGateway:
        deadline = time.monotonic() + timeout_s
        while not self._kept and not self._socket.poll(20):
            if self.process.poll() is not None:
                raise WorkerDied(f"the worker exited with {self.process.returncode}")
            if time.monotonic() > deadline:
                raise WorkerDied(f"no message from the worker within {timeout_s} s")
            self._wake()
        if self._kept:
            return self._kept.popleft()
        message = messages.decode_for_gateway(self._socket.recv_multipart()[1])
        self._take(message)
        return message

    def _wake(self) -> None:
        due_s, now = self._cluster.next_wake_s(), time.monotonic()
        if due_s is not None and due_s <= now:
            self._cluster.wake(now)
        self._keep_refusals()

    def _take(self, message: messages.ToGateway) -> None:
        if isinstance(message, messages.Hello):
            self._cluster.joined(self._node, message)
        elif isinstance(message, messages.LoadFailed):
            self._cluster.withdraw(self._node, message.model)
        elif isinstance(message, messages.Reply | messages.Said | messages.Tokens):
            self._cluster.received(self._node, message, time.monotonic())
        self._keep_refusals(message.events if isinstance(message, messages.Tokens) else ())

    def _keep_refusals(self, heard: Sequence[TokenEvent] = ()) -> None:
        """Of the controller, which are told like tokens, as if they came from the worker."""
        for event in self._client.take():
            if not any(event is one for one in heard):
                self._kept.append(messages.Tokens("", (event,)))

    def wait_for(
        self, kind: type[Message], accept: Callable[[Message], bool] = lambda _: True, timeout_s: float = 60.0
    ) -> Message:
        """The next message of this kind that is accepted; others are passed over."""
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.receive(max(0.1, deadline - time.monotonic()))
            if isinstance(message, messages.LoadFailed) and kind is not messages.LoadFailed:
                raise WorkerDied(message.error)
            if isinstance(message, kind) and accept(message):
                return message
