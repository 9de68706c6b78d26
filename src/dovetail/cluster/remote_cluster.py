"""The controller over nodes in other processes, without socket and clock: what clients and workers say goes in, what
they are to hear comes out. Where a request is served, and what becomes of it, the controller decides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count

import msgspec

from dovetail.cluster.controller import Controller
from dovetail.cluster.decisions import Failed, GiveUp, Kill, NoNode, RequestRejected, Warmed
from dovetail.cluster.handle import room_for
from dovetail.cluster.intake import Submission
from dovetail.cluster.open_requests import OpenChoice, OpenRequest, OpenRequests, Stream
from dovetail.cluster.remote import RemoteNode
from dovetail.cluster.request import RequestState
from dovetail.cluster.retry import Loss, RetryRule
from dovetail.errors import EngineFailed, Overloaded, RequestError, WorkerLost
from dovetail.eventlog import EventLog
from dovetail.messages import Hello, Reply, Said, Tokens, ToWorker
from dovetail.policy.compositions import Composition
from dovetail.policy.placement import NodeFacts
from dovetail.policy.reasons import in_words
from dovetail.policy.work import RequestRecord
from dovetail.types import FinishReason, Request, ServiceClass, TokenEvent

REFUSED = "the targets of this request (first token in {:.2f} s, then {:.3f} s a token) cannot be kept now: {}"
NEVER = "the targets of this request (first token in {:.2f} s, then {:.3f} s a token) are beyond this device"
TOO_LARGE = "this request needs {} tokens of KV memory, the node has room for {}"


class RemoteCluster:
    def __init__(
        self,
        nodes: Iterable[NodeFacts],
        composition: Composition,
        send: Callable[[str, ToWorker], None],
        log: EventLog | None = None,
        retry: RetryRule | None = None,
    ) -> None:
        self._send = send
        self._numbers = count()  # of questions
        self.controller = Controller([], composition, self, log=log, retry=retry)
        self.nodes: dict[str, RemoteNode] = {}
        for facts in nodes:
            self.add(facts)
        self.requests = OpenRequests()
        self.outbox: deque[Warmed | NoNode | GiveUp | Kill] = deque()  # what is about no single request

    # Requests

    def submit(self, request: Request, stream: Stream, arrival_s: float, now: float) -> None:
        opened = self.requests.begin(request, stream, self.controller.next_id)
        self.controller.submit(_submission_of(opened, arrival_s), now)
        self._settle(now)

    def abort(self, request_id: str, choice: int | None, now: float) -> None:
        """Free what these choices hold. No event follows for them."""
        opened = self.requests.get(request_id)
        if opened is not None:
            self._abort([one for one in opened.open if choice is None or one.number == choice], now)
            self._settle(now)

    def fail(self, opened: OpenRequest, error: RequestError, now: float) -> None:
        """End it with this error."""
        self._abort(opened.open, now)
        opened.stream.fail(error)
        self._settle(now)

    def _abort(self, choices: list[OpenChoice], now: float) -> None:
        self.controller.cancel([one.id for one in choices], now)
        for one in choices:
            self.requests.end(one)

    def place_of(self, request_id: str) -> str | None:
        """The node of its first choice that has one."""
        opened = self.requests.get(request_id)
        works = [self.controller.works[one.id] for one in opened.open] if opened is not None else []
        return next((work.place.node.name for work in works if work.place is not None), None)

    def positions(self) -> dict[str, int]:
        """Of the requests without a place, the next to get one first: 1, 2, …"""
        waiting = (_choice_of(work).owner.request.id for work in self.controller.queued.in_order())
        return {request_id: at for at, request_id in enumerate(dict.fromkeys(waiting), start=1)}

    # How far requests have come (`request.TokenCounts`)

    def num_tokens(self, work: RequestState) -> int | None:
        return None if work.is_complete else len(_choice_of(work).tokens)

    def last_record(self, work: RequestState) -> RequestRecord:
        return msgspec.structs.replace(work.record(), produced=len(_choice_of(work).tokens))

    # Nodes

    def add(self, facts: NodeFacts) -> None:
        """One more node; its worker is not there yet."""
        send = partial(self._send, facts.name)
        node = self.nodes[facts.name] = RemoteNode(facts, send, self.controller.works, self._numbers)
        self.controller.add(node)

    def remove(self, name: str) -> None:
        """It was lost, and does not come back."""
        self.controller.remove(self.nodes.pop(name))

    def joined(self, name: str, hello: Hello) -> None:
        self.nodes[name].joined(hello)
        self.controller.joined(self.nodes[name])

    def lost(self, name: str, now: float, lost: WorkerLost) -> None:
        """The worker is gone."""
        node = self.nodes[name]
        node.lost()
        suspects = self.requests.groups(lost.suspects)
        kept = self.controller.lost(node, now, Loss(lost.message, suspects, lost.is_cut))
        self._settle(now)
        for opened in dict.fromkeys(_choice_of(work).owner for work in kept if _choice_of(work).is_open):
            opened.stream.resumed()

    def unreachable(self, name: str, now: float) -> None:
        """The connection is lost."""
        self.controller.liveness.unreachable(self.nodes[name], now)

    def stands_still(self, name: str, stood_s: float, expected_s: float, limit_s: float, now: float) -> None:
        """Its heartbeat does."""
        self.controller.liveness.stands_still(self.nodes[name], stood_s, expected_s, limit_s)
        self._settle(now)

    def drain(self, name: str, now: float) -> None:
        self.controller.drain(self.nodes[name], now)
        self._settle(now)

    def undrain(self, name: str, now: float) -> None:
        self.controller.undrain(self.nodes[name])
        self.controller.wake(now)
        self._settle(now)

    def withdraw(self, name: str, model: str) -> None:
        """The node does not offer the model any more."""
        self.nodes[name].withdraw(model)

    def received(self, name: str, message: Reply | Said | Tokens, now: float) -> None:
        node = self.nodes[name]
        if node.spoke():
            self.controller.found_node()
        if isinstance(message, Tokens):
            for event in message.events:
                self._take(event, node, now)
        elif isinstance(message, Reply):
            if node.answered(message.number, message.answer):
                self.controller.answered(message.number, message.answer, now)
        else:
            for notice in message.notices:
                node.heard(notice)
                self.controller.heard(node, notice, now)
        self._settle(now)

    def _take(self, event: TokenEvent, node: RemoteNode, now: float) -> None:
        """Tokens of a request that has no place there are nobody's: it has ended, or goes on elsewhere."""
        opened = self.requests.get(event.request_id)
        choice = opened.choice(event.choice) if opened is not None else None
        if opened is None or choice is None:
            return
        work = self.controller.works[choice.id]
        if not work.is_on(node):
            return
        if not opened.has_begun and work.placed_s is not None:
            opened.has_begun = True
            opened.stream.began(work.placed_s)
        if event.token is not None:
            choice.tokens.append(event.token)
        opened.stream.put(event, now)
        if event.finish is not None:
            self.controller.stay(choice.id, now)
            self.requests.end(choice)

    def warm(self, model: str, now: float) -> None:
        self.controller.warm(model, now)
        self._settle(now)

    # Time

    def next_wake_s(self) -> float | None:
        return self.controller.next_wake_s()

    def wake(self, now: float) -> None:
        self.controller.wake(now)
        self._settle(now)

    # What the controller says

    def _settle(self, now: float) -> None:
        said = self.controller.outbox
        while said:
            one = said.popleft()
            if isinstance(one, Failed):
                self._failed(one, now)
            elif isinstance(one, RequestRejected):
                self._refused(one, now)
            else:
                self.outbox.append(one)

    def _failed(self, failed: Failed, now: float) -> None:
        """With one of its choices the request has failed."""
        choice = _choice_of(failed.work)
        if not choice.is_open:
            return
        self.requests.end(choice)
        self._abort(choice.owner.open, now)
        choice.owner.stream.fail(error_of(failed))

    def _refused(self, refused: RequestRejected, now: float) -> None:
        choice = _choice_of(refused.work)
        event = TokenEvent(
            choice.owner.request.id,
            choice.number,
            token=None,
            finish=FinishReason.ERROR,
            error=self._why(refused),
            unprocessable=refused.retry_after_s is None,
            retry_after_s=refused.retry_after_s,
        )
        choice.owner.stream.put(event, now)
        self.requests.end(choice)

    def _why(self, refused: RequestRejected) -> str:
        """The decision in words."""
        work = refused.work
        targets = work.ttft_s / work.slo_scale, work.tpot_s / work.slo_scale
        if refused.reason == "too_large":
            return TOO_LARGE.format(work.known_tokens + 1, room_for(self.nodes.values(), work.model))
        if refused.retry_after_s is None:
            return NEVER.format(*targets)
        return REFUSED.format(*targets, in_words(refused.refusals) or "its time has passed")


def error_of(said: Failed | NoNode) -> RequestError:
    if isinstance(said, NoNode):
        return Overloaded(said.message, code="no_worker", retry_after_s=said.retry_after_s)
    if said.retry_after_s is not None:
        return Overloaded(said.message, code=said.reason, retry_after_s=said.retry_after_s)
    return EngineFailed(said.message, code=said.reason)


def _choice_of(work: RequestState) -> OpenChoice:
    assert work.choice is not None, "every request here has a client"
    return work.choice


def _submission_of(opened: OpenRequest, arrival_s: float) -> Submission:
    request = opened.request
    return Submission(
        request.model,
        len(request.prompt),
        arrival_s,
        tuple(len(choice.tokens) for choice in opened.choices),
        request.slo.ttft_s,
        request.slo.tpot_s,
        request.service_class is ServiceClass.BEST_EFFORT,
        request.service_class is ServiceClass.PRIORITY,
        request.sampling.max_tokens,
        request.adapter.name if request.adapter is not None else "",
        opened.choices,
    )
