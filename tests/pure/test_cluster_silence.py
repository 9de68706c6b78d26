"""Nodes that do not answer: whoever asked goes on elsewhere, and nothing of it is served twice or lost."""

from __future__ import annotations

from driver_builders import Listener

from dovetail.cluster.asking import ANSWER_S, SILENT_S
from dovetail.cluster.remote_cluster import RemoteCluster
from dovetail.errors import WorkerLost
from dovetail.messages import Ask, Command, Hello, Reply, Said, Tokens, ToWorker
from dovetail.node.protocol import Accepted, Offer, Offered, Propose, Refused, TakeBack, TookBack, Withdraw
from dovetail.policy.compositions import SERVED
from dovetail.policy.headroom import Refusal
from dovetail.policy.placement import DeviceKind, NodeFacts
from dovetail.sim.storm import run_one
from dovetail.types import Request, SamplingParams, Slo, TokenEvent


class Wire:
    """Two nodes of which a test says what they answer."""

    def __init__(self) -> None:
        self.sent: dict[str, list[ToWorker]] = {"a": [], "b": []}
        nodes = [NodeFacts(name, DeviceKind.CPU) for name in self.sent]
        self.listener = Listener()
        self.cluster = RemoteCluster(nodes, SERVED, lambda node, message: self.sent[node].append(message))
        for name in self.sent:
            self.cluster.joined(name, Hello(name, 1, "cpu", 0.1, memory_bytes=1 << 30))
            self.cluster.received(name, Said((Offered("m", Offer(4096)),)), 0.0)

    def submit(self, id: str = "r", **slo: float) -> None:
        request = Request(id, "m", (1, 2, 3), SamplingParams(max_tokens=5, seed=0), slo=Slo(**slo))
        self.cluster.submit(request, self.listener, 0.0, 0.0)

    def asked(self, node: str) -> list[Ask]:
        """Proposals that it has got."""
        return [one for one in self.sent[node] if isinstance(one, Ask) and isinstance(one.question, Propose)]

    def other(self) -> tuple[str, str]:
        """Who was asked first, and who was not."""
        return ("a", "b") if self.asked("a") else ("b", "a")

    def reply(self, node: str, number: int, instance: int, now: float) -> None:
        self.cluster.received(node, Reply(number, Accepted(instance)), now)

    def tokens(self, node: str, *tokens: int) -> list[TokenEvent]:
        events = tuple(TokenEvent("r", 0, token=token) for token in tokens)
        self.cluster.received(node, Tokens("m", events), 2.0)
        return self.listener.take()


def test_a_silent_node_is_taken_to_refuse_and_what_it_may_have_accepted_is_withdrawn() -> None:
    wire = Wire()
    wire.submit()
    silent, other = wire.other()
    assert not wire.asked(other)
    assert wire.cluster.next_wake_s() == ANSWER_S
    wire.cluster.wake(ANSWER_S)
    assert Command(Withdraw(0)) in wire.sent[silent], "it comes after the question, whenever that is looked at"
    (ask,) = wire.asked(other)
    assert wire.cluster.controller.seeker.decisions.num_silent == 1
    wire.reply(other, ask.number, 7, ANSWER_S + 0.1)
    wire.reply(silent, wire.asked(silent)[0].number, 3, ANSWER_S + 0.2)  # after all
    assert wire.cluster.place_of("r") == other
    assert not wire.tokens(silent, 9, 9), "nobody has asked for these any more"
    assert [event.token for event in wire.tokens(other, 4, 5)] == [4, 5]


def test_tokens_of_a_late_acceptance_are_dropped_until_the_node_has_the_request_again() -> None:
    wire = Wire()
    wire.submit()
    silent, other = wire.other()
    wire.cluster.wake(ANSWER_S)
    wire.cluster.received(other, Reply(wire.asked(other)[0].number, Refused(Refusal.MEMORY)), ANSWER_S)
    wire.reply(silent, wire.asked(silent)[0].number, 3, ANSWER_S + 0.1)
    assert not wire.tokens(silent, 9, 9), "it has not heard yet that it was given up"
    now = ANSWER_S + 0.1
    answered = 1
    while len(wire.asked(silent)) == 1:
        now = max(now, wire.cluster.next_wake_s() or now)
        wire.cluster.wake(now)
        for ask in wire.asked(other)[answered:]:
            wire.cluster.received(other, Reply(ask.number, Refused(Refusal.MEMORY)), now)
            answered += 1
    wire.reply(silent, wire.asked(silent)[1].number, 4, now)
    assert [event.token for event in wire.tokens(silent, 5)] == [5]


def test_the_death_of_a_node_that_was_given_up_ends_nothing_that_runs_elsewhere() -> None:
    wire = Wire()
    wire.submit()
    silent, other = wire.other()
    wire.cluster.wake(ANSWER_S)
    wire.reply(other, wire.asked(other)[0].number, 7, ANSWER_S + 0.1)
    wire.cluster.lost(silent, 3.0, WorkerLost("it died"))
    assert not wire.listener.num_resumed
    assert [event.token for event in wire.tokens(other, 4)] == [4]


def test_a_strict_request_is_refused_within_its_target_though_nobody_answers() -> None:
    wire = Wire()
    wire.submit(ttft_s=0.4, tpot_s=0.2)
    now = 0.0
    while (wake_s := wire.cluster.next_wake_s()) is not None and wake_s < 3.0:
        now = max(wake_s, now)
        wire.cluster.wake(now)
        events = wire.listener.take()
        if events:
            break
    assert events[0].error is not None
    assert now < 0.5
    assert "did not answer" in events[0].error


def test_a_silent_node_is_not_asked_again_until_it_speaks_or_a_while_has_passed() -> None:
    wire = Wire()
    wire.submit()
    silent, other = wire.other()
    wire.cluster.wake(ANSWER_S)
    wire.reply(other, wire.asked(other)[0].number, 7, ANSWER_S)
    for node in wire.cluster.nodes.values():
        node.view = None
    handle = wire.cluster.nodes[silent]
    before = len(wire.sent[silent])
    question = wire.asked(other)[0].question
    assert handle.ask(TakeBack(), ANSWER_S + 0.1) is handle.ask(TakeBack(), ANSWER_S + SILENT_S - 0.1)
    assert len(wire.sent[silent]) == before
    assert isinstance(handle.ask(question, ANSWER_S + SILENT_S), int)
    handle.fell_silent(10.0)
    wire.cluster.received(silent, Said(()), 10.1)
    assert isinstance(handle.ask(question, 10.2), int)


def test_what_a_node_lets_go_after_it_was_given_up_is_taken_in() -> None:
    wire = Wire()
    wire.submit()
    silent, _ = wire.other()
    wire.reply(silent, wire.asked(silent)[0].number, 7, 0.1)
    controller, node = wire.cluster.controller, wire.cluster.nodes[silent]
    record = controller.works[0].record()
    controller.seeker.at(1.0)
    search = controller.seeker._search(controller.works[0])
    controller.works[0].search = None  # it stands for a newcomer's: the one that is let go has its place
    controller.seeker.decisions.begin(controller.seeker._make_way_on(node, search))  # type: ignore[arg-type]
    first = next(one for one in wire.sent[silent] if isinstance(one, Ask) and one.number > 0)
    controller.seeker.decisions.now_s = 1.0 + ANSWER_S
    controller.seeker.decisions.expire()
    wire.cluster.received(silent, Reply(first.number, TookBack(record, 7, 0.1, 0.1)), 3.0)
    assert controller.works[0].place is None
    assert controller.works[0].is_moving


def test_storms_have_nodes_that_fall_silent() -> None:
    assert any(run_one(seed).cluster.controller.seeker.decisions.num_silent for seed in range(60))
