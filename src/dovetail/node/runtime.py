"""One device while it runs: answers what it is asked, says what becomes of its requests, learns from what turns take.

A state machine: questions, orders and events come in with `now`. What its driver carries out collects in `outbox`, what
whoever placed the requests should hear in `mailbox`. A node that may have something to say notes itself in `dirty`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict

from dovetail.eventlog import EventLog
from dovetail.node import answers, events, protocol
from dovetail.node.feedback import LatencyFeedback, Observation
from dovetail.node.instance import State
from dovetail.node.node import Node
from dovetail.node.speech import Speech
from dovetail.node.work import Work
from dovetail.policy.headroom import Refusal
from dovetail.profiles.files import hosting_values
from dovetail.profiles.live import LiveLatency

OVERDUE_S = 1.0
USUAL_TOKENS = 1024  # of a context, where a request is not known yet
KEPT_GAPS = 4096  # of which the distribution of turn overhead is told


class NodeRuntime:
    def __init__(self, node: Node, dirty: list[NodeRuntime] | None = None, log: EventLog | None = None) -> None:
        self.node = node
        self.name = node.name
        self.kind = node.kind
        self._speech = Speech(node, log)
        self.outbox = self._speech.outbox
        self.mailbox = self._speech.mailbox
        self.version = 0  # of its view: counts changes
        self.is_touched = False  # something happened since its turn was last chosen
        self.gaps: deque[float] = deque(maxlen=KEPT_GAPS)  # seconds between the ends and starts of turns
        self.gap_s = 0.0  # before the turn that runs or ran last
        self._dirty = dirty
        self._log = log
        self._feedback = LatencyFeedback(log)
        self._places = self._speech.places
        self._last_end_s: float | None = None  # of a turn; None = the device was idle since
        self.is_idle = False  # nothing can run, as it was last said
        self._fullness: float | None = None

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

    def view(self) -> protocol.NodeView:
        ledger = self.node.residency.ledger
        instances = tuple(
            protocol.InstanceView(one.id, one.model, one.phase, one.batch, one.state is State.READY)
            for one in self.node.instances.values()
            if one.state is not State.CLOSING
        )
        return protocol.NodeView(
            self.version, self.kind, self.node.in_use, self.fullness, ledger.capacity, ledger.available, instances
        )

    def offer_of(self, model: str) -> protocol.Offered:
        hosting = self.node.admit.hostings[model]
        room_tokens = self.node.admit.most_tokens(hosting) - hosting.block_tokens
        weight_bytes = 0 if hosting.weights_in_place else hosting.weight_bytes
        return protocol.Offered(model, room_tokens, weight_bytes, hosting.latency.decode_s(1, USUAL_TOKENS))

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

    def answer(self, question: protocol.Question, now: float) -> protocol.Answer:
        if isinstance(question, protocol.Propose):
            return self._consider(question, now)
        if isinstance(question, protocol.Warm):
            return self._warm(question.model, now)
        if isinstance(question, protocol.Check):
            return answers.check(self.node, question, now)
        if isinstance(question, protocol.FindVictims):
            return answers.find_victims(self.node, question, now)
        if isinstance(question, protocol.FindPausable):
            return answers.find_pausable(self.node, question, now)
        if isinstance(question, protocol.Ease):
            return answers.ease(self.node, question, now)
        if isinstance(question, protocol.Release):
            return self._release(question.request, now)
        return self._take_back(now)

    def obey(self, order: protocol.Order, now: float) -> None:
        if isinstance(order, protocol.Withdraw):
            self._withdraw(order, now)
        elif isinstance(order, protocol.CatchUp):
            self._catch_up(order, now)
        elif order.instance in self.node.instances:
            self.preempt(order.instance, order.reason, now)

    def _consider(self, question: protocol.Propose, now: float) -> protocol.Answer:
        record = question.request
        if record.id in self._places:  # asked twice, or it was held and its migration has come to nothing
            instance, held = self._places[record.id]
            if held.hold == question.hold:
                return protocol.Accepted(instance)
            assert held.hold, f"request {record.id} runs here and is to be held here"
            self.withdraw(record.id, now)
        work = Work.of(record)
        if question.hold:
            work.hold_for(question.hold, now)
        answer: int | Refusal | None
        if question.instance is None:
            answer = self.node.start(work, now)
        else:
            answer = self.node.join(question.instance, work, now)
        if isinstance(answer, Refusal):
            if self.node.outbox:  # idle instances may have been closed in vain
                self.changed(now)
            return answers.refused(self.node, answer, work)
        found = question.instance if answer is None else answer
        assert found is not None
        instance = found
        self._places[record.id] = instance, work
        self._speech.enter(work, instance, now)
        self.changed(now)
        return protocol.Accepted(instance)

    def _take_back(self, now: float) -> protocol.TookBack:
        found = answers.find_long_answer(self.node)
        if found is None:
            return protocol.TookBack()
        return self._let_go(*found, now)

    def _release(self, request: int, now: float) -> protocol.TookBack:
        instance, work = self._places.get(request, (-1, None))
        if work is None or work.hold:
            return protocol.TookBack()
        return self._let_go(instance, work, now)

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
        if self._log is not None:
            self._log.write(now, "hosting", model=model, **hosting_values(self.node.admit.hostings[model]))
        self.node.rehost(model, now)
        self.mailbox.append(self.offer_of(model))
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
        """Whose turn it is on a free device; None while the device is busy, nobody can run, or there is something in
        the outbox to be done before anybody can."""
        self.is_touched = False
        if self.node.turn is not None or not self.up:
            return None
        if self.node.knobs.extend_deadlines:
            self._ease_overdue(now)
        turn = self.node.next_turn(now)
        if self.node.outbox:
            self.changed(now)
            self.is_touched = turn is None  # to be asked again when that is done
        if turn is not None:
            self._begin_turn(turn, now)
        elif not self.is_touched:
            self._rest(now)
        return turn

    def _begin_turn(self, turn: events.Turn, now: float) -> None:
        self.gap_s = 0.0
        if self._last_end_s is not None:
            self.gap_s = now - self._last_end_s
            self.gaps.append(self.gap_s)
        if self.is_idle:
            self._say_idle(False)
        if self._log is not None and self._log.is_detailed:
            requests = list(turn.instance.running) if turn.prefill is None else [turn.prefill.id]
            kind = "decode" if turn.prefill is None else "prefill"
            self._log.write(now, kind, node=self.name, instance=turn.instance.id, requests=requests)

    def _rest(self, now: float) -> None:
        """Nothing can run."""
        self._feedback.learn(now)
        self._last_end_s = None
        if not self.is_idle:
            self._say_idle(True)

    def _say_idle(self, is_idle: bool) -> None:
        self.is_idle = is_idle
        self.mailbox.append(protocol.Idle(is_idle))
        if self._dirty is not None:
            self._dirty.append(self)

    def _ease_overdue(self, now: float) -> None:
        """Deadlines far in the past say nothing about who is urgent: those who did not ask for targets get new ones."""
        overdue_s = now - OVERDUE_S
        if any(one.deadline_s < overdue_s and one.can_run for one in self.node.instances.values()):
            answers.ease_everyone(self.node, now, 0.0)

    @property
    def is_settled(self) -> bool:
        """Nobody else wants the device: as things are, those whose turn it is decode again after it. A bet for a driver
        that can begin before it is told to; what it was told stays what counts."""
        turn = self.node.turn
        return turn is not None and turn.prefill is None and self.node.has_only(turn.instance)

    def turn_ended(
        self, now: float, finished: Iterable[int], *, is_whole: bool = True, was_ahead: bool = False
    ) -> None:
        """`finished` got their last token in it. `is_whole`: all of it was computed; a prompt that was partly in the
        cache teaches nothing. `was_ahead`: the device began with it when the turn before had ended."""
        turn = self.node.turn
        assert turn is not None, f"{self.name}: no turn under way"
        latency = turn.instance.hosting.latency
        if turn.prefill is not None and (turn.prefill.hold or turn.prefill.computed):
            is_whole = False  # the last token of one that is held is computed when it goes on
        if is_whole and isinstance(latency, LiveLatency):
            self._observe(turn, latency, now, self.gap_s if was_ahead else 0.0)
        self._last_end_s = now
        self.node.turn_done(now, [self._places[id][1] for id in sorted(finished)])
        if turn.prefill is not None and not turn.prefill.hold:
            self.mailbox.append(protocol.Prefilled(turn.prefill.id, turn.prefill.grace_s))
        if self.node.outbox:
            self.changed(now)
        elif turn.prefill is not None and self._dirty is not None:
            self._dirty.append(self)

    def _observe(self, turn: events.Turn, latency: LiveLatency, now: float, ahead_s: float) -> None:
        instance, prefill = turn
        batch, tokens = len(instance.running), instance.tokens
        if prefill is not None:
            batch, tokens = 0, prefill.known_tokens
        elif not batch:
            return  # everyone left during the turn
        took_s = now - self.node.turn_started_s + ahead_s
        self._feedback.add(
            Observation(latency, batch, tokens, took_s, self.gap_s, bool(self._speech.load_asked_s)), now
        )

    # Memory

    def load_ended(self, instance_id: int, now: float) -> None:
        """Its weights are there: whoever has waited for them enters. A cold start is what it takes to start, the loads
        before it included."""
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
        self._last_end_s = self._fullness = None
        self.is_idle = False
        return self.node.fail()

    # What the node says

    def start_log(self, device: str) -> None:
        """First line of a real node's log: what a simulation of the same node needs. Its models follow as they come."""
        if self._log is not None:
            memory_bytes = self.node.residency.ledger.capacity
            knobs = asdict(self.node.knobs)
            self._log.header(real=True, node=self.name, device=device, memory_bytes=memory_bytes, knobs=knobs)

    def changed(self, now: float) -> None:
        self._fullness = None
        self.version += 1
        self.is_touched = True
        if self._dirty is not None:
            self._dirty.append(self)
        self._speech.pass_on(now)
