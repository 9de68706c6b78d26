"""One device while it runs: answers what it is asked, says what becomes of its requests, learns from what turns take.

A state machine: questions, orders and events come in with `now`. What its driver carries out collects in `outbox`, what
whoever placed the requests should hear in `mailbox`. A node that may have something to say notes itself in `dirty`.
"""

from __future__ import annotations

from collections.abc import Iterable

from dovetail.eventlog import EventLog
from dovetail.node import answers, events, protocol
from dovetail.node.drafting import got_more
from dovetail.node.feedback import LatencyFeedback, TurnGaps
from dovetail.node.instance import State
from dovetail.node.node import Node
from dovetail.node.speech import Speech
from dovetail.policy.headroom import Refusal
from dovetail.policy.work import Work


class NodeRuntime:
    def __init__(self, node: Node, dirty: list[NodeRuntime] | None = None, log: EventLog | None = None) -> None:
        self.node = node
        self.name, self.kind = node.name, node.kind
        self._speech = Speech(node, log)
        self.outbox = self._speech.outbox
        self.mailbox = self._speech.mailbox
        self.version = 0  # of its view: counts changes
        self.is_touched = False  # something happened since its turn was last chosen
        self.gaps = TurnGaps()
        self._dirty = dirty
        self._feedback = LatencyFeedback(log)
        self._places = self._speech.places
        self.is_idle = False  # nothing can run, as it was last said
        self._fullness: float | None = None
        self.known_room: protocol.StartRoom | None = None  # None: something has changed since it was last asked for

    # What may be seen

    @property
    def up(self) -> bool:
        return self.node.up

    @property
    def fullness(self) -> float:
        """As of the node's last change of membership, like a view that was pushed."""
        if self._fullness is None:
            self._fullness = self.node.fullness
        return self._fullness

    @property
    def room(self) -> protocol.StartRoom:
        """As of then, too."""
        if self.known_room is None:
            self.known_room = self.node.admit.room_for_start()
        return self.known_room

    def view(self) -> protocol.NodeView:
        return answers.view_of(self.node, self.version, self.fullness, self.room)

    def open_instances(self, model: str) -> list[int]:
        found = self.node.instances.values()
        return [one.id for one in found if one.model == model and one.state is not State.CLOSING]

    def progress(self, request: int) -> int | None:
        """Tokens that the request has; None if it has left, which may not have been heard yet."""
        instance, work = self._places.get(request, (-1, None))
        return None if work is None else self.node.instances[instance].produced(work)

    def work_of(self, request: int) -> Work:
        return self._places[request][1]

    # Questions and orders

    def answer(self, question: protocol.Question, now: float, *, prepares: bool = False) -> protocol.Answer:
        """`prepares`: what is proposed has no turn before `prepared`."""
        if isinstance(question, protocol.Propose):
            return self._consider(question, now, prepares=prepares)
        if isinstance(question, protocol.Warm):
            return self._warm(question.model, now)
        if isinstance(question, protocol.Release):
            return self._release(question.request, now)
        if isinstance(question, protocol.TakeBack):
            return self._take_back(now)
        return answers.look(self.node, question, now)

    def obey(self, order: protocol.Order, now: float) -> None:
        if isinstance(order, protocol.Withdraw):
            self._withdraw(order, now)
        elif isinstance(order, protocol.CatchUp):
            self._catch_up(order, now)
        elif order.instance in self.node.instances:
            self.preempt(order.instance, order.reason, now)

    def prepared(self, request: int, now: float, *, is_there: bool = True) -> None:
        """What an accepted request waited for is there, or there is no memory for it: then it goes elsewhere."""
        instance, work = self._places[request]
        self.node.prepared(instance, work, now, is_there=is_there)
        if is_there:
            self._speech.enter(work, instance, now)
        self.changed(now)

    def _consider(self, question: protocol.Propose, now: float, *, prepares: bool) -> protocol.Answer:
        record = question.request
        if record.id in self._places:  # asked twice, or it was held and its migration has come to nothing
            instance, held = self._places[record.id]
            if held.hold == question.hold:
                return protocol.Accepted(instance)
            assert held.hold, f"request {record.id} runs here and is to be held here"
            self.withdraw(record.id, now)
        work = Work.of(record)
        work.prepares = prepares
        self.node.device.lengths.are_alike = question.are_alike
        work.reused = self.node.device.cached_tokens(question.instance, work)
        if question.hold:
            work.hold_for(question.hold, now + answers.load_s(self.node, question, now))
        answer: int | Refusal | None
        if question.instance is None:
            answer = self.node.start(work, now, reclaims=question.reclaims)
        else:
            answer = self.node.join(question.instance, work, now)
        if isinstance(answer, Refusal):
            if self.node.outbox:  # idle instances may have been closed in vain
                self.changed(now)
            return answers.refused(self.node, answer, work)
        instance = question.instance if answer is None else answer  # type: ignore[assignment]
        self._places[record.id] = instance, work
        self._speech.enter(work, instance, now)
        self.changed(now)
        return protocol.Accepted(instance)

    def _take_back(self, now: float) -> protocol.TookBack:
        found = answers.find_long_answer(self.node)
        return protocol.TookBack() if found is None else self._let_go(*found, now)

    def _release(self, request: int, now: float) -> protocol.TookBack:
        instance, work = self._places.get(request, (-1, None))
        return protocol.TookBack() if work is None or work.hold else self._let_go(instance, work, now)

    def _catch_up(self, order: protocol.CatchUp, now: float) -> None:
        instance, work = self._places.get(order.request.id, (-1, None))
        if work is None or work.hold != order.hold:
            return
        assert work.produced == order.known, f"{work.produced} tokens of request {work.id} are here, not {order.known}"
        self.node.catch_up(instance, work, order.request, now, is_last=order.is_last)
        self.changed(now)

    def _let_go(self, instance: int, work: Work, now: float) -> protocol.TookBack:
        hosting = self.node.instances[instance].hosting
        self.withdraw(work.id, now)
        work.cached = False
        work.moves += 1
        return protocol.TookBack(work.record(), instance, *answers.estimate(hosting.latency, work))

    def preempt(self, instance_id: int, reason: str, now: float) -> None:
        self.node.preempt(instance_id, reason)
        self.changed(now)

    def _withdraw(self, order: protocol.Withdraw, now: float) -> None:
        place = self._places.get(order.request)
        if place is not None and order.hold in (None, place[1].hold):
            self.withdraw(order.request, now)

    def withdraw(self, request: int, now: float) -> None:
        place = self._places.pop(request, None)
        if place is None:
            return  # it has ended or left by itself, and that was said
        instance, work = place
        self._speech.leave(work, instance, now)
        self.node.withdraw(instance, work, now)
        self.changed(now)

    # Models

    def offer(self, model: str, now: float) -> None:
        """The model's hosting is new or was replaced."""
        self._speech.note_hosting(model, now)
        self.node.rehost(model, now)
        self.mailbox.append(protocol.Offered(model, answers.offer_of(self.node, self.node.device.hostings[model])))
        self.changed(now)

    def _warm(self, model: str, now: float) -> protocol.Answer:
        there = self.open_instances(model)
        if there:
            return protocol.Accepted(there[0])
        answer = self.node.warm(model, now)
        if isinstance(answer, Refusal):
            return protocol.Refused(answer)
        self.mailbox.append(protocol.InstanceOpened(answer, model))
        self.changed(now)
        return protocol.Accepted(answer)

    def close_model(self, model: str, now: float) -> None:
        for instance in self.open_instances(model):
            self.preempt(instance, "unloaded", now)
        self.mailbox.append(protocol.NoLonger(model))

    def close_idle(self, now: float) -> int:
        """The host is short of memory: close the longest idle instance; returns how many were closed."""
        closed = self.node.close_idle()
        self.changed(now)
        return closed

    # Turns

    def next_turn(self, now: float) -> events.Turn | None:
        """Whose turn it is on a free device; None while it is busy, nobody can run, or the outbox comes first."""
        self.is_touched = False
        if self.node.turn is not None or not self.up:
            return None
        answers.ease_overdue(self.node, now, self.node.composition.lateness.overdue_s(now))
        turn = self.node.next_turn(now)
        if self.node.outbox:
            self.changed(now)
            self.is_touched = turn is None  # to be asked again when that is done
        if turn is not None:
            self._begin_turn(turn, now)
        elif not self.is_touched and self.node.device.turns.awaiting:
            self.gaps.rest()  # the device waits, which is nobody's overhead
        elif not self.is_touched:
            self._rest(now)
        return turn

    def interlude(self, now: float, is_layer_here: bool | None = None) -> events.Turn | None:
        """Whose turn is let in (`Node.interlude`): nobody's whose blocks are given back later and count as free."""
        leaving = {said.instance for said in self.outbox if isinstance(said, events.Leave)}
        if (turn := self.node.interlude(now, is_layer_here, leaving)) is not None:
            self._speech.note_turn(turn, now)
        return turn

    def _begin_turn(self, turn: events.Turn, now: float) -> None:
        self.gaps.begin(now)
        if self.is_idle:
            self._say_idle(False)
        self._speech.note_turn(turn, now)

    def _rest(self, now: float) -> None:
        """Nothing can run."""
        self._feedback.learn(now)
        self.gaps.rest()
        if not self.is_idle:
            self._say_idle(True)

    def _say_idle(self, is_idle: bool) -> None:
        self.is_idle = is_idle
        self.mailbox.append(protocol.Idle(is_idle))
        self._has_news()

    @property
    def is_settled(self) -> bool:
        """As things are, the turn under way is followed by its like: a bet for a driver that can begin ahead."""
        return (turn := self.node.turn) is not None and not turn.prompts and self.node.turns.has_only(turn.instance)

    def turn_ended(self, now: float, finished: Iterable[int], computed: events.Computed = events.AS_ASKED) -> None:
        """`finished` got their last token in it."""
        underway = self.node.device.turns.underway
        assert underway is not None, f"{self.name}: no turn under way"
        if computed.is_typical:
            self._feedback.observe(underway, computed, self.gaps.last_s, now, bool(self._speech.load_asked_s))
        self.gaps.ended_s = now
        if computed.extra:
            got_more(underway.turn.instance, computed.extra, now)
        done = self.node.turn_done(now, [self._places[id][1] for id in sorted(finished)], computed.by_request)
        self.mailbox.extend([protocol.Prefilled(work.id, work.grace_s) for work in done])
        if self.node.outbox:
            self.changed(now)
        elif done:
            self._has_news()

    # Memory

    def load_ended(self, instance_id: int, now: float) -> None:
        """Its weights are there. A cold start is what it takes to start, the loads before it included."""
        waited_s = now - self._speech.loaded(instance_id)
        works = self.node.instances[instance_id].works()
        self.node.load_done(instance_id, now, waited_s)
        for work in works:
            self._speech.enter(work, instance_id, now)
        self.changed(now)

    def load_failed(self, instance_id: int, now: float) -> None:
        self._speech.load_asked_s.pop(instance_id)
        self.node.load_failed(instance_id, now)
        self.changed(now)

    def resize_ended(self, instance_id: int, now: float) -> None:
        self.node.resize_done(instance_id, now)
        self.changed(now)

    def unload_ended(self, instance_id: int, now: float) -> None:
        self.node.unload_done(instance_id, now)
        self.changed(now)

    def timer(self, instance_id: int, epoch: int, now: float) -> None:
        self.node.timer(instance_id, epoch, now)
        self.changed(now)

    def fail(self) -> list[Work]:
        """The device is gone; returns the work that was on it."""
        self._speech.clear()
        self.gaps.rest()
        self._fullness = self.known_room = None
        self.is_idle = False
        return self.node.fail()

    # What the node says

    def start_log(self, device: str) -> None:
        self._speech.start_log(device)

    def changed(self, now: float) -> None:
        self._fullness = self.known_room = None
        self.version += 1
        self.is_touched = True
        self._has_news()
        self._speech.pass_on(now)

    def _has_news(self) -> None:
        if self._dirty is not None:
            self._dirty.append(self)
