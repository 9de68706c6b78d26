"""One device while it runs: its node, what its turns and loads took, what it learns from that.

The node's own handle for the controller in the same process. Events come in with `now`; what the node says collects in
`node.outbox`, and a node that may have something to say notes itself in `dirty`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dovetail.eventlog import EventLog
from dovetail.node.events import Pausable, Turn, Victim
from dovetail.node.feedback import LatencyFeedback, Observation
from dovetail.node.instance import State
from dovetail.node.node import Node
from dovetail.node.work import SLACK, Work
from dovetail.policy.fairness import Running, who_gives_way
from dovetail.policy.headroom import Refusal
from dovetail.policy.placement import Hosting
from dovetail.profiles.live import LiveLatency

OVERDUE_S = 1.0
KEPT_GAPS = 4096  # of which the distribution of turn overhead is told


class NodeRuntime:
    def __init__(self, node: Node, dirty: list[NodeRuntime], log: EventLog | None = None) -> None:
        self.node = node
        self.name = node.name
        self.kind = node.kind
        self.gaps: deque[float] = deque(maxlen=KEPT_GAPS)  # seconds between the ends and starts of turns
        self.gap_s = 0.0  # before the turn that runs or ran last
        self.lag_s = 0.0  # what the node says reaches the controller this late
        self.said_s = 0.0  # when the last of it does
        self._dirty = dirty
        self._feedback = LatencyFeedback(log)
        self._last_end_s: float | None = None  # of a turn; None = the device was idle since
        self._load_asked_s: dict[int, float] = {}  # by instance: since when its weights are awaited
        self._loaded: set[int] = set()
        self._fullness: float | None = None

    # What the controller sees and proposes

    @property
    def up(self) -> bool:
        return self.node.up

    @property
    def in_use(self) -> bool:
        return self.node.in_use

    @property
    def fullness(self) -> float:
        """As of the node's last change of membership, like a view mirrored from reports."""
        if self._fullness is None:
            self._fullness = self.node.fullness
        return self._fullness

    @property
    def free_bytes(self) -> int:
        return self.node.residency.ledger.available

    def hosting_of(self, model: str) -> Hosting | None:
        return self.node.admit.hostings.get(model)

    def room_for(self, model: str) -> int:
        """Tokens that one request of the model may have, had it the node to itself."""
        hosting = self.node.admit.hostings[model]
        return self.node.admit.most_tokens(hosting) - hosting.block_tokens

    def open_instances(self, model: str) -> list[int]:
        found = self.node.instances.values()
        return [one.id for one in found if one.model == model and one.state is not State.CLOSING]

    def check_join(self, instance_id: int, work: Work, now: float) -> Refusal | None:
        return self.node.check_join(instance_id, work, now)

    def check_start(self, work: Work, now: float) -> Refusal | None:
        return self.node.check_start(work, now)

    def victims_for(self, instance_id: int, work: Work, now: float) -> list[Victim]:
        return self.node.victims_for(instance_id, work, now)

    def pausable_for(self, work: Work, now: float) -> list[Pausable]:
        return self.node.pausable_for(work, now)

    def join(self, instance_id: int, work: Work, now: float) -> Refusal | None:
        answer = self.node.join(instance_id, work, now)
        if answer is None:
            self.changed()
        return answer

    def start(self, work: Work, now: float) -> int | Refusal:
        answer = self.node.start(work, now)
        if self.node.outbox or not isinstance(answer, Refusal):  # idle instances may have been closed in vain
            self.changed()
        return answer

    def preempt(self, instance_id: int, reason: str) -> None:
        self.node.preempt(instance_id, reason)
        self.changed()

    def gives_way(self) -> tuple[int, Work] | None:
        places = {work.id: (one, work) for one in self.node.instances.values() for work in one.running.values()}
        running = [Running(w.id, w.group, one.produced(w), w.is_strict) for one, w in places.values()]
        found = who_gives_way(running)
        return None if found is None else (places[found][0].id, places[found][1])

    def ease(self, work: Work, now: float) -> None:
        own_s = self.node.admit.hostings[work.model].latency.decode_s(1, work.known_tokens)
        pace_s = self._ease(now, own_s * self.node.admit.overestimate)
        work.tpot_s = max(work.tpot_s, pace_s)

    def ease_overdue(self, now: float) -> None:
        """Deadlines far in the past say nothing about who is urgent: those who did not ask for targets get new ones."""
        overdue_s = now - OVERDUE_S
        if any(one.deadline_s < overdue_s and one.can_run for one in self.node.instances.values()):
            self._ease(now, 0.0)

    def _ease(self, now: float, extra_s: float) -> float:
        """A pace that leaves time for an iteration of every instance and for something more. Returns that pace."""
        instances = self.node.instances.values()
        pace_s = SLACK * (sum(one.decode_s() for one in instances) + extra_s)
        for instance in instances:
            for one in instance.works():
                is_overdue = instance.due_s(one) < now
                if not one.is_strict and (is_overdue or one.tpot_s < pace_s):
                    one.slow_down(now, max(one.tpot_s, pace_s), instance.produced(one))
            instance.waiting.sort(key=lambda one: (one.due_s, one.id))
            instance.refresh()
        return pace_s

    def changed(self) -> None:
        self._fullness = None
        self._dirty.append(self)

    def holds(self, instance_id: int, work: Work) -> bool:
        instance = self.node.instances.get(instance_id)
        return instance is not None and work.id in instance.running

    def is_loaded(self, instance_id: int) -> bool:
        """Its weights are on the device, though it may be closing."""
        if instance_id in self._loaded:
            return True
        instance = self.node.instances.get(instance_id)
        return instance is not None and instance.hosting.weights_in_place

    # Turns

    def next_turn(self, now: float) -> Turn | None:
        turn = self.node.next_turn(now)
        if self.node.outbox:
            self.changed()
        if turn is not None:
            self.gap_s = 0.0
            if self._last_end_s is not None:
                self.gap_s = now - self._last_end_s
                self.gaps.append(self.gap_s)
        return turn

    def rest(self, now: float) -> None:
        """Nothing can run."""
        self._feedback.learn(now)
        self._last_end_s = None

    def turn_ended(self, now: float, finished: Sequence[Work], *, is_whole: bool = True) -> Turn:
        """`is_whole`: all of it was computed; a prompt that was partly in the cache teaches nothing."""
        turn = self.node.turn
        assert turn is not None, f"{self.name}: no turn under way"
        latency = turn.instance.hosting.latency
        if is_whole and isinstance(latency, LiveLatency):
            self._observe(turn, latency, now)
        self._last_end_s = now
        self.node.turn_done(now, finished)
        if self.node.outbox:
            self.changed()
        return turn

    def _observe(self, turn: Turn, latency: LiveLatency, now: float) -> None:
        instance, prefill = turn
        batch, tokens = len(instance.running), instance.tokens
        if prefill is not None:
            batch, tokens = 0, prefill.known_tokens
        elif not batch:
            return  # everyone left during the turn
        took_s = now - self.node.turn_started_s
        self._feedback.add(Observation(latency, batch, tokens, took_s, self.gap_s, bool(self._load_asked_s)), now)

    # Memory

    def load_started(self, instance_id: int, now: float) -> None:
        self._load_asked_s[instance_id] = now

    def load_ended(self, instance_id: int, now: float) -> list[Work]:
        """Its weights are there; returns the work that has waited for them. A cold start is what it takes to start, the
        loads before it included."""
        waited_s = now - self._load_asked_s.pop(instance_id)
        works = self.node.instances[instance_id].works()
        self._loaded.add(instance_id)
        self.node.load_done(instance_id, now, waited_s)
        self.changed()
        return works

    def unload_started(self, instance_id: int) -> None:
        self._loaded.discard(instance_id)

    def load_failed(self, instance_id: int, now: float) -> None:
        del self._load_asked_s[instance_id]
        self.node.load_failed(instance_id, now)
        self.changed()

    def resize_ended(self, instance_id: int, now: float) -> None:
        self.node.resize_done(instance_id, now)
        self.changed()

    def unload_ended(self, instance_id: int, now: float) -> None:
        self.node.unload_done(instance_id, now)
        self.changed()

    def timer(self, instance_id: int, epoch: int, now: float) -> None:
        self.node.timer(instance_id, epoch, now)
        self.changed()

    def withdraw(self, instance_id: int, work: Work, now: float) -> None:
        self.node.withdraw(instance_id, work, now)
        self.changed()

    def fail(self) -> list[Work]:
        """The device is gone; returns the work that was on it."""
        self._load_asked_s.clear()
        self._loaded.clear()
        self._last_end_s = None
        self._fullness = None
        return self.node.fail()
