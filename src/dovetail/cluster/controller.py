"""Every request between its arrival and its end, over all nodes, and everything about it that no single node decides:
events in, orders and ends out.

The gateway drives it with sockets and a clock, the simulator in virtual time. Questions and orders go to nodes through
their handles; who has ended without a node's doing is in `outbox`. What nodes say comes in with `heard` and `answered`.
Its parts: the search for places (`seeker`), those without one (`queued`), those that have left a node (`departures`),
live migration, instances that make way, nodes that are emptied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count

from dovetail.cluster.decisions import (
    Decision,
    Displace,
    Failed,
    Migrated,
    Moving,
    NoNode,
    Placed,
    RequestRejected,
    Said,
    Warmed,
)
from dovetail.cluster.departures import Departures
from dovetail.cluster.displacing import Displacements
from dovetail.cluster.drain import Drain
from dovetail.cluster.handle import NodeHandle
from dovetail.cluster.intake import Submission, works_of
from dovetail.cluster.liveness import Liveness
from dovetail.cluster.log_lines import note_arrival, note_decision, note_end
from dovetail.cluster.migration import Migrations
from dovetail.cluster.queued import QueuedRequests
from dovetail.cluster.request import Location, RequestState, TokenCounts, placed_on
from dovetail.cluster.retry import Loss, Retries, RetryRule
from dovetail.cluster.seeker import Seeker
from dovetail.eventlog import EventLog
from dovetail.node import protocol
from dovetail.policy.compositions import Composition
from dovetail.policy.headroom import SloRule
from dovetail.policy.work import Phase


class Controller:
    def __init__(
        self,
        nodes: Sequence[NodeHandle],
        composition: Composition,
        tokens: TokenCounts,
        *,
        rule: SloRule | None = None,
        retry: RetryRule | None = None,
        log: EventLog | None = None,
    ) -> None:
        self.composition = composition
        self._tokens = tokens
        self.outbox: deque[Said] = deque()
        self.seeker = Seeker(nodes, composition)
        self.works = self.seeker.works  # every request that has not ended
        self.queued = QueuedRequests(self.seeker, composition)
        self.retries = Retries(retry or RetryRule())
        self.migrations = Migrations(self.seeker, tokens)
        self.departures = Departures(self.seeker, self.migrations)
        self.displacements = Displacements(self.seeker, self.migrations)
        self.reliever = composition.relief.reliever(self)
        self.liveness = Liveness(self.outbox)
        self.drains: dict[str, Drain] = {}  # by node
        self._rule = rule or SloRule()
        self._log = log
        self.next_id = 0  # of the first choice of the next request
        self.num_refused = 0
        self._place_numbers = count(1)

    # Requests

    def submit(self, submission: Submission, now: float) -> list[int]:
        """Returns the number of each open choice."""
        works = works_of(submission, self.next_id, now, self._rule, self.composition.admission.slo_scale)
        self.next_id += len(works)
        for work in works:
            self.works[work.id] = work
            if self._log is not None:
                note_arrival(self._log, submission, work, now)
        if self.seeker.is_too_large(works[0]):
            for work in works:
                self._decide(RequestRejected(work, "too_large", {}), now)
        else:
            self.queued.begin(works, now)
        self._settle(now)
        self.queued.use_idle(now)
        self._settle(now)
        self._begin_late(now)
        return [work.id for work in works]

    def cancel(self, ids: Iterable[int], now: float, fate: str = "aborted", reason: str = "") -> None:
        """Free what these hold. Nothing more is said of them."""
        works = [self.works[id] for id in ids if id in self.works]
        for work in works:
            work.take(self._tokens.last_record(work))
        self.seeker.at(now)
        self.migrations.cancel([work.id for work in works])
        self.queued.remove({work.id for work in works}, now)
        for work in works:
            if work.place is not None:
                (node, instance), work.place = work.place, None
                node.order(protocol.Withdraw(work.id), now)
                self.seeker.left(node, instance, is_best_effort=work.is_best_effort)
            self._end(work, fate, reason, now)
        self._settle(now)

    def _end(self, work: RequestState, fate: str, reason: str, now: float) -> None:
        del self.works[work.id]
        work.place = None
        if self._log is not None:
            note_end(self._log, work, fate, reason, now)

    def warm(self, model: str, now: float) -> None:
        """Have an instance of the model before anybody asks for it; `outbox` says what came of it."""
        self.seeker.at(now)
        self.seeker.decisions.begin(self.seeker.warm(model))
        self._settle(now)

    # Nodes

    def answered(self, number: int, answer: protocol.Answer, now: float) -> None:
        """To a question that was asked under this number."""
        self.seeker.at(now)
        self.seeker.decisions.answered(number, answer)
        self._settle(now)

    def heard(self, node: NodeHandle, notice: protocol.Notice, now: float) -> None:
        if isinstance(notice, protocol.Finished | protocol.Evicted | protocol.HandedOver):
            ended = self.departures.parted(node, notice, now)
            if ended is not None:
                self._end(ended, "finished", "", now)
        elif isinstance(notice, protocol.Overcommitted):
            known = self.works.get(notice.request.id)
            if known is not None and known.is_on(node):
                self.departures.overcommitted(node, notice.request, now)
                self.reliever.overcommitted(node, notice.request, now)
        elif isinstance(notice, protocol.CaughtUp):
            self.seeker.at(now)
            self.migrations.caught_up(node, notice)
        elif isinstance(notice, protocol.Prefilled):
            self.queued.prefilled(notice.request, notice.grace_s, now)
            if (work := self.works.get(notice.request)) is not None:
                work.is_prompting = False
            self._begin_late(now)
        elif isinstance(notice, protocol.InstanceOpened):
            self.seeker.placer.add_instance(node, notice.instance, notice.model, Phase.ANY)
            self.seeker.room.changed()
        elif isinstance(notice, protocol.InstanceReady):
            self.departures.ready(node, notice.model, now)
            self.reliever.ready(node, notice.model, now)
        elif isinstance(notice, protocol.Offered):
            self.seeker.placer.offered(node, notice.model, notice.offer)
            self.seeker.room.changed()
        elif isinstance(notice, protocol.InstanceClosed | protocol.InstanceGone):
            self._closed(node, notice.instance, now, is_gone=isinstance(notice, protocol.InstanceGone))
        elif isinstance(notice, protocol.NodeView):
            self.seeker.placer.saw(node, notice)
        elif isinstance(notice, protocol.Idle) and notice.is_idle:
            self.queued.idle(now)
        self._settle(now)

    def _closed(self, node: NodeHandle, instance: int, now: float, *, is_gone: bool) -> None:
        """The instance takes no more work; its memory is free, if it is gone."""
        self.seeker.at(now)
        if is_gone:
            self.displacements.gone(node, instance)
        self.seeker.placer.forget(node, instance)
        self.seeker.room.changed()

    def add(self, node: NodeHandle) -> None:
        self.seeker.placer.add_node(node)

    def remove(self, node: NodeHandle) -> None:
        """One that is lost; nothing has a place there."""
        assert not placed_on(self.works.values(), node), f"{node.name} still has requests"
        self.drains.pop(node.name, None)
        self.seeker.placer.remove_node(node)

    def joined(self, node: NodeHandle) -> None:
        """It has come or come back."""
        self.liveness.settled(node)
        self.found_node()

    def found_node(self) -> None:
        """There may be a place now."""
        self.retries.found_node()
        if self.works:
            self.seeker.room.changed()

    def lost(self, node: NodeHandle, now: float, loss: Loss | None = None) -> list[RequestState]:
        """It was noticed that the node is gone. Returns the requests that were there and go on."""
        loss = loss or Loss()
        self.liveness.settled(node)
        works = placed_on(self.works.values(), node)
        self.cancel([work.id for work in works if work.is_complete], now, "finished")
        self.seeker.at(now)
        self.migrations.lost(node)
        self.displacements.lost(node)
        works = [work for work in works if not work.is_complete]
        for work in works:
            work.take(self._tokens.last_record(work))
            work.place = None
        asked = self.seeker.decisions.proposed_to(node)  # it may have died of them
        there = [*works, *(self.works[id] for id in asked if id in self.works)]
        for failed in [one for work in there if (one := self.retries.judge(work, loss, now)) is not None]:
            self._fail(failed, now)
        self.departures.lost(node, [work for work in works if work.id in self.works], now)
        if not self.seeker.placer.has_node:
            self.retries.no_node(loss, now)
        self._settle(now)
        return [work for work in there if work.id in self.works]

    def _fail(self, failed: Failed, now: float) -> None:
        """With the choices that would have followed it."""
        works = [one for one in (failed.work, *failed.work.followers) if one.id in self.works]
        self.migrations.cancel([work.id for work in works])
        self.queued.remove({work.id for work in works}, now)
        for work in works:
            self._end(work, "failed", failed.reason, now)
            self.outbox.append(replace(failed, work=work))

    # Moving

    def migrate(self, id: int, reason: str, now: float) -> bool:
        """Have the request go on elsewhere, unbroken, if somebody takes it. False: there is nothing to move."""
        if id not in self.works or self.works[id].place is None or self.works[id].phase is not Phase.ANY:
            return False
        self.seeker.at(now)
        if not self.migrations.begin(id, reason):
            return False
        self._settle(now)
        return True

    def is_source(self, node: NodeHandle) -> bool:
        """A request is migrating away from it."""
        return bool(self.migrations.of_source(node))

    def stay(self, id: int, now: float) -> None:
        """The request has all its tokens: it moves no more."""
        self.works[id].is_complete = True
        self.seeker.at(now)
        self.migrations.over(id)

    def drain(self, node: NodeHandle, now: float) -> None:
        """Nothing new goes there; what is there moves away."""
        if node.name not in self.drains:
            self.drains[node.name] = Drain(node, self.migrations, self.works)
            self._settle(now)

    def undrain(self, node: NodeHandle) -> None:
        if self.drains.pop(node.name, None) is not None:
            node.is_draining = False
            self.seeker.room.changed()

    # Time

    def next_wake_s(self) -> float | None:
        """When `wake` has something to do."""
        next_s = self.queued.next_wake_s()
        rare_s = self.retries.next_s(self.works), self.liveness.next_s()
        if not self.migrations and not self.drains and rare_s == (None, None):
            return next_s  # asked before and after every turn of every node
        dues = [next_s, *rare_s, self.migrations.next_expiry_s(), *(drain.next_s for drain in self.drains.values())]
        return min((due_s for due_s in dues if due_s is not None), default=None)

    def wake(self, now: float) -> None:
        self.seeker.at(now)
        self.liveness.wake(now)
        for failed in self.retries.late(self.works, now):
            self._fail(failed, now)
        if self.retries.is_hopeless(now) and not self.seeker.placer.has_node:
            self._give_up_all(now)
        self.queued.wake(now)
        self.migrations.expire(now)
        self._settle(now)
        self._begin_late(now)

    def _give_up_all(self, now: float) -> None:
        """Nobody waits for a node that never comes back."""
        message, retry_after_s = self.retries.why_hopeless, self.retries.rule.no_node_s
        while self.works:
            self._fail(Failed(next(iter(self.works.values())), "no_worker", message, retry_after_s), now)
        self.outbox.append(NoNode(message, retry_after_s))

    def _begin_late(self, now: float) -> None:
        if self.queued.may_begin_late:
            works = self.works.values()
            prompting = [work.place.node for work in works if work.place is not None and work.is_prompting]
            self.queued.begin_late(prompting, now)
            self._settle(now)

    # What its parts have decided

    def _settle(self, now: float) -> None:
        """Decisions first: who moves where is looked at when everybody is where it was decided."""
        is_settled = False
        while not is_settled:
            while self.seeker.outbox:
                decisions, self.seeker.outbox = self.seeker.outbox, []
                for decision in decisions:
                    self._decide(decision, now)
            if self.drains or self.displacements:
                self._step_moves(now)
            is_settled = not self.seeker.outbox

    def _step_moves(self, now: float) -> None:
        self.seeker.at(now)
        for drain in self.drains.values():
            drain.step(now)
        self.displacements.step()

    def _decide(self, decision: Decision, now: float) -> None:
        if isinstance(decision, Warmed):
            self.outbox.append(decision)
            return
        if self._log is not None:
            note_decision(self._log, decision, now)
        if isinstance(decision, Placed | Migrated):
            self._give_place(decision.work, Location(decision.node, decision.instance), now)
            decision.work.is_prompting = isinstance(decision, Placed)  # else its prompt is computed there
            self.retries.placed(decision.work)
            if isinstance(decision, Migrated):
                self.queued.prefilled(decision.work.id, 0.0, now)
        elif isinstance(decision, Displace):
            self.displacements.begin(decision)
        elif isinstance(decision, Moving):
            decision.work.place = None
            self.migrations.over(decision.work.id)  # it was taken back for somebody else meanwhile
        elif isinstance(decision, RequestRejected):
            self.num_refused += 1
            self._end(decision.work, "refused", decision.reason, now)
            self.outbox.append(decision)

    def _give_place(self, work: RequestState, place: Location, now: float) -> None:
        if work.place is None:
            work.place_number = next(self._place_numbers)
        work.place = place
        if work.placed_s is None:
            work.placed_s = now
