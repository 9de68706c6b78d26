"""The worker's end of the wire: one connection to its gateway, which may break and is then made anew.

ZeroMQ does not mend it by itself here: what was under way when it broke is lost, and going on as if it were not would
leave tokens out. Each connection begins with Hello.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from dovetail import messages
from dovetail.worker.remote_link import apply_keys, clock_offset_s

FIRST_TIMEOUT_S = 30.0  # for the gateway that has started this process
CLOCK_TIMEOUT_S = 2.0  # a gateway that does not know this node yet does not answer
LINGER_MS = 1000
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


def take_in(
    receive: Callable[[], messages.ToWorker | None],
    handle: Callable[[messages.ToWorker], None],
    is_over: Callable[[], bool],
) -> None:
    """Handle what has come, one message after another: all of it, or until it is over, and the rest next time."""
    while (message := receive()) is not None:
        handle(message)
        if is_over():
            return


class Wire:
    def __init__(self, node: str, address: str, keys: str = "") -> None:
        self.context = zmq.Context()
        self.poller = zmq.Poller()
        self.offset_s = 0.0  # what the gateway's clock shows more than ours
        self._node = node.encode()
        self._address = address
        self._keys = keys
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        if not self.connect(FIRST_TIMEOUT_S):
            raise TimeoutError(f"no gateway at {address}")

    def connect(self, timeout_s: float) -> bool:
        """A connection in place of the last one; False: nobody is there."""
        self._drop(linger_ms=0)
        socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._node)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.SNDHWM, 0)  # a send never waits: what is under way is bounded by what was asked for
        apply_keys(socket, self._keys)
        self._socket, self._monitor = socket, socket.get_monitor_socket(_EVENTS)
        socket.connect(self._address)
        for one in (self._socket, self._monitor):
            self.poller.register(one, zmq.POLLIN)
        return self._is_welcome(time.monotonic() + timeout_s)

    def _is_welcome(self, until: float) -> bool:
        assert self._socket is not None
        if not self._next_event(until) & zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return False
        if self._address.startswith("tcp://"):
            try:
                self.offset_s = clock_offset_s(self._socket, max(until - time.monotonic(), CLOCK_TIMEOUT_S))
            except TimeoutError:
                return False
        return True

    def _next_event(self, until: float) -> int:
        """0: none in time."""
        assert self._monitor is not None
        if not self._monitor.poll(int(max(until - time.monotonic(), 0.0) * 1000)):
            return 0
        return int(recv_monitor_message(self._monitor)["event"])

    def wait(self, timeout_ms: int) -> set[zmq.Socket[bytes]]:
        """Until something has come, here or at whoever else has registered."""
        return {socket for socket, _ in self.poller.poll(timeout_ms)}

    def is_cut(self, ready: set[zmq.Socket[bytes]]) -> bool:
        """The gateway is gone, or out of reach."""
        return self._monitor in ready and bool(self._next_event(0.0) & zmq.EVENT_DISCONNECTED)

    def has_news(self, ready: set[zmq.Socket[bytes]]) -> bool:
        return self._socket in ready

    def receive(self) -> messages.ToWorker | None:
        assert self._socket is not None
        try:
            return messages.decode_for_worker(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def send(self, message: messages.ToGateway) -> None:
        """What finds nobody is lost, like all that was under way: `is_cut` says so next."""
        assert self._socket is not None
        try:
            self._socket.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return

    def close(self) -> None:
        self._drop(LINGER_MS)

    def _drop(self, linger_ms: int) -> None:
        if self._socket is None or self._monitor is None:
            return
        for one in (self._socket, self._monitor):
            self.poller.unregister(one)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)
        self._socket = self._monitor = None
