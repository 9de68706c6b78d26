"""What a worker on another machine than its gateway needs: keys for the wire, and the gateway's clock."""

from __future__ import annotations

import os
import time

import zmq

from dovetail import messages

CLOCK_QUESTIONS = 8  # the quickest answer counts
CLOCK_TIMEOUT_MS = 30_000


def apply_keys(socket: zmq.Socket[bytes]) -> None:
    """Those that whoever started this process gave it; they are not passed on."""
    keys = os.environ.pop(messages.KEYS_VARIABLE, "")
    if keys:
        server, public, secret = (key.encode() for key in keys.split(" "))
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = server, public, secret


def clock_offset_s(socket: zmq.Socket[bytes]) -> float:
    """What the gateway's monotonic clock shows more than ours, right to half of what the quickest answer took."""
    best_s, offset_s = float("inf"), 0.0
    for _ in range(CLOCK_QUESTIONS):
        socket.send(messages.encode(messages.ClockAsked(time.monotonic())))
        if not socket.poll(CLOCK_TIMEOUT_MS):
            raise TimeoutError("the gateway does not answer")
        answer = messages.decode_for_worker(socket.recv())
        now = time.monotonic()
        assert isinstance(answer, messages.ClockTold), "nothing else is said before Hello"
        if now - answer.sent_s < best_s:
            best_s = now - answer.sent_s
            offset_s = answer.now_s - (now + answer.sent_s) / 2
    return offset_s
