"""Requests with their tokens, over nodes in other processes: the controller's driver, without socket and clock.

Keeps every token that came, so that a request that goes on elsewhere brings along what it has said. It decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import msgspec

from dovetail.cluster.controller import Controller
from dovetail.cluster.decisions import Failed, NoNode, Refused, Warmed
from dovetail.cluster.handle import room_for
from dovetail.cluster.intake import Submission
from dovetail.cluster.remote import RemoteNode
from dovetail.cluster.retry import Loss, RetryRule
from dovetail.errors import EngineFailed, Overloaded, RequestError, WorkerLost
from dovetail.eventlog import EventLog
from dovetail.messages import Hello, Reply, Said, Tokens, ToWorker
from dovetail.policy.compositions import Composition
from dovetail.policy.placement import DeviceKind
from dovetail.policy.reasons import in_words
from dovetail.policy.work import RequestRecord
from dovetail.types import FinishReason, Request, ServiceClass, TokenEvent

REFUSED = "the targets of this request (first token in {:.2f} s, then {:.3f} s a token) cannot be kept now: {}"
NEVER = "the targets of this request (first token in {:.2f} s, then {:.3f} s a token) are beyond this device"
NOBODY = -1  # group of a request that has ended
TOO_LARGE = "this request needs {} tokens of KV memory, the node has room for {}"


@dataclass(eq=False, slots=True)
class Choice:
    """One open choice of one request, and what it has said."""

    id: int  # by which controller and nodes know it
    request: Request
    number: int
    tokens: list[int] = field(default_factory=list)

    @property
    def body(self) -> Request:
        """The request with this choice alone, as far as it has come."""
        if not self.tokens and self.request.num_choices == 1:
            return self.request
        said = tuple(tuple(self.tokens) if at == self.number else None for at in range(self.request.num_choices))
        return msgspec.structs.replace(self.request, generated=said)


class Dispatcher:
    def __init__(
        self,
        nodes: Mapping[str, DeviceKind],
        composition: Composition,
        send: Callable[[str, ToWorker], None],
        log: EventLog | None = None,
        retry: RetryRule | None = None,
    ) -> None:
        self._send = send
        self._numbers = count()
        self.nodes = {name: self._node(name, kind) for name, kind in nodes.items()}
        self.controller = Controller(list(self.nodes.values()), composition, log=log, retry=retry)
        self.controller.migrations.progress = self._progress
        self.controller.on_placed = self._placed
        self.on_placed: Callable[[str, float], None] = lambda request_id, now: None
        self.events: list[TokenEvent] = []  # of requests that ended without a node's doing
        self.warmed: list[Warmed] = []
        self.refused = 0  # requests whose targets could not be kept
        self._choices: dict[int, Choice] = {}
        self._by_key: dict[tuple[str, int], Choice] = {}
        self._open: dict[str, list[int]] = {}  # by request: its choices
        self._groups: dict[str, int] = {}  # by request: the number of its first choice, as the controller has it
        self.failed: list[tuple[str, RequestError]] = []  # requests that ended with the loss of a node
        self.no_node: RequestError | None = None  # no node has come up for too long

    def _node(self, name: str, kind: DeviceKind) -> RemoteNode:
        send = partial(self._send, name)
        return RemoteNode(name, kind, send, self._body_of, self._tokens_of, self._numbers)

    # Requests

    def submit(self, request: Request, arrival_s: float, now: float) -> None:
        for id, number in enumerate(request.open_choices, self.controller.next_id):
            choice = Choice(id, request, number, list(request.generated_by(number) or ()))
            self._choices[id] = self._by_key[request.id, number] = choice
        self._open[request.id] = list(request.open_choices)
        self._groups[request.id] = self.controller.next_id
        self.controller.submit(_submission_of(request, arrival_s), now)
        self._settle()

    def abort(self, request_id: str, choice: int | None, now: float, fate: str = "aborted") -> None:
        """Free what these choices hold. No event follows for them."""
        numbers = self._open.get(request_id, ()) if choice is None else (choice,)
        found = [one for number in numbers if (one := self._by_key.get((request_id, number))) is not None]
        for one in found:
            self.controller.works[one.id].take(self._record(one))
        self.controller.cancel([one.id for one in found], now, fate)
        for one in found:
            self._forget(one)
        self._settle()

    def place_of(self, request_id: str) -> str | None:
        """The node of its first choice that has one."""
        found = (self._by_key[request_id, number].id for number in self._open.get(request_id, ()))
        return next((self.controller.places[id][0].name for id in found if id in self.controller.places), None)

    def positions(self) -> dict[str, int]:
        """Of the requests without a place, the next to get one first: 1, 2, …"""
        waiting = (self._choices[work.id].request.id for work in self.controller.queued.in_order())
        return {request_id: at for at, request_id in enumerate(dict.fromkeys(waiting), start=1)}

    def num_queued(self) -> Counter[str]:
        """Choices without a place, by model."""
        return Counter(work.model for work in self.controller.queued.in_order())

    def _placed(self, id: int, now: float) -> None:
        self.on_placed(self._choices[id].request.id, now)

    def _body_of(self, id: int) -> Request:
        body = self._choices[id].body
        return msgspec.structs.replace(body, isolated=True) if self.controller.works[id].is_isolated else body

    def _tokens_of(self, id: int) -> list[int]:
        return self._choices[id].tokens

    def _progress(self, id: int) -> int | None:
        choice = self._choices.get(id)
        return None if choice is None else len(choice.tokens)

    def _forget(self, choice: Choice) -> None:
        del self._choices[choice.id]
        del self._by_key[choice.request.id, choice.number]
        for node in self.nodes.values():
            node.given_up.pop(choice.id, None)  # its tokens are nobody's anyway
        left = self._open[choice.request.id]
        left.remove(choice.number)
        if not left:
            del self._open[choice.request.id]
            del self._groups[choice.request.id]

    # Nodes

    def add(self, name: str, kind: DeviceKind) -> None:
        """One more node; its worker is not there yet."""
        node = self.nodes[name] = self._node(name, kind)
        self.controller.add(node)

    def remove(self, name: str) -> None:
        """It was lost, and does not come back."""
        self.controller.remove(self.nodes.pop(name))

    def joined(self, name: str, hello: Hello) -> None:
        self.nodes[name].joined(hello)
        self.controller.joined()

    def lost(self, name: str, now: float, lost: WorkerLost) -> set[str]:
        """The worker is gone. Returns the requests that were there, all or in part, and go on."""
        node, controller = self.nodes[name], self.controller
        there = [id for id, (place, _) in controller.places.items() if place is node]
        node.lost()
        controller.cancel([id for id in there if id not in self._choices], now, "finished")
        records = {id: self._record(self._choices[id]) for id in there if id in self._choices}
        suspects = frozenset(self._groups.get(suspect, NOBODY) for suspect in lost.suspects)
        kept = controller.lost(node, now, records, Loss(lost.message, suspects, lost.is_cut))
        self._settle()
        return {self._choices[id].request.id for id in kept if id in self._choices}

    def drain(self, name: str, now: float) -> None:
        self.controller.drain(self.nodes[name], now)
        self._settle()

    def undrain(self, name: str, now: float) -> None:
        self.controller.undrain(self.nodes[name])
        self.controller.wake(now)
        self._settle()

    def _record(self, choice: Choice) -> RequestRecord:
        """As far as it has come, by its tokens."""
        record = self.controller.works[choice.id].record()
        return msgspec.structs.replace(record, produced=len(choice.tokens))

    def withdraw(self, name: str, model: str) -> None:
        """The node does not offer the model any more."""
        self.nodes[name].withdraw(model)

    def received(self, name: str, message: Reply | Said | Tokens, now: float) -> list[TokenEvent]:
        """Returns the events that somebody still waits for."""
        if self.nodes[name].spoke():
            self.controller.joined()
        if isinstance(message, Tokens):
            return [event for event in message.events if self._take(event, self.nodes[name], now)]
        if isinstance(message, Reply):
            if self.nodes[name].answered(message.number, message.answer):
                self.controller.answered(message.number, message.answer, now)
        else:
            node = self.nodes[name]
            for notice in message.notices:
                node.heard(notice)
                self.controller.heard(node, notice, now)
        self._settle()
        return []

    def _take(self, event: TokenEvent, node: RemoteNode, now: float) -> bool:
        """Tokens of a node that was taken for silent and has accepted after all are nobody's: others make them."""
        choice = self._by_key.get((event.request_id, event.choice))
        if (
            choice is None
            or choice.id in node.given_up
            or self.controller.places.get(choice.id, (node,))[0] is not node
        ):
            return False  # it goes on elsewhere
        if event.token is not None:
            choice.tokens.append(event.token)
        if event.finish is not None:
            self.controller.stay(choice.id, now)
            self._forget(choice)
        return True

    def warm(self, model: str, now: float) -> None:
        self.controller.warm(model, now)
        self._settle()

    # Time

    def next_wake_s(self) -> float | None:
        return self.controller.next_wake_s()

    def wake(self, now: float) -> None:
        self.controller.wake(now)
        self._settle()

    # What the controller says

    def _settle(self) -> None:
        outbox = self.controller.outbox
        while outbox:
            said = outbox.popleft()
            if isinstance(said, Warmed):
                self.warmed.append(said)
            elif isinstance(said, NoNode):
                self.no_node = Overloaded(said.message, code="no_worker", retry_after_s=said.retry_after_s)
            elif isinstance(said, Failed):
                self._fail(said)
            else:
                self._refuse(said)

    def _fail(self, failed: Failed) -> None:
        choice = self._choices[failed.work.id]
        self._forget(choice)
        error: RequestError = EngineFailed(failed.message, code=failed.reason)
        if failed.retry_after_s is not None:
            error = Overloaded(failed.message, code=failed.reason, retry_after_s=failed.retry_after_s)
        self.failed.append((choice.request.id, error))

    def _refuse(self, refused: Refused) -> None:
        """The decision in words."""
        work, choice = refused.work, self._choices[refused.work.id]
        self.refused += 1
        targets = work.ttft_s / work.slo_scale, work.tpot_s / work.slo_scale
        if refused.reason == "too_large":
            error = TOO_LARGE.format(work.known_tokens + 1, room_for(self.nodes.values(), work.model))
        elif refused.retry_after_s is None:
            error = NEVER.format(*targets)
        else:
            error = REFUSED.format(*targets, in_words(refused.refusals) or "its time has passed")
        event = TokenEvent(
            choice.request.id,
            choice.number,
            token=None,
            finish=FinishReason.ERROR,
            error=error,
            unprocessable=refused.retry_after_s is None,
            retry_after_s=refused.retry_after_s,
        )
        self._forget(choice)
        self.events.append(event)

    def take_events(self) -> list[TokenEvent]:
        events, self.events = self.events, []
        return events


def _submission_of(request: Request, arrival_s: float) -> Submission:
    produced = tuple(len(request.generated_by(choice) or ()) for choice in request.open_choices)
    return Submission(
        request.model,
        len(request.prompt),
        arrival_s,
        produced,
        request.slo.ttft_s,
        request.slo.tpot_s,
        request.service_class is ServiceClass.BEST_EFFORT,
        request.sampling.max_tokens,
        request.adapter.name if request.adapter is not None else "",
    )
