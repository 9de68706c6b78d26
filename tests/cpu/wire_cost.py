"""What the tokens of an iteration cost on their way: processor time of both ends for a message, over the Unix socket of
a local worker and over TCP with keys, as a worker on another machine has it.

    python tests/cpu/wire_cost.py [SEQUENCES [ITERATION_MS [MESSAGES]]]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import zmq

from dovetail import messages
from dovetail.gateway.workers.client import router_socket
from dovetail.gateway.workers.remote_workers import WireKeys
from dovetail.types import TokenEvent
from dovetail.worker.remote_link import apply_keys, take_keys

ROUNDS = 3  # of both ways in turn; the cheapest of each counts, others share the machine


def send(address: str, sequences: int, iteration_s: float, count: int) -> None:
    """The worker's end: one message after each iteration, which is slept through. Prints its processor time."""
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, b"node")
    apply_keys(socket, take_keys())
    socket.connect(address)
    began_s = 0.0
    for number in range(count + 20):
        if number == 20:  # the first ones made the connection
            began_s = time.process_time()
        time.sleep(iteration_s)
        events = tuple(TokenEvent(f"request-{index}", 0, 1000 + number) for index in range(sequences))
        socket.send(messages.encode(messages.Tokens("model", events)))
    print(time.process_time() - began_s, flush=True)
    socket.close(2000)


def receive(socket: zmq.Socket[bytes], address: str, keys: str, sequences: int, words: list[str]) -> float:
    """The gateway's end: microseconds of both for a message."""
    environment = os.environ | ({messages.KEYS_VARIABLE: keys} if keys else {})
    child = subprocess.Popen(
        [sys.executable, __file__, "send", address, *words], env=environment, stdout=subprocess.PIPE
    )
    count, began_s = int(words[2]), 0.0
    for number in range(count + 20):
        if number == 20:
            began_s = time.process_time()
        _, frame = socket.recv_multipart()
        message = messages.decode_for_gateway(frame)
        assert isinstance(message, messages.Tokens)
        assert len(message.events) == sequences
    own_s = time.process_time() - began_s
    return 1e6 * (own_s + float(child.communicate(timeout=30)[0])) / count


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["send"]:
        send(words[1], int(words[2]), float(words[3]) / 1e3, int(words[4]))
        return
    given = [*words, *("8", "20", "300")[len(words) :]]
    sequences, iteration_ms = int(given[0]), float(given[1])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = WireKeys()
    with tempfile.TemporaryDirectory() as folder:
        path = f"ipc://{Path(folder) / 'wire'}"
        local = router_socket(context)
        local.bind(path)
        far = keys.bind(context, "tcp://127.0.0.1:*")
        address = far.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\x00")
        ways = {"local": (local, path, ""), "TCP with keys": (far, address, keys.for_workers)}
        costs: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, (socket, at, secret) in ways.items():
                costs[name].append(receive(socket, at, secret, sequences, given))
        local.close(0)
        far.close(0)
    for name, cost_us in [(name, min(each)) for name, each in costs.items()]:
        print(f"{name}: {cost_us:.0f} us for {sequences} tokens")
    more_us = min(costs["TCP with keys"]) - min(costs["local"])
    print(f"another machine costs {more_us:.0f} us more, {more_us / iteration_ms / 10:.2f} % of {iteration_ms:g} ms")
    keys.close()
    context.term()


if __name__ == "__main__":
    main()
