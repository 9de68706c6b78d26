"""What a worker on another machine than its gateway needs: keys for the wire, and the gateway's clock."""

from __future__ import annotations

import os
import time

import zmq

from dovetail import messages

CLOCK_QUESTIONS = 8  # the quickest answer counts


def take_keys() -> str:
    """Those that whoever started this process gave it; they are not passed on."""
    return os.environ.pop(messages.KEYS_VARIABLE, "")


def apply_keys(socket: zmq.Socket[bytes], keys: str) -> None:
    if keys:
        server, public, secret = (key.encode() for key in keys.split(" "))
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = server, public, secret


def clock_offset_s(socket: zmq.Socket[bytes], timeout_s: float) -> float:
    """What the gateway's monotonic clock shows more than ours, right to half of what the quickest answer took."""
    best_s, offset_s = float("inf"), 0.0
    for _ in range(CLOCK_QUESTIONS):
        socket.send(messages.encode(messages.ClockAsked(time.monotonic())))
        if not socket.poll(int(timeout_s * 1000)):
            raise TimeoutError("the gateway does not answer")
        answer = messages.decode_for_worker(socket.recv())
        now = time.monotonic()
        assert isinstance(answer, messages.ClockTold), "nothing else is said before Hello"
        if now - answer.sent_s < best_s:
            best_s = now - answer.sent_s
            offset_s = answer.now_s - (now + answer.sent_s) / 2
    return offset_s
