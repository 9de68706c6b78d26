"""Which nodes are asked first to start a model (L6): what is known of how soon it would be where."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.cluster.handle import NodeHandle
from dovetail.node import protocol
from dovetail.policy.compositions import Composition
from dovetail.policy.startup import Draws, start_s
from dovetail.policy.work import RequestRecord

# Bounds on what one decision looks at, so that its time does not grow with the cluster.
MAX_LOOKS = 32  # nodes looked at, by what is known of them
MAX_CANDIDATES = 16  # of these: nodes asked for a start, or where a preempted request could go
MAX_DOUBTFUL = 4  # the same, where none of those looked at seems to have room
MAX_NEAR = 16  # nodes remembered for each model: those that would have it soonest


class StartOrder:
    """What is known of how soon a model would be where."""

    def __init__(self, composition: Composition) -> None:
        self._ranking = composition.starts
        self._sharing = composition.sharing
        self._draws = Draws()
        self._cursor = 0  # where the next window of candidate nodes begins
        self._spread: dict[tuple[int, int], list[int]] = {}  # of windows, by nodes and how many are looked at
        self._near: dict[str, dict[str, tuple[float, NodeHandle]]] = {}  # by model and node: what a load takes there
        self._disk_free_s: dict[str, float] = {}  # by machine: when its disk has read what starts have ordered

    def window(self, nodes: Sequence[NodeHandle], request: RequestRecord, looks: int = MAX_LOOKS) -> list[NodeHandle]:
        """All nodes of a small cluster; of a large one those where its weights are, if that counts, and some from all
        over it that seem to have room for an instance, others with every call."""
        count = len(nodes)
        if count <= MAX_CANDIDATES:
            return list(nodes)
        self._cursor = start = (self._cursor + 1) % count
        looks = min(count, looks)
        seen = [nodes[(start + offset) % count] for offset in self._offsets(count, looks)]
        roomy = [node for node in seen if self._has_room(node, request)]
        chosen = roomy[:: -(len(roomy) // -MAX_CANDIDATES)] if roomy else seen[:: -(len(seen) // -MAX_DOUBTFUL)]
        return self._ranking.window(chosen, lambda: self.near(request.model))

    def _offsets(self, count: int, looks: int) -> list[int]:
        """So many, from all over a cluster of so many nodes."""
        found = self._spread.get((count, looks))
        if found is None:
            self._spread = {key: one for key, one in self._spread.items() if key[0] == count}
            found = self._spread[count, looks] = [step * count // looks for step in range(looks)]
        return found

    def _has_room(self, node: NodeHandle, request: RequestRecord) -> bool:
        """By what it last said: memory for the weights, and time for one more decode in every round. Most say no by
        one of the two alone: first what takes no sum over everyone there."""
        room = node.room
        pace_s, strictest_s = room.pace_s, room.strictest_s
        if request.tpot_s < strictest_s:
            strictest_s = request.tpot_s
        if pace_s > strictest_s:
            return False
        offer = node.offer_of(request.model)
        if offer is None or offer.weight_bytes > room.weight_bytes:
            return False
        return (pace_s + offer.decode_s <= strictest_s or not pace_s) and node.up and not self.is_taken(node)

    def rank(self, nodes: Sequence[NodeHandle], model: str, now: float) -> list[NodeHandle]:
        """In the order in which they are asked to start an instance of the model."""
        return self._ranking.rank(nodes, lambda node: self.seconds(node, model, now), self._draws)

    def is_taken(self, node: NodeHandle) -> bool:
        """Where models do not share devices."""
        return self._sharing.is_taken(node.in_use)

    def seconds(self, node: NodeHandle, model: str, now: float) -> float:
        """L6: q + n/b. What comes from the machine's disk waits for what its other devices read from there."""
        offer = node.offer_of(model)
        if offer is None:
            return 0.0
        free_s = node.link_free_s
        if offer.disk_s:
            free_s = max(free_s, self._disk_free_s.get(node.facts.machine, 0.0))
        return start_s(free_s, offer.load_s, now)

    def started(self, node: NodeHandle, model: str, now: float) -> None:
        """The node has accepted: its load is the next in the machine's queue."""
        offer = node.offer_of(model)
        if offer is not None and offer.disk_s:
            self._disk_free_s[node.facts.machine] = (
                max(self._disk_free_s.get(node.facts.machine, 0.0), now) + offer.disk_s
            )

    def offered(self, node: NodeHandle, model: str, offer: protocol.Offer) -> None:
        """So that in a large cluster nobody has to look at all nodes to find those where the weights are."""
        near = self._near.setdefault(model, {})
        near[node.name] = offer.load_s, node
        if len(near) > MAX_NEAR:
            del near[max(near, key=lambda name: near[name][0])]

    def near(self, model: str) -> list[NodeHandle]:
        return [node for _, node in self._near.get(model, {}).values()]

    def forget(self, node: NodeHandle) -> None:
        for near in self._near.values():
            near.pop(node.name, None)
