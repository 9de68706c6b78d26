"""A worker without a model, for tests of the gateway: speaks the real messages, answers with the prompt's own tokens.

A prompt [a, b, c] is answered a, b, c, a, b, … one token per choice and tick. The model "broken" fails to load unless
its source is "good", the model "slow" takes a second to answer, the model "cold"
a while to load after it has. In a prompt, CRASH ends the process without a word, FAIL fails
the request and BUSY has it refused. An embedding has eight numbers: how many tokens leave which remainder.
"""

from __future__ import annotations

import argparse
import os
import time
from array import array
from pathlib import Path

import zmq

from dovetail.messages import (
    Ask,
    Command,
    Hello,
    InstanceStats,
    Load,
    Loaded,
    LoadFailed,
    Loading,
    LoadTimes,
    Reclaimed,
    Reply,
    Said,
    Shutdown,
    Stats,
    Tokens,
    TurnSpan,
    Unload,
    Unloaded,
    decode_for_worker,
    encode,
)
from dovetail.node.protocol import (
    Accepted,
    Finished,
    InstanceClosed,
    InstanceOpened,
    InstanceView,
    NodeView,
    Notice,
    Offer,
    Offered,
    Prefilled,
    Propose,
    Warm,
    Withdraw,
)
from dovetail.policy.placement import DeviceKind
from dovetail.policy.work import Phase, RequestRecord
from dovetail.types import FinishReason, ModelCard, Request, TokenEvent, TokenLogprob, TokenLogprobs

CRASH, FAIL, BUSY = 7, 8, 9
TICK_S = 0.001
COLD_S = 0.4


class FakeWorker:
    def __init__(self, node: str, address: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, node.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.node = node
        self.models: dict[str, ModelCard] = {}
        self.instances: dict[str, int] = {}  # by model
        self.num_instances = 0
        self.version = 0
        self.keep_alive_s = -1.0  # of the last model; 0 = let go of them when nothing is open
        self.spans: list[TurnSpan] = []
        self.cold_s = 0.0  # that the model "cold" took to load
        self.open: dict[int, tuple[Request, RequestRecord, int]] = {}  # tokens made so far

    def run(self) -> None:
        self.socket.send(encode(Hello(self.node, os.getpid(), "fake", 0.0)))
        parent = os.getppid()
        while os.getppid() == parent:  # a gateway that was killed takes its worker with it
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
            self.models[name] = message.card
            self.keep_alive_s = message.keep_alive_s
            self.say(Offered(name, Offer(4096, 1)))
            if self.keep_alive_s == 0 and not self.open:
                self.reclaim()
        elif isinstance(message, Ask):
            self.answer(message)
        elif isinstance(message, Command):
            if isinstance(message.order, Withdraw):
                self.open.pop(message.order.request, None)
            self.send_stats()
        elif isinstance(message, Unload):
            self.models.pop(message.model, None)
            self.close(message.model)
            self.socket.send(encode(Unloaded(message.model)))

    def answer(self, message: Ask) -> None:
        question = message.question
        if isinstance(question, Warm):
            self.socket.send(encode(Reply(message.number, Accepted(self.start(question.model)))))
            self.say(InstanceOpened(self.instances.get(question.model, 0), question.model))
        elif isinstance(question, Propose):
            request, record = message.request, question.request
            assert request is not None
            if CRASH in request.prompt:
                os._exit(9)
            if record.model == "cold" and "cold" not in self.instances:
                self.start_cold(message.number)
            else:
                self.socket.send(encode(Reply(message.number, Accepted(self.start(record.model)))))
            if record.model in self.instances:
                self.open[record.id] = (request, record, record.produced)

    def start(self, name: str) -> int:
        """Load the model unless it is there."""
        if name in self.instances:
            return self.instances[name]
        self.num_instances += 1
        if name == "slow":
            self.take_time(name, 1.0)
        if name == "broken" and self.models[name].source != "good":
            del self.models[name]
            self.socket.send(encode(LoadFailed(name, "the weights are truncated")))
            return self.num_instances
        self.instances[name] = self.num_instances
        self.socket.send(encode(Loaded(name, "f32", 4096, 1, False, LoadTimes(0.0, 0.0))))
        self.say()
        return self.num_instances

    def start_cold(self, number: int) -> None:
        """It takes the request and then loads, a quarter at first."""
        self.socket.send(encode(Reply(number, Accepted(self.num_instances + 1))))
        self.socket.send(encode(Loading("cold", 250, 1000)))
        began = time.monotonic()
        self.take_time("cold", COLD_S)
        self.cold_s = time.monotonic() - began
        self.start("cold")

    def take_time(self, name: str, seconds: float) -> None:
        """So long; or, where the model's folder has a file `wait`, until that has gone."""
        gate = Path(self.models[name].path) / "wait"
        if not gate.exists():
            time.sleep(seconds)
        deadline = time.monotonic() + 30
        while gate.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self, name: str) -> None:
        instance = self.instances.pop(name, None)
        if instance is not None:
            self.say(InstanceClosed(instance, name))

    def reclaim(self) -> None:
        for name in list(self.instances):
            self.close(name)
            self.socket.send(encode(Reclaimed(name)))

    def say(self, *notices: Notice) -> None:
        self.version += 1
        there = tuple(InstanceView(id, name, Phase.ANY, 0, True) for name, id in self.instances.items())
        view = NodeView(self.version, DeviceKind.CPU, bool(there), 0.0, 1 << 30, 1 << 30, there)
        self.socket.send(encode(Said((*notices, view))))

    def tick(self) -> None:
        events: list[TokenEvent] = []
        said: list[Notice] = []
        traced = tuple(request.id for request, _, _ in self.open.values() if request.traced)
        self.spans.append(TurnSpan("fake", time.monotonic(), TICK_S / 2, len(self.open), traced))
        for id, (request, record, made) in list(self.open.items()):
            event = self.next_event(request, made)
            events.append(event)
            if made == record.produced:
                said.append(Prefilled(id, 0.0))
            if event.finish is None:
                self.open[id] = (request, record, made + 1)
            else:
                del self.open[id]
                said.append(Finished(record, self.instances[record.model]))
        self.socket.send(encode(Tokens("fake", tuple(events))))
        if said:
            self.say(*said)
        if not self.open:
            self.send_stats()
            if self.keep_alive_s == 0:
                self.reclaim()

    def next_event(self, request: Request, made: int) -> TokenEvent:
        (choice,) = request.open_choices
        if FAIL in request.prompt:
            return TokenEvent(request.id, choice, None, FinishReason.ERROR, error="no luck")
        if BUSY in request.prompt:
            return TokenEvent(request.id, choice, None, FinishReason.ERROR, error="no room in time", retry_after_s=2.5)
        if request.sampling.pooling is not None:
            counts = [sum(token % 8 == i for token in request.prompt) for i in range(8)]
            return TokenEvent(request.id, choice, None, FinishReason.STOP, embedding=array("f", counts).tobytes())
        token = request.prompt[made % len(request.prompt)]
        ends = token in request.sampling.stop_token_ids
        is_last = made + 1 == request.sampling.max_tokens
        finish = FinishReason.STOP if ends else FinishReason.LENGTH if is_last else None
        top = (TokenLogprob(token, -0.5), TokenLogprob(0, float("-inf")))
        wanted = request.sampling.logprobs
        logprobs = None if wanted is None else TokenLogprobs(-0.5 - choice, top[:wanted])
        read = None
        if made == 0 and choice == 0 and (count := request.sampling.prompt_logprobs) is not None:
            first = (TokenLogprob(0, -0.1), TokenLogprob(1, -0.2))[:count]
            read = tuple(TokenLogprobs(-0.25, first, 7) for _ in request.prompt[1:])
        grace_s = self.cold_s if request.model == "cold" and made == 0 else 0.0
        return TokenEvent(request.id, choice, token, finish, logprobs, prompt_logprobs=read, grace_s=grace_s)

    def send_stats(self) -> None:
        used = len(self.open)
        stats = tuple(InstanceStats(name, used, 0, 64, used, 0, 0, 0, 0, 0, 1, 1, 0.1, 0.1) for name in self.instances)
        spans, self.spans = tuple(self.spans), []
        self.socket.send(encode(Stats(self.node, 1, stats, spans=spans)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", required=True)
    parser.add_argument("--connect", required=True)
    known, _ = parser.parse_known_args()
    FakeWorker(known.node, known.connect).run()


if __name__ == "__main__":
    main()
