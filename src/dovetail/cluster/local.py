"""Controller and nodes in one process: what they say to each other arrives at once, or as late as a fault has it.

A driver reports what happened, carries out what is in `outbox`, in order, and asks `next_turn` for a device that is
free. It decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

from dovetail.cluster.controller import Controller
from dovetail.cluster.decisions import Said
from dovetail.cluster.intake import Submission
from dovetail.cluster.local_node import LocalNode, Preparation, ViewedNode
from dovetail.cluster.request import RequestState, placed_on
from dovetail.cluster.retry import Loss, RetryRule
from dovetail.eventlog import EventLog
from dovetail.node import events
from dovetail.node.events import Computed
from dovetail.node.node import Node
from dovetail.node.protocol import (
    Accepted,
    Answer,
    Finished,
    Notice,
    Order,
    Propose,
    Question,
    Release,
    TakeBack,
)
from dovetail.node.runtime import NodeRuntime
from dovetail.policy.compositions import Composition
from dovetail.policy.headroom import SloRule
from dovetail.policy.work import RequestRecord, Work

# What a driver carries out or is told, with the node that it is about; of a refused request there is none.
Output = events.Output | Said


class LocalCluster:
    def __init__(
        self,
        nodes: Sequence[Node],
        composition: Composition,
        *,
        rule: SloRule | None = None,
        retry: RetryRule | None = None,
        log: EventLog | None = None,
        are_viewed: bool = False,
    ) -> None:
        """`are_viewed`: of nodes is known what they last said."""
        self.outbox: deque[tuple[NodeRuntime | None, Output]] = deque()
        self.touched: dict[str, NodeRuntime] = {}  # nodes where something happened since their turn was last chosen
        self._dirty: list[NodeRuntime] = []
        self.nodes = [NodeRuntime(node, self._dirty, log) for node in nodes]
        handle_type = ViewedNode if are_viewed else LocalNode
        self.handles = {
            node.name: handle_type(node, self._ask_late, self._order_late, self._propose) for node in self.nodes
        }
        self.preparations: dict[int, Preparation] = {}  # by request
        self.controller = Controller(list(self.handles.values()), composition, self, rule=rule, retry=retry, log=log)
        self._timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0
        self._asked = 0  # questions whose answers come late or never

    # Requests

    def submit(self, submission: Submission, now: float) -> list[int]:
        """Returns the number of each open choice."""
        ids = self.controller.submit(submission, now)
        self.settle(now)
        return ids

    def cancel(self, ids: Iterable[int], now: float, fate: str = "aborted", reason: str = "") -> None:
        self.controller.cancel(ids, now, fate, reason)
        self.settle(now)

    def warm(self, model: str, now: float) -> None:
        self.controller.warm(model, now)
        self.settle(now)

    def lost(self, node: NodeRuntime, works: Sequence[Work], now: float, loss: Loss | None = None) -> None:
        """It was noticed that the node is gone, and this work with it."""
        self._lose(self.handles[node.name], {work.id: work.record() for work in works}, now, loss)

    def _lose(self, handle: LocalNode, records: dict[int, RequestRecord], now: float, loss: Loss | None) -> None:
        handle.last_records = records
        handle.begins_anew()
        self.controller.lost(handle, now, loss)
        handle.last_records = {}
        self.settle(now)

    def move_all(self, name: str, now: float) -> None:
        """What is on the node goes on elsewhere, if somebody takes it (L4)."""
        for work in placed_on(self.controller.works.values(), self.handles[name]):
            self.controller.migrate(work.id, "moved", now)
            self.settle(now)

    def drain(self, name: str, now: float) -> None:
        self.controller.drain(self.handles[name], now)
        self.settle(now)

    # Partitions, and nodes that leave and join

    def cut(self, name: str) -> None:
        """From now on nothing passes: requests there have come as far as was heard."""
        handle = self.handles[name]
        handle.is_cut = True
        handle.forget_underway()
        there = [work.id for work in placed_on(self.controller.works.values(), handle)]
        heard = {id: handle.runtime.progress(id) for id in there}
        node = handle.runtime
        known = {id: node.work_of(id).as_of(tokens) for id, tokens in heard.items() if tokens is not None}
        handle.last_records = {id: work.record() for id, work in known.items()}

    def unreachable(self, name: str, now: float) -> None:
        """The connection is lost."""
        self.controller.liveness.unreachable(self.handles[name], now)
        self.settle(now)

    def give_up(self, name: str, now: float) -> None:
        """Its requests go on elsewhere from what had been heard of them."""
        handle = self.handles[name]
        if handle.is_cut and not handle.is_given_up:
            handle.is_given_up = True
            self._lose(handle, handle.last_records, now, Loss(is_cut=True))

    def heal(self, name: str, now: float) -> None:
        """It says Hello. Had nobody missed it, what it was asked for before is lost all the same."""
        self.give_up(name, now)
        self.handles[name].is_cut = self.handles[name].is_given_up = False
        self.controller.joined(self.handles[name])
        self.settle(now)

    def leave(self, node: NodeRuntime, works: Sequence[Work], now: float) -> None:
        """It is gone for good, with whatever is left there."""
        handle = self.handles[node.name]
        handle.is_away = True
        self.lost(node, works, now, Loss(is_cut=True))
        self.controller.remove(handle)

    def join(self, name: str, now: float) -> None:
        handle = self.handles[name]
        handle.is_away = handle.is_draining = False
        self.controller.add(handle)
        self.controller.joined(handle)
        self.settle(now)

    # How far requests have come (`request.TokenCounts`)

    def num_tokens(self, work: RequestState) -> int | None:
        assert work.place is not None
        return self.handles[work.place.node.name].runtime.progress(work.id)

    def last_record(self, work: RequestState) -> RequestRecord:
        records = self.handles[work.place.node.name].last_records if work.place is not None else {}
        return records[work.id] if work.id in records else work.record()

    # Turns

    def next_turn(self, node: NodeRuntime, now: float) -> events.Turn | None:
        """Whose turn it is on a free device. Whoever may ask again does so before that is decided, and what comes of it
        is carried out first."""
        wake_s = self.next_wake_s()
        if wake_s is not None and wake_s <= now:
            self.wake(now)
            if self.outbox:
                self.touched[node.name] = node
                return None
        self.touched.pop(node.name, None)
        turn = node.next_turn(now)
        if node.is_touched:
            self.touched[node.name] = node
        if self._dirty:
            self.settle(now)
        if turn is not None:
            self.touched.pop(node.name, None)
        return turn

    def turn_ended(self, node: NodeRuntime, now: float, finished: Iterable[int], computed: Computed) -> None:
        node.turn_ended(now, finished, computed)
        if self._dirty:
            self.settle(now)

    # Time

    def next_wake_s(self) -> float | None:
        """When `wake` has something to do."""
        next_s = self.controller.next_wake_s()
        if self._timers and (next_s is None or self._timers[0][0] < next_s):
            return self._timers[0][0]
        return next_s

    def wake(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            _, _, handler, arguments = heappop(self._timers)
            handler(*arguments, now)
        self.settle(now)
        if self.outbox:
            return  # what came of that is carried out before anybody asks again; the controller is due still
        due_s = self.controller.next_wake_s()
        if due_s is not None and due_s <= now:  # a timer of a node's wakes nobody else
            self.controller.wake(now)
            self.settle(now)

    def _at(self, at_s: float, handler: Callable[..., None], *arguments: Any) -> None:
        self._serial += 1
        heappush(self._timers, (at_s, self._serial, handler, arguments))

    # What nodes and controller say

    def settle(self, now: float) -> None:
        """Until nobody has anything to say."""
        dirty, said = self._dirty, self.controller.outbox
        while dirty or said:
            while said:
                self.outbox.append((None, said.popleft()))
            if dirty:
                self._hear(dirty.pop(0), now)

    def _hear(self, node: NodeRuntime, now: float) -> None:
        handle = self.handles[node.name]
        while node.outbox or node.mailbox:
            while node.outbox:
                output = node.outbox.popleft()
                if isinstance(output, events.SetTimer):
                    self._at(output.at_s, node.timer, output.instance, output.epoch)
                elif isinstance(output, events.FirstToken | Finished):
                    self._deliver(handle, self._tell, handle, output, now=now)
                else:
                    self.outbox.append((node, output))
            if node.mailbox:
                notice = node.mailbox.popleft()
                if not handle.has_no_notices:
                    self._deliver(handle, self._notice, handle, notice, now=now)
        if (view := handle.news()) is not None and not handle.has_no_notices:
            self._deliver(handle, self._notice, handle, view, now=now)
        if node.is_touched:
            self.touched[node.name] = node

    def _tell(self, handle: LocalNode, output: events.FirstToken | Finished, now: float) -> None:
        """What a node says of a request that it does not have, as far as anybody knows, is nobody's: it was taken for
        silent and has accepted after all."""
        request = output.request.id if isinstance(output, Finished) else output.work.id
        work = self.controller.works.get(request)
        if work is not None and work.is_on(handle):
            self.outbox.append((handle.runtime, output))
            if isinstance(output, Finished):
                self.controller.stay(work.id, now)

    def _notice(self, handle: LocalNode, notice: Notice, now: float) -> None:
        handle.silent_until_s = 0.0
        handle.heard(notice)
        self.controller.heard(handle, notice, now)

    def _ask_late(self, handle: LocalNode, question: Question, now: float) -> int:
        """Of what a mute node is asked, every other question is lost, and of the others the answer; what it lets go
        is not lost with an answer, because connections keep what was sent."""
        self._asked = number = self._asked + 1
        if handle.is_mute and (number % 2 or _lets_go(question)):
            return number
        if handle.is_cut:
            return number
        if handle.is_deaf(now):
            self._reach(handle, self._ask_now, handle, handle.life, number, question, now=now)
        else:
            self._ask_now(handle, handle.life, number, question, now)
        return number

    def _ask_now(self, handle: LocalNode, life: int, number: int, question: Question, now: float) -> None:
        if handle.life != life or handle.is_cut:
            return
        answer = handle.answer(question, now)
        if not handle.is_mute or _lets_go(question):
            self._deliver(handle, self._answer, handle, number, answer, now=now)

    # What requests wait for on their device

    def _propose(self, handle: LocalNode, question: Propose, now: float) -> Answer:
        id, runtime = question.request.id, handle.runtime
        preparation = self.preparations.get(id)
        if preparation is None:
            return runtime.answer(question, now)
        answer = runtime.answer(question, now, prepares=True)
        if isinstance(answer, Accepted):
            work = runtime.work_of(id)
            self._at(now + preparation.seconds, self._prepared, runtime, work)
        return answer

    def _prepared(self, runtime: NodeRuntime, work: Work, now: float) -> None:
        """Unless it has left, or that was noted before."""
        is_there = runtime.progress(work.id) is not None and runtime.work_of(work.id) is work
        if is_there and work.prepares:
            known = self.preparations[work.id]
            self.preparations[work.id] = known._replace(num_lacking=max(known.num_lacking - 1, 0))
            runtime.prepared(work.id, now, is_there=not known.num_lacking)

    def _order_late(self, handle: LocalNode, order: Order, now: float) -> None:
        self._reach(handle, self._order_now, handle, handle.life, order, now=now)

    def _order_now(self, handle: LocalNode, life: int, order: Order, now: float) -> None:
        if handle.life == life and not handle.is_cut:
            handle.runtime.obey(order, now)

    def _reach(self, handle: LocalNode, handler: Callable[..., None], *arguments: Any, now: float) -> None:
        handle.heard_s = max(handle.heard_s, now + handle.order_lag_s)  # late, but in order
        self._at(handle.heard_s, handler, *arguments)

    def _answer(self, handle: LocalNode, number: int, answer: Answer, now: float) -> None:
        handle.silent_until_s = 0.0
        self.controller.answered(number, answer, now)

    def _deliver(self, node: LocalNode, handler: Callable[..., None], *arguments: Any, now: float) -> None:
        if node.is_cut:
            return
        if node.is_late(now):
            node.said_s = max(node.said_s, now + node.lag_s)  # late, but in order
            node.num_late += 1
            self._at(node.said_s, self._deliver_late, node, node.life, handler, arguments)
        else:
            handler(*arguments, now)

    def _deliver_late(
        self, node: LocalNode, life: int, handler: Callable[..., None], arguments: tuple[Any, ...], now: float
    ) -> None:
        if node.life == life:  # else its connection broke meanwhile
            node.num_late -= 1
            handler(*arguments, now)


def _lets_go(question: Question) -> bool:
    return isinstance(question, Release | TakeBack)
