"""Where an instance of a model is started (L6), and who is moved away for a sooner start (L7).

Ranks nodes by what they have said, asks those who would be the soonest, and where these are full finds out who would
have to go where. Carrying that out is `displacing`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from dovetail.cluster.asking import Ask, Asking
from dovetail.cluster.decisions import Displace, DisplacedInstance, How, Placed
from dovetail.cluster.handle import NodeHandle
from dovetail.cluster.request import Search
from dovetail.node import protocol
from dovetail.policy.compositions import Composition
from dovetail.policy.displace import Destination, MakingWay, MovableInstance, Move, migration_s, who_moves_where
from dovetail.policy.headroom import Refusal
from dovetail.policy.startup import Draws, start_s
from dovetail.policy.work import RequestRecord

if TYPE_CHECKING:
    from dovetail.cluster.placer import Placer

# Bounds on what one decision looks at, so that its time does not grow with the cluster.
MAX_LOOKS = 32  # nodes looked at, by what is known of them
MAX_CANDIDATES = 16  # of these: nodes asked for a start, or where a preempted request could go
MAX_DOUBTFUL = 4  # the same, where none of those looked at seems to have room
MAX_NEAR = 16  # nodes remembered for each model: those that would have it soonest
MAX_CROWDED = 4  # full nodes asked, for one request, who would have to go
MAX_DESTINATIONS = 3  # that would take a guest, found for each
MAX_CHECKS = 8  # nodes asked, for one request, whether they would take a guest
MAX_GUESTS = 6  # on one node that are considered
NOWHERE: tuple[Destination, ...] = (Destination("", 0.0),)  # of an idle guest
FULL = {Refusal.MEMORY, Refusal.SLOTS}


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


def start(placer: Placer, search: Search, nodes: Sequence[NodeHandle]) -> Asking[Placed | None]:
    """On one of these. Nobody makes way for it."""
    for node in placer.starts.rank(nodes, search.work.model, placer.now_s):
        if placer.starts.is_taken(node):
            search.refusals[Refusal.SLOTS] += 1  # it would say the same
            continue
        placed = yield from placer.start_on(node, search, How.START)
        if placed is not None:
            return placed
    return None


def start_or_make_way(placer: Placer, search: Search) -> Asking[Placed | Displace | None]:
    """Of the nodes that take it, and those that would once somebody has gone, the one where it starts soonest."""
    best: Displace | None = None
    crowded = 0
    search.num_checked = 0
    model, starts = search.work.model, placer.starts
    nodes = starts.rank(placer.window(search.record), model, placer.now_s)
    search.is_full = all(starts.is_taken(node) for node in nodes)
    for node in nodes:
        seconds = starts.seconds(node, model, placer.now_s)
        if best is not None and best.start_s <= seconds:
            break
        if placer.starts.is_taken(node):
            search.refusals[Refusal.SLOTS] += 1
            search.last_refusal = Refusal.SLOTS
        else:
            search.last_refusal = None
            placed = yield from placer.start_on(node, search, How.START)
            if placed is not None:
                return placed
        if search.last_refusal in FULL and crowded < MAX_CROWDED and may_displace(placer, search, node):
            crowded += 1
            found = yield from _displace(placer, search, node, seconds)
            if found is not None and (best is None or found.start_s < best.start_s):
                best = found
    return best


def may_displace(placer: Placer, search: Search, node: NodeHandle) -> bool:
    if any(name == node.name for name, _ in placer.leaving):
        return False
    return placer.making_way.may_displace(search.work.moves, is_full=search.is_full)


def _displace(placer: Placer, search: Search, node: NodeHandle, seconds: float) -> Asking[Displace | None]:
    answer = yield Ask(node, protocol.FindGuests(search.record))
    if not isinstance(answer, protocol.Guests) or not answer.missing_bytes:
        return None
    found, making_way = {one.instance: one for one in answer.found[:MAX_GUESTS]}, placer.making_way
    guests = []
    for one in found.values():
        if not making_way.may_go(request.moves for request in one.requests):
            continue
        places = NOWHERE
        if making_way.looks_elsewhere(is_full=search.is_full):
            places = yield from _destinations(placer, search, node, one)
        guests.append(MovableInstance(one.instance, one.frees_bytes, places))
    plan = who_moves_where(guests, answer.missing_bytes)
    if plan is None or placer.now_s + plan.seconds > search.until_s:
        return None  # it would be refused while it waits for them
    moves = tuple(_displaced(making_way, move, found[move.instance]) for move in plan.moves)
    return Displace(search.work, node, plan.seconds + seconds, moves)


def _displaced(making_way: MakingWay, move: Move, guest: protocol.Guest) -> DisplacedInstance:
    requests = tuple(one.id for one in guest.requests)
    return DisplacedInstance(move.instance, requests, making_way.destination(move))


def _destinations(
    placer: Placer, search: Search, source: NodeHandle, guest: protocol.Guest
) -> Asking[tuple[Destination, ...]]:
    """Where all its requests may go on, the soonest first."""
    if not guest.requests:
        return NOWHERE
    tokens = sum(one.input_tokens + one.produced for one in guest.requests)
    first = msgspec.structs.replace(guest.requests[0], last_token_s=None)  # it goes on meanwhile: nothing is silent
    found: list[Destination] = []
    starts = placer.starts
    nodes = starts.rank(placer.window(first), guest.model, placer.now_s)
    for node in _that_may_take(nodes, source, placer):
        if len(found) == MAX_DESTINATIONS or search.num_checked >= MAX_CHECKS:
            break
        search.num_checked += 1
        answer = yield Ask(node, protocol.Check(first))
        offer = node.offer_of(guest.model)
        if isinstance(answer, protocol.Accepted) and offer is not None:
            seconds = starts.seconds(node, guest.model, placer.now_s)
            found.append(Destination(node.name, migration_s(seconds, tokens, offer.token_s, offer.resume_s)))
    return tuple(sorted(found, key=lambda one: one.seconds))


def _that_may_take(nodes: Sequence[NodeHandle], source: NodeHandle, placer: Placer) -> list[NodeHandle]:
    leaving = {name for name, _ in placer.leaving}
    nodes = [node for node in nodes if node is not source and node.up and not node.is_draining]
    return [node for node in nodes if node.name not in leaving and not placer.starts.is_taken(node)]
