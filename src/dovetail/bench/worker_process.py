"""A worker process of one's own, spoken to directly: for measuring it without a gateway in between."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import zmq

from dovetail import messages
from dovetail.errors import DovetailError

Message = TypeVar("Message", bound=messages.ToGateway)


class WorkerDied(DovetailError):
    pass


class WorkerProcess:
    """Starts a worker on entering, ends it on leaving. Every receive is bounded in time."""

    def __init__(self, *options: str, node: str = "bench", pass_fds: Sequence[int] = ()) -> None:
        self._options = options
        self._pass_fds = tuple(pass_fds)
        self._node = node

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

    def receive(self, timeout_s: float = 60.0) -> messages.ToGateway:
        deadline = time.monotonic() + timeout_s
        while not self._socket.poll(100):
            if self.process.poll() is not None:
                raise WorkerDied(f"the worker exited with {self.process.returncode}")
            if time.monotonic() > deadline:
                raise WorkerDied(f"no message from the worker within {timeout_s} s")
        return messages.decode_for_gateway(self._socket.recv_multipart()[1])

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
