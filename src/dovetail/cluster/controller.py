"""Where each request goes: ranks candidates on mirrored views and proposes; nodes accept or refuse (S9–S11).

A state machine like the node: requests, notices and retries come in with `now`, decisions go out through `outbox`.
It keeps every request that has no place and forgets one when it has ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.cluster.decisions import Decision, Dropped, How, Moving, Placed, Queued
from dovetail.node.events import Evicted, Finished, HandedOver, InstanceClosed, InstanceGone, Notice, Pausable, Victim
from dovetail.node.ports import NodeHandle
from dovetail.node.work import Phase, Work
from dovetail.policy.consolidate import rank_instances
from dovetail.policy.headroom import Refusal
from dovetail.policy.knobs import Knobs
from dovetail.policy.latency import GIB
from dovetail.policy.placement import DeviceKind, is_hopeless, rank_nodes

# Bounds on what one decision looks at, so that its time does not grow with the cluster.
MAX_CANDIDATES = 16  # nodes asked for a start, or where a preempted request could go
MAX_INSTANCES = 8  # instances of the model asked to take a request
MAX_VICTIMS = 4  # neighbours considered for giving way
MAX_RETURNS = 24  # instances asked, all in all, to take back swapped-out requests when one of their model is placed


@dataclass(slots=True, eq=False)
class InstanceView:
    """What the controller believes about an instance."""

    node: NodeHandle
    id: int
    model: str
    phase: Phase
    batch: int
    on_cpu: bool


class Controller:
    def __init__(self, nodes: Sequence[NodeHandle], knobs: Knobs, *, kv_bytes_per_s: float = 12.5e9) -> None:
        self.nodes = [node for node in nodes if knobs.use_cpu or node.kind is not DeviceKind.CPU]
        self.knobs = knobs
        self.outbox: list[Decision] = []
        self.queued: dict[int, Work] = {}  # without a place, by request id
        self.parked: dict[str, dict[int, Work]] = {}  # swapped out with headroom to spare, by model
        self._kv_bytes_per_s = kv_bytes_per_s
        self._instances: dict[tuple[str, int], InstanceView] = {}  # (node, instance)
        self._by_model: dict[str, list[InstanceView]] = defaultdict(list)  # open for more work
        self._turn_of: Counter[str] = Counter()  # round robin, by model
        self._refusals: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()  # queued requests by model
        self._cursor = 0  # where the next window of candidate nodes begins
        self._travelling: set[int] = set()  # handed over; they have not asked for a decode place yet

    # Requests

    def submit(self, work: Work, now: float) -> None:
        """A new request. It is placed at once or queued."""
        if self.knobs.disaggregate and work.phase is Phase.ANY:
            work.phase = Phase.PREFILL
        self._seek(work, now)

    def retry(self, work_id: int, now: float) -> None:
        """A queued request tries again, or is given up."""
        work = self._dequeue(work_id) or self._unpark(work_id)
        if work is None:
            return
        arrived = work_id in self._travelling
        self._travelling.discard(work_id)
        if not arrived and is_hopeless(work.due_s, now):  # one that has just come over is tried before it is given up
            self.outbox.append(Dropped(work, "deadline"))
        else:
            self._seek(work, now)

    def cancel(self, work_id: int) -> Work | None:
        """Nobody wants it any more; returns it if it was without a place."""
        return self._dequeue(work_id) or self._unpark(work_id)

    def left(self, node: NodeHandle, instance_id: int) -> None:
        """Work was withdrawn from an instance without a notice."""
        self._left(node, instance_id)

    def add_instance(self, node: NodeHandle, instance_id: int, model: str) -> None:
        """An instance that was started without work."""
        view = InstanceView(node, instance_id, model, Phase.ANY, 0, node.kind is DeviceKind.CPU)
        self._instances[node.name, instance_id] = view
        self._by_model[model].append(view)

    def _seek(self, work: Work, now: float) -> None:
        self._refusals.clear()
        placed = self._join(work, now) or self._preempt(work, now) or self._start(work, now)
        if placed is None and self.knobs.pause:
            placed = self._pause(work, now)
        if placed is not None:
            self.outbox.append(placed)
            self._reunite(work.model, now)
            return
        if self._refusals and set(self._refusals) == {Refusal.HARDWARE}:
            self.outbox.append(Dropped(work, "hardware"))
            return
        self._enqueue(work)
        retry_at_s = now + self.knobs.retry_s
        self.outbox.append(Queued(work, retry_at_s, dict(self._refusals)))

    def _enqueue(self, work: Work) -> None:
        self.queued[work.id] = work
        self._waiting[work.model] += 1

    def _dequeue(self, work_id: int) -> Work | None:
        work = self.queued.pop(work_id, None)
        if work is not None:
            self._waiting[work.model] -= 1
            if not self._waiting[work.model]:
                del self._waiting[work.model]
        return work

    # The steps of placement

    def _join(self, work: Work, now: float) -> Placed | None:
        for view in self._candidates(work):
            refusal = view.node.join(view.id, work, now)
            if refusal is None:
                view.batch += 1
                return Placed(work, view.node.name, view.id, How.JOIN)
            self._refusals[refusal] += 1
        return None

    def _candidates(self, work: Work) -> list[InstanceView]:
        views = [view for view in self._by_model[work.model] if view.phase is work.phase]
        if not self.knobs.round_robin or len(views) < 2:
            return rank_instances(views, reactive=self.knobs.reactive)[:MAX_INSTANCES]
        turn = self._turn_of[work.model] % len(views)
        self._turn_of[work.model] += 1
        return views[turn:] + views[:turn]

    def _preempt(self, work: Work, now: float) -> Placed | None:
        """S9: make room for an instance of the model by moving a smaller neighbour's requests elsewhere."""
        if not self.knobs.proactive or self.knobs.disaggregate:
            return None
        considered = 0
        for view in self._candidates(work):
            if considered >= MAX_VICTIMS:
                return None
            for victim in view.node.victims_for(view.id, work, now):
                considered += 1
                can_wait = self._can_wait(victim)
                if not can_wait and not self._can_move(victim, view.node, now):
                    continue
                view.node.preempt(victim.instance, "paused" if can_wait else "preempted")
                self._forget(view.node, victim.instance)
                if view.node.join(view.id, work, now) is None:
                    view.batch += 1
                    return Placed(work, view.node.name, view.id, How.PREEMPT)
                return None
        return None

    def _can_wait(self, victim: Victim) -> bool:
        """Its requests are so far ahead that they may be swapped out for a while."""
        knobs = self.knobs
        if not knobs.pause or victim.headroom_s < knobs.pause_headroom_s:
            return False
        return len(self.parked) < knobs.pause_models and len(victim.works) <= knobs.pause_batch

    def _can_move(self, victim: Victim, source: NodeHandle, now: float) -> bool:
        """Every request of the victim would be accepted somewhere else."""
        return all(self._has_other_place(work, source, now) for work in victim.works)

    def _has_other_place(self, work: Work, source: NodeHandle, now: float) -> bool:
        for view in self._by_model[work.model][:MAX_INSTANCES]:
            if view.node is not source and view.node.check_join(view.id, work, now) is None:
                return True
        return any(node is not source and node.check_start(work, now) is None for node in self._window())

    def _start(self, work: Work, now: float) -> Placed | None:
        for node in rank_nodes(self._window(), pack=self.knobs.reactive):
            placed = self._start_on(node, work, now, How.START)
            if placed is not None:
                return placed
        return None

    def _window(self) -> Sequence[NodeHandle]:
        """All nodes of a small cluster; of a large one some from all over it, others with every call."""
        count = len(self.nodes)
        if count <= MAX_CANDIDATES:
            return self.nodes
        self._cursor = start = (self._cursor + 1) % count
        stride = count // MAX_CANDIDATES
        return [self.nodes[(start + step * stride) % count] for step in range(MAX_CANDIDATES)]

    def _start_on(self, node: NodeHandle, work: Work, now: float, how: How) -> Placed | None:
        answer = node.start(work, now)
        if isinstance(answer, Refusal):
            self._refusals[answer] += 1
            return None
        view = InstanceView(node, answer, work.model, work.phase, 1, node.kind is DeviceKind.CPU)
        self._instances[(node.name, answer)] = view
        self._by_model[work.model].append(view)
        return Placed(work, node.name, answer, how)

    def _pause(self, work: Work, now: float) -> Placed | None:
        """Swap out the instance with the longest headroom, if that makes room for an instance of the work's model."""
        if len(self.parked) >= self.knobs.pause_models:
            return None
        urgent = work.due_s - now <= self.knobs.pause_last_s
        demand = 1 + self._waiting[work.model]
        best: tuple[float, NodeHandle, int] | None = None
        for node in self._window():
            if node.kind is DeviceKind.GPU:
                for option in node.pausable_for(work, now):
                    if self._pays(option, demand, urgent) and (best is None or option.headroom_s > best[0]):
                        best = (option.headroom_s, node, option.instance)
        if best is None:
            return None
        _, node, instance = best
        node.preempt(instance, "paused")
        self._forget(node, instance)
        return self._start_on(node, work, now, How.PAUSE)

    def _pays(self, option: Pausable, demand: int, urgent: bool) -> bool:
        """A swap costs two loads: it pays for a larger batch, or at the last moment for light weights."""
        light = option.weight_bytes <= self.knobs.pause_weights_gib * GIB
        return option.batch < demand or (light and urgent)

    # What nodes report

    def notice(self, node: NodeHandle, notice: Notice, now: float) -> None:
        if isinstance(notice, Finished):
            self._left(node, notice.instance)
        elif isinstance(notice, Evicted):
            self._left(node, notice.instance)
            notice.work.cached = False
            if notice.reason == "paused":
                self._park(notice.work, now)
            elif notice.reason == "kv_short":  # at once it would only come back to where it did not fit
                self._enqueue(notice.work)
                self.outbox.append(Moving(notice.work, now + self.knobs.retry_s, notice.reason))
            else:
                self._seek(notice.work, now)
        elif isinstance(notice, HandedOver):
            self._left(node, notice.instance)
            self._hand_over(notice, now)
        elif isinstance(notice, InstanceClosed | InstanceGone):
            self._forget(node, notice.instance)
            if self.parked and isinstance(notice, InstanceGone):
                self._resume(now)

    # Paused work

    def _park(self, work: Work, now: float) -> None:
        retry_at_s = max(now, work.due_s - self.knobs.pause_lead_s)
        self.parked.setdefault(work.model, {})[work.id] = work
        self.outbox.append(Moving(work, retry_at_s, "paused"))

    def _unpark(self, work_id: int) -> Work | None:
        for model, works in self.parked.items():
            work = works.pop(work_id, None)
            if work is not None:
                if not works:
                    del self.parked[model]
                return work
        return None

    def _reunite(self, model: str, now: float) -> None:
        """An instance of the model takes work again: those swapped out come back to it."""
        works = self.parked.get(model)
        if works is None:
            return
        asked = 0
        for work in sorted(works.values(), key=lambda one: (one.due_s, one.id)):
            asked += min(len(self._by_model[model]), MAX_INSTANCES)
            if asked > MAX_RETURNS:
                break  # the others come with the next one, or when they are due
            placed = self._join(work, now)
            if placed is not None:
                self.outbox.append(placed)
                del works[work.id]
        if not works:
            del self.parked[model]

    def _resume(self, now: float) -> None:
        """Memory is free: the swapped-out model that is due first comes back, unless someone waits more urgently."""
        work = min((w for works in self.parked.values() for w in works.values()), key=lambda one: (one.due_s, one.id))
        if any(other.due_s < work.due_s for other in self.queued.values()):
            return
        placed = self._join(work, now) or self._start(work, now)
        if placed is not None:
            self._unpark(work.id)
            self.outbox.append(placed)
            self._reunite(work.model, now)

    def lost(self, node: NodeHandle, works: Sequence[Work], now: float) -> None:
        """The node is gone; its unfinished requests start over elsewhere, with the tokens they have."""
        for key in [key for key in self._instances if key[0] == node.name]:
            self._forget(node, key[1])
        for work in works:
            work.cached = False
            work.moves += 1
            if self.knobs.disaggregate:
                work.phase = Phase.PREFILL
            self._seek(work, now)

    def _hand_over(self, notice: HandedOver, now: float) -> None:
        work = notice.work
        travel_s = notice.kv_bytes / self._kv_bytes_per_s
        work.phase = Phase.DECODE
        work.cached = True
        work.give_grace(travel_s)
        self._enqueue(work)
        self._travelling.add(work.id)
        self.outbox.append(Moving(work, now + travel_s, "handover"))

    def _left(self, node: NodeHandle, instance_id: int) -> None:
        view = self._instances.get((node.name, instance_id))
        if view is not None:
            view.batch -= 1

    def _forget(self, node: NodeHandle, instance_id: int) -> None:
        view = self._instances.pop((node.name, instance_id), None)
        if view is not None:
            self._by_model[view.model].remove(view)
