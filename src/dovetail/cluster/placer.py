"""The steps of placement: join an instance, preempt a neighbour, start an instance (S9–S11).

Ranks candidates on what nodes have said and asks one after another; nodes accept or refuse. Who asks, and when again,
is `controller`'s.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dovetail.cluster.asking import Ask, Asking
from dovetail.cluster.decisions import How, Placed, Warmed
from dovetail.cluster.handle import KnownInstance, NodeHandle
from dovetail.cluster.request import Search
from dovetail.cluster.start_order import MAX_LOOKS, StartOrder
from dovetail.node import protocol
from dovetail.node.protocol import Accepted, Refused, Victim
from dovetail.policy.compositions import Composition
from dovetail.policy.consolidate import MAX_INSTANCES
from dovetail.policy.headroom import Refusal
from dovetail.policy.placement import DeviceKind
from dovetail.policy.work import Phase, RequestRecord, Work

# Bounds on what one decision looks at, so that its time does not grow with the cluster.
MAX_MOVE_LOOKS = 12  # the same, for what gives way
MAX_MOVES = 6  # nodes and instances asked, all in all, whether they would take what gives way to a request

# An instance that refuses for one of these might accept if a neighbour of it went.
MENDABLE = {Refusal.MEMORY, Refusal.DECODE_OVERCOMMITTED}


@dataclass(slots=True)
class CheckCount:
    num_checked: int = 0  # nodes asked whether they would take what gives way


class Unwanted(Exception):
    """The request was cancelled while a node was asked for it."""


def is_node_overcommitted(node: NodeHandle, request: RequestRecord) -> bool:
    """One iteration of everybody there takes longer than some request allows already, without this one."""
    room = node.room
    return room.pace_s > min(request.tpot_s, room.strictest_s)


class Placer:
    def __init__(self, nodes: Sequence[NodeHandle], composition: Composition) -> None:
        self.nodes: list[NodeHandle] = []
        self._served = composition.nodes
        self.making_way = composition.making_way
        self._order = composition.instances
        self._sharing = composition.sharing
        for node in nodes:
            self.add_node(node)
        self.now_s = 0.0  # of the event that is being handled
        self._instances: dict[tuple[str, int], KnownInstance] = {}  # (node, instance)
        self._by_model: dict[str, list[KnownInstance]] = defaultdict(list)  # open for more work
        self._turn_of: Counter[str] = Counter()  # by model: requests that chose among several instances
        self.starts = StartOrder(composition)
        self._weights_tokens: dict[str, float] = {}  # by model
        self.leaving: set[tuple[str, int]] = set()  # (node, instance): somebody else is to have their place (L7)

    def add_node(self, node: NodeHandle) -> None:
        if self._served.takes(node.facts.kind):
            self.nodes.append(node)

    def remove_node(self, node: NodeHandle) -> None:
        """It is gone for good."""
        self._weights_tokens.clear()
        self.forget_node(node)
        self.starts.forget(node)
        if node in self.nodes:
            self.nodes.remove(node)

    @property
    def has_node(self) -> bool:
        return any(node.up for node in self.nodes)

    def window(self, request: RequestRecord, looks: int = MAX_LOOKS) -> Sequence[NodeHandle]:
        return self.starts.window(self.nodes, request, looks)

    def node_of(self, name: str) -> NodeHandle | None:
        return next((node for node in self.nodes if node.name == name), None)

    def busy(self) -> set[str]:
        """Nodes where somebody has work who is waited for."""
        return {view.node.name for view in self._instances.values() if view.batch}

    def warm(self, model: str) -> Asking[Warmed]:
        """An instance of the model, where a start would be tried first; one that is there will do."""
        for view in self._by_model.get(model, ()):
            return Warmed(model, view.node, {})
        refusals: Counter[str] = Counter()
        for node in self.starts.rank(self.nodes, model, self.now_s):
            if node.offer_of(model) is not None:
                answer = yield Ask(node, protocol.Warm(model))
                if isinstance(answer, Accepted):
                    return Warmed(model, node, {})
                if isinstance(answer, Refused):
                    refusals[answer.reason] += 1
        return Warmed(model, None, dict(refusals))

    def offered(self, node: NodeHandle, model: str, offer: protocol.Offer) -> None:
        """The node offers the model, or offers it in another way than before."""
        self._weights_tokens.pop(model, None)
        self.starts.offered(node, model, offer)

    def instances_of(self, model: str) -> Sequence[KnownInstance]:
        """Those that take work."""
        return self._by_model[model]

    def num_open(self, model: str) -> int:
        """Instances of the model that take work."""
        return len(self._by_model[model])

    def weights_tokens(self, model: str) -> float:
        """As much memory as the model's weights take on a node that has to read them holds the KV of so many tokens."""
        if model not in self._weights_tokens:
            offers = (node.offer_of(model) for node in self.nodes)
            heavy = next((offer for offer in offers if offer is not None and offer.weight_bytes), None)
            if heavy is None:
                return 0.0
            self._weights_tokens[model] = heavy.weight_bytes / max(heavy.token_bytes, 1)
        return self._weights_tokens[model]

    # What is believed of instances

    def add_instance(self, node: NodeHandle, instance_id: int, model: str, phase: Phase) -> KnownInstance:
        self.forget(node, instance_id)
        view = KnownInstance(node, instance_id, model, phase, 0, node.facts.kind is DeviceKind.CPU)
        self._instances[node.name, instance_id] = view
        self._by_model[model].append(view)
        return view

    def left(self, node: NodeHandle, instance_id: int, *, is_best_effort: bool) -> None:
        """Work has left the instance."""
        view = self._instances.get((node.name, instance_id))
        if view is not None:
            view.count(-1, is_best_effort=is_best_effort)

    def forget(self, node: NodeHandle, instance_id: int) -> None:
        """The instance takes no more work."""
        view = self._instances.pop((node.name, instance_id), None)
        if view is not None:
            self._by_model[view.model].remove(view)

    def forget_node(self, node: NodeHandle) -> None:
        for name, instance_id in list(self._instances):
            if name == node.name:
                self.forget(node, instance_id)

    def saw(self, node: NodeHandle, view: protocol.NodeView) -> None:
        """What the node says of its instances is so, whatever was believed."""
        there = {one.id for one in view.instances}
        for name, instance_id in list(self._instances):
            if name == node.name and instance_id not in there:
                self.forget(node, instance_id)
        for one in view.instances:
            known = self._instances.get((node.name, one.id))
            known = known or self.add_instance(node, one.id, one.model, one.phase)
            known.batch, known.best_effort = one.batch - one.best_effort, one.best_effort

    # The steps of placement

    def join(self, search: Search) -> Asking[Placed | None]:
        search.crowded.clear()
        for view in self._candidates(search.work):
            if view.node.name in search.avoided:
                search.refusals[Refusal.MEMORY] += 1
                continue
            if not search.work.is_best_effort and is_node_overcommitted(view.node, search.record):
                search.refusals[Refusal.DECODE_OVERCOMMITTED] += 1  # it would say the same
                search.crowded.append(view)
                continue
            answer = yield from self._propose(search, view.node, view.id)
            if isinstance(answer, Accepted):
                view.count(1, is_best_effort=search.work.is_best_effort)
                return Placed(search.work, view.node, view.id, How.JOIN)
            if isinstance(answer, Refused) and answer.reason in MENDABLE:
                search.crowded.append(view)
        return None

    def _propose(self, search: Search, node: NodeHandle, instance: int | None) -> Asking[protocol.Answer]:
        if search.is_over:  # since somebody else was last asked
            raise Unwanted
        question = protocol.Propose(search.record, instance, reclaims=search.reclaims, are_alike=search.are_alike)
        answer = yield Ask(node, question, search.until_s)
        if search.is_over:
            if isinstance(answer, Accepted):
                node.order(protocol.Withdraw(search.work.id), self.now_s)
            raise Unwanted
        if isinstance(answer, Refused):
            search.note(answer)
        return answer

    def _candidates(self, work: Work) -> list[KnownInstance]:
        views = [view for view in self._by_model[work.model] if view.phase is work.phase]
        if self.leaving:
            views = [view for view in views if (view.node.name, view.id) not in self.leaving]
        turn = self._turn_of[work.model]
        self._turn_of[work.model] += len(views) > 1
        if not work.is_best_effort and any(view.fills_gaps for view in views):
            # As if best effort were not there: what it alone keeps open comes after what others have open.
            spare = self._order.rank([view for view in views if view.fills_gaps], turn)
            views = self._order.rank([view for view in views if not view.fills_gaps], turn)
            return [*views, *spare]
        if work.is_best_effort and len(views) > 1:
            busy = self.busy()
            free = self._order.rank([view for view in views if view.node.name not in busy], turn)
            return [*free, *self._order.rank([view for view in views if view.node.name in busy], turn)]
        return self._order.rank(views, turn)

    def preempt(self, search: Search) -> Asking[Placed | None]:
        """S9: make room for an instance of the model by moving a smaller neighbour's requests elsewhere."""
        considered = search.num_checked = 0
        for view in search.crowded:
            if considered >= self._order.num_victims:
                return None
            answer = yield Ask(view.node, protocol.FindVictims(search.record, view.id))
            for victim in answer.found if isinstance(answer, protocol.Victims) else ():
                considered += 1
                if not (yield from self._can_move(victim, view.node, search)):
                    continue
                if search.is_over:
                    raise Unwanted
                view.node.order(protocol.Preempt(victim.instance, "preempted"), self.now_s)
                self.forget(view.node, victim.instance)
                answer = yield from self._propose(search, view.node, view.id)
                if isinstance(answer, Accepted):
                    view.count(1, is_best_effort=search.work.is_best_effort)
                    return Placed(search.work, view.node, view.id, How.PREEMPT)
                return None
        return None

    def has_other_place(self, request: RequestRecord, source: NodeHandle) -> Asking[bool]:
        """Somebody else would go on with it in time."""
        place = yield from self._other_place(request, {source.name}, CheckCount())
        return place is not None

    def prepare(self, request: RequestRecord, source: NodeHandle) -> Asking[NodeHandle | None]:
        """Nobody else would go on with it in time because weights have to be read first: let somebody read them."""
        late = msgspec.structs.replace(request, last_token_s=None)
        node = yield from self._other_place(late, {source.name}, CheckCount())
        if node is None or any(view.node is node for view in self._by_model[request.model]):
            return None
        answer = yield Ask(node, protocol.Warm(request.model))
        return node if isinstance(answer, Accepted) else None

    def places_for(
        self, request: RequestRecord, source: NodeHandle, wanted: NodeHandle | None = None
    ) -> list[tuple[NodeHandle, int | None]]:
        """Where the request may go on, the best first: instances that are there, and nodes that may start one."""
        views = self._by_model[request.model]
        views = self._order.rank(views, 0)
        nodes = self.starts.rank(self.window(request), request.model, self.now_s)
        found = [(view.node, view.id) for view in views] + [(node, None) for node in nodes]
        if wanted is not None:
            found = [*((view.node, view.id) for view in views if view.node is wanted), (wanted, None), *found]
        return [(node, instance) for node, instance in found if node is not source and node.up]

    def joined(self, node: NodeHandle, instance_id: int, request: RequestRecord) -> None:
        """The node has taken the request, on an instance that was there or that it starts."""
        view = self._instances.get((node.name, instance_id))
        if view is None:
            view = self.add_instance(node, instance_id, request.model, request.phase)
            self.starts.started(node, request.model, self.now_s)
        view.count(1, is_best_effort=request.is_best_effort)

    def _can_move(self, victim: Victim, source: NodeHandle, search: Search) -> Asking[bool]:
        """Every request of the victim would be accepted somewhere else, each on a node of its own: that a node accepts
        one of them says nothing about the next."""
        taken = {source.name}
        for request in victim.requests:
            if (yield from self._other_place(request, taken, search)) is None:
                return False
        return True

    def _other_place(
        self, request: RequestRecord, taken: set[str], search: CheckCount | Search
    ) -> Asking[NodeHandle | None]:
        """A node that would take it and is not taken; it is taken then."""
        found: list[tuple[NodeHandle, int | None]] = []
        found += [(view.node, view.id) for view in self._by_model[request.model][:MAX_INSTANCES]]
        found += [(node, None) for node in self.window(request, MAX_MOVE_LOOKS)]
        for node, instance in found:
            if node.name not in taken and (yield from self._would_take(node, request, instance, search)):
                taken.add(node.name)
                return node
        return None

    def _would_take(
        self, node: NodeHandle, request: RequestRecord, instance: int | None, search: CheckCount | Search
    ) -> Asking[bool]:
        search.num_checked += 1
        if search.num_checked > MAX_MOVES:
            return False
        answer = yield Ask(node, protocol.Check(request, instance))
        return isinstance(answer, Accepted)

    def start_on(self, node: NodeHandle, search: Search, how: How) -> Asking[Placed | None]:
        work = search.work
        if node.name in search.avoided:
            search.refusals[Refusal.MEMORY] += 1
            return None
        if not self._sharing.may_add(self._num_instances(node, work)):
            search.refusals[Refusal.SLOTS] += 1  # it would say the same
            return None
        answer = yield from self._propose(search, node, None)
        if not isinstance(answer, Accepted):
            return None
        view = self.add_instance(node, answer.instance, work.model, work.phase)
        view.count(1, is_best_effort=work.is_best_effort)
        self.starts.started(node, work.model, self.now_s)
        return Placed(work, node, answer.instance, how)

    def _num_instances(self, node: NodeHandle, work: Work) -> int:
        views = self._by_model.get(work.model, ())
        return sum(view.node is node and view.phase is work.phase for view in views)
