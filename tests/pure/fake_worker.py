"""A worker without a model, for tests of the gateway: speaks the real messages, answers with the prompt's own tokens.

A prompt [a, b, c] is answered a, b, c, a, b, … one token per choice and tick. The model "broken" fails to load unless
its source is "good", the model "slow" takes a second. In a prompt, CRASH ends the process without a word, FAIL fails
the request and BUSY has it refused. An embedding has eight numbers: how many tokens leave which remainder.
"""

from __future__ import annotations

import argparse
import os
import time
from array import array

import zmq

from dovetail.messages import (
    Abort,
    Hello,
    InstanceStats,
    Load,
    Loaded,
    LoadFailed,
    LoadTimes,
    Reclaimed,
    Shutdown,
    Stats,
    Submit,
    Tokens,
    Unload,
    Unloaded,
    decode_for_worker,
    encode,
)
from dovetail.types import FinishReason, Request, TokenEvent, TokenLogprob, TokenLogprobs

CRASH, FAIL, BUSY = 7, 8, 9
TICK_S = 0.001


class FakeWorker:
    def __init__(self, node: str, address: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, node.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.node = node
        self.models: set[str] = set()
        self.keep_alive_s = -1.0  # of the last model; 0 = let go of them when nothing is open
        self.open: dict[tuple[str, int], tuple[Request, int]] = {}  # tokens made so far

    def run(self) -> None:
        self.socket.send(encode(Hello(self.node, os.getpid(), "fake", 0.0)))
        while True:
            while self.socket.poll(0 if self.open else 50):
                message = decode_for_worker(self.socket.recv())
                if isinstance(message, Shutdown):
                    return
                self.take(message)
            if self.open:
                self.tick()
                time.sleep(TICK_S)

    def take(self, message: object) -> None:
        if isinstance(message, Load):
            name = message.card.name
            if name == "slow":
                time.sleep(1.0)
            if name == "broken" and message.card.source != "good":
                self.socket.send(encode(LoadFailed(name, "the weights are truncated")))
            else:
                was_known = name in self.models
                self.models.add(name)
                self.keep_alive_s = message.keep_alive_s
                if was_known and self.keep_alive_s == 0 and not self.open:
                    self.socket.send(encode(Reclaimed(name)))
                    return
                self.socket.send(encode(Loaded(name, "f32", 4096, 1, False, LoadTimes(0.0, 0.0))))
        elif isinstance(message, Submit) and message.request.model in self.models:
            if CRASH in message.request.prompt:
                os._exit(9)
            for choice in message.request.open_choices:
                made = len(message.request.generated_by(choice) or ())
                self.open[message.request.id, choice] = (message.request, made)
        elif isinstance(message, Unload):
            self.models.discard(message.model)
            self.socket.send(encode(Unloaded(message.model)))
        elif isinstance(message, Abort):
            for key in list(self.open):
                if key[0] == message.request_id and message.choice in (None, key[1]):
                    del self.open[key]
            self.send_stats()

    def tick(self) -> None:
        events = []
        for key, (request, made) in list(self.open.items()):
            if FAIL in request.prompt:
                events.append(TokenEvent(*key, None, FinishReason.ERROR, error="no luck"))
                del self.open[key]
                continue
            if BUSY in request.prompt:
                events.append(TokenEvent(*key, None, FinishReason.ERROR, error="no room in time", retry_after_s=2.5))
                del self.open[key]
                continue
            if request.sampling.pooling is not None:
                counts = [sum(token % 8 == i for token in request.prompt) for i in range(8)]
                embedding = array("f", counts).tobytes()
                events.append(TokenEvent(*key, None, FinishReason.STOP, embedding=embedding))
                del self.open[key]
                continue
            token = request.prompt[made % len(request.prompt)]
            ends = token in request.sampling.stop_token_ids
            is_last = made + 1 == request.sampling.max_tokens
            finish = FinishReason.STOP if ends else FinishReason.LENGTH if is_last else None
            top = (TokenLogprob(token, -0.5), TokenLogprob(0, float("-inf")))
            wanted = request.sampling.logprobs
            logprobs = None if wanted is None else TokenLogprobs(-0.5, top[:wanted])
            read = None
            if made == 0 and key[1] == 0 and (count := request.sampling.prompt_logprobs) is not None:
                first = (TokenLogprob(0, -0.1), TokenLogprob(1, -0.2))[:count]
                read = tuple(TokenLogprobs(-0.25, first, 7) for _ in request.prompt[1:])
            logprobs = None if logprobs is None else TokenLogprobs(-0.5 - key[1], logprobs.top)
            events.append(TokenEvent(*key, token, finish, logprobs, prompt_logprobs=read))
            if finish is None:
                self.open[key] = (request, made + 1)
            else:
                del self.open[key]
        self.socket.send(encode(Tokens("fake", tuple(events))))
        if not self.open:
            self.send_stats()
            for name in self.models if self.keep_alive_s == 0 else ():
                self.socket.send(encode(Reclaimed(name)))

    def send_stats(self) -> None:
        used = len(self.open)
        stats = tuple(InstanceStats(name, used, 0, 64, used, 0, 0, 0, 0, 0, 1, 1, 0.1, 0.1) for name in self.models)
        self.socket.send(encode(Stats(self.node, 1, stats)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", required=True)
    parser.add_argument("--connect", required=True)
    known, _ = parser.parse_known_args()
    FakeWorker(known.node, known.connect).run()


if __name__ == "__main__":
    main()
