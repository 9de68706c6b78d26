"""The steps of placement: join an instance, preempt a neighbour, start an instance, swap one out (S9–S11).

Ranks candidates on mirrored views and proposes; nodes accept or refuse. Who asks, and when again, is `controller`'s.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dovetail.cluster.decisions import How, Placed
from dovetail.node.events import Pausable, Victim
from dovetail.node.ports import NodeHandle
from dovetail.node.work import Phase, Work
from dovetail.policy.consolidate import rank_instances
from dovetail.policy.headroom import Refusal
from dovetail.policy.knobs import Admission, Knobs
from dovetail.policy.latency import GIB
from dovetail.policy.placement import DeviceKind, rank_nodes

# Bounds on what one decision looks at, so that its time does not grow with the cluster.
MAX_LOOKS = 64  # nodes looked at, by what is known of them
MAX_CANDIDATES = 16  # of these: nodes asked for a start, or where a preempted request could go
MAX_INSTANCES = 4  # instances of the model asked to take a request
MAX_MOVES = 8  # nodes and instances asked, all in all, whether they would take what gives way to a request
MAX_VICTIMS = 2  # neighbours considered for giving way


@dataclass(slots=True, eq=False)
class InstanceView:
    """What the controller believes about an instance."""

    node: NodeHandle
    id: int
    model: str
    phase: Phase
    batch: int
    on_cpu: bool


class Placer:
    def __init__(self, nodes: Sequence[NodeHandle], knobs: Knobs) -> None:
        self.nodes = [node for node in nodes if knobs.use_cpu or node.kind is not DeviceKind.CPU]
        self.knobs = knobs
        self.refusals: Counter[str] = Counter()  # since `seek` or `come_back` was called
        self._instances: dict[tuple[str, int], InstanceView] = {}  # (node, instance)
        self._by_model: dict[str, list[InstanceView]] = defaultdict(list)  # open for more work
        self._turn_of: Counter[str] = Counter()  # round robin, by model
        self._avoided: Collection[str] = ()  # nodes that this decision leaves alone
        self._asked = 0  # nodes, in this decision, whether they would take what gives way
        self._cursor = 0  # where the next window of candidate nodes begins

    def seek(
        self, work: Work, now: float, *, demand: int, num_parked: int, avoided: Collection[str] = ()
    ) -> Placed | None:
        """`demand` requests of its model are without a place, `num_parked` models are swapped out, the nodes `avoided`
        owe what they have to others."""
        self.refusals.clear()
        self._avoided = avoided
        may_pause = self.knobs.pause and num_parked < self.knobs.pause_models
        placed = self.join(work, now) or self._preempt(work, now, may_pause) or self._start(work, now)
        if placed is None and may_pause:
            placed = self._pause(work, now, demand)
        self._avoided = ()
        return placed

    def come_back(self, work: Work, now: float) -> Placed | None:
        """A place for swapped-out work, without making room for it."""
        self.refusals.clear()
        return self.join(work, now) or self._start(work, now)

    def num_open(self, model: str) -> int:
        """Instances of the model that take work."""
        return len(self._by_model[model])

    # What is believed of instances

    def add_instance(self, node: NodeHandle, instance_id: int, model: str, phase: Phase, batch: int) -> None:
        view = InstanceView(node, instance_id, model, phase, batch, node.kind is DeviceKind.CPU)
        self._instances[node.name, instance_id] = view
        self._by_model[model].append(view)

    def left(self, node: NodeHandle, instance_id: int) -> None:
        """Work has left the instance."""
        view = self._instances.get((node.name, instance_id))
        if view is not None:
            view.batch -= 1

    def forget(self, node: NodeHandle, instance_id: int) -> None:
        """The instance takes no more work."""
        view = self._instances.pop((node.name, instance_id), None)
        if view is not None:
            self._by_model[view.model].remove(view)

    def forget_node(self, node: NodeHandle) -> None:
        for name, instance_id in list(self._instances):
            if name == node.name:
                self.forget(node, instance_id)

    # The steps of placement

    def join(self, work: Work, now: float) -> Placed | None:
        for view in self._candidates(work):
            if view.node.name in self._avoided:
                self.refusals[Refusal.MEMORY] += 1
                continue
            refusal = view.node.join(view.id, work, now)
            if refusal is None:
                view.batch += 1
                return Placed(work, view.node.name, view.id, How.JOIN)
            self.refusals[refusal] += 1
        return None

    def _candidates(self, work: Work) -> list[InstanceView]:
        views = [view for view in self._by_model[work.model] if view.phase is work.phase]
        if not self.knobs.round_robin or len(views) < 2:
            return rank_instances(views, reactive=self.knobs.reactive)[:MAX_INSTANCES]
        turn = self._turn_of[work.model] % len(views)
        self._turn_of[work.model] += 1
        return views[turn:] + views[:turn]

    def _preempt(self, work: Work, now: float, may_pause: bool) -> Placed | None:
        """S9: make room for an instance of the model by moving a smaller neighbour's requests elsewhere."""
        if not self.knobs.proactive or self.knobs.disaggregate:
            return None
        considered = self._asked = 0
        for view in self._candidates(work):
            if considered >= MAX_VICTIMS:
                return None
            if view.node.name in self._avoided:
                continue
            for victim in view.node.victims_for(view.id, work, now):
                considered += 1
                can_wait = may_pause and self._can_wait(victim)
                if not can_wait and not self._can_move(victim, view.node, now):
                    continue
                view.node.preempt(victim.instance, "paused" if can_wait else "preempted")
                self.forget(view.node, victim.instance)
                if view.node.join(view.id, work, now) is None:
                    view.batch += 1
                    return Placed(work, view.node.name, view.id, How.PREEMPT)
                return None
        return None

    def _can_wait(self, victim: Victim) -> bool:
        """Its requests are so far ahead that they may be swapped out for a while."""
        return victim.headroom_s >= self.knobs.pause_headroom_s and len(victim.works) <= self.knobs.pause_batch

    def has_other_place(self, work: Work, source: NodeHandle, now: float) -> bool:
        """Somebody else would accept it."""
        self._asked = 0
        return self._has_other_place(work, {source.name}, now)

    def _can_move(self, victim: Victim, source: NodeHandle, now: float) -> bool:
        """Every request of the victim would be accepted somewhere else, each on a node of its own: that a node accepts
        one of them says nothing about the next."""
        taken = {source.name}
        return all(self._has_other_place(work, taken, now) for work in victim.works)

    def _has_other_place(self, work: Work, taken: set[str], now: float) -> bool:
        """On a node that is not taken; that node is taken then."""
        for view in self._by_model[work.model][:MAX_INSTANCES]:
            node = view.node
            if node.name not in taken and self._may_ask() and node.check_join(view.id, work, now) is None:
                taken.add(node.name)
                return True
        for node in self._window(work):
            if node.name not in taken and self._may_ask() and node.check_start(work, now) is None:
                taken.add(node.name)
                return True
        return False

    def _may_ask(self) -> bool:
        self._asked += 1
        return self._asked <= MAX_MOVES

    def _start(self, work: Work, now: float) -> Placed | None:
        for node in rank_nodes(self._window(work), pack=self.knobs.reactive):
            placed = self._start_on(node, work, now, How.START)
            if placed is not None:
                return placed
        return None

    def _window(self, work: Work) -> Sequence[NodeHandle]:
        """All nodes of a small cluster; of a large one some from all over it that seem to have room for an instance,
        others with every call."""
        count = len(self.nodes)
        if count <= MAX_CANDIDATES:
            return self.nodes
        self._cursor = start = (self._cursor + 1) % count
        looks = min(count, MAX_LOOKS)
        seen = [self.nodes[(start + step * count // looks) % count] for step in range(looks)]
        if self.knobs.admission is Admission.SHADOW:
            decodes_s: dict[int, float] = {}
            seen = [node for node in seen if self._has_room(node, work, decodes_s)] or seen
        return seen[:: -(len(seen) // -MAX_CANDIDATES)]

    def _has_room(self, node: NodeHandle, work: Work, decodes_s: dict[int, float]) -> bool:
        """By what is known of it: a CPU's fullness is what an iteration of everybody takes there. `decodes_s` is by
        hosting, for the length of one decision."""
        hosting = node.hosting_of(work.model)
        if hosting is None or not node.up:
            return False
        if not hosting.weights_in_place and hosting.weight_bytes > node.free_bytes and not self.knobs.reclaim_idle:
            return False
        if node.kind is not DeviceKind.CPU:
            return True
        decode_s = decodes_s.get(id(hosting))
        if decode_s is None:
            decode_s = decodes_s[id(hosting)] = hosting.latency.decode_s(1, work.known_tokens)
        return node.fullness + decode_s <= work.tpot_s

    def _start_on(self, node: NodeHandle, work: Work, now: float, how: How) -> Placed | None:
        answer = Refusal.MEMORY if node.name in self._avoided else node.start(work, now)
        if isinstance(answer, Refusal):
            self.refusals[answer] += 1
            return None
        self.add_instance(node, answer, work.model, work.phase, batch=1)
        return Placed(work, node.name, answer, how)

    def _pause(self, work: Work, now: float, demand: int) -> Placed | None:
        """Swap out the instance with the longest headroom, if that makes room for an instance of the work's model."""
        urgent = work.due_s - now <= self.knobs.pause_last_s
        best: tuple[float, NodeHandle, int] | None = None
        for node in self._window(work):
            if node.kind is DeviceKind.GPU:
                for option in node.pausable_for(work, now):
                    if self._pays(option, demand, urgent) and (best is None or option.headroom_s > best[0]):
                        best = (option.headroom_s, node, option.instance)
        if best is None:
            return None
        _, node, instance = best
        node.preempt(instance, "paused")
        self.forget(node, instance)
        return self._start_on(node, work, now, How.PAUSE)

    def _pays(self, option: Pausable, demand: int, urgent: bool) -> bool:
        """A swap costs two loads: it pays for a larger batch, or at the last moment for light weights."""
        light = option.weight_bytes <= self.knobs.pause_weights_gib * GIB
        return option.batch < demand or (light and urgent)
