"""The ways to a place: the steps of placement (`placer`) in the order that each kind of request takes, a start on the
node where it is soonest (L6), and who is moved away for a sooner one (L7). Carrying that out is `displacing`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dovetail.cluster.asking import Ask, Asking
from dovetail.cluster.decisions import Displace, DisplacedInstance, How, Placed
from dovetail.cluster.handle import NodeHandle
from dovetail.cluster.placer import Placer
from dovetail.cluster.request import Search
from dovetail.node import protocol
from dovetail.policy.displace import Destination, MakingWay, MovableInstance, Move, migration_s, who_moves_where
from dovetail.policy.headroom import Refusal

# Bounds on what one decision looks at, so that its time does not grow with the cluster.
MAX_CROWDED = 4  # full nodes asked, for one request, who would have to go
MAX_DESTINATIONS = 3  # that would take a guest, found for each
MAX_CHECKS = 8  # nodes asked, for one request, whether they would take a guest
MAX_GUESTS = 6  # on one node that are considered
NOWHERE: tuple[Destination, ...] = (Destination("", 0.0),)  # of an idle guest
FULL = {Refusal.MEMORY, Refusal.SLOTS}


def seek(placer: Placer, search: Search) -> Asking[Placed | Displace | None]:
    placed = yield from placer.join(search)
    placed = placed or (yield from placer.preempt(search))
    return placed or (yield from start_or_make_way(placer, search))


def fill_gaps(placer: Placer, search: Search, *, may_start: bool) -> Asking[Placed | None]:
    """For best effort: where nobody else has work, on an instance that is there or on a new one; else in gaps that
    others leave, and on a new one only if the model has none."""
    busy = placer.busy()
    if may_start and all(view.node.name in busy for view in placer.instances_of(search.work.model)):
        nodes = [node for node in placer.window(search.record) if node.name not in busy]
        placed = yield from start(placer, search, nodes)
        if placed is not None:
            return placed
    placed = yield from placer.join(search)
    if placed is None and may_start and not placer.num_open(search.work.model):
        placed = yield from start(placer, search, placer.window(search.record))
    return placed


def come_back(placer: Placer, search: Search) -> Asking[Placed | None]:
    """A place without making room for it."""
    placed = yield from placer.join(search)
    return placed or (yield from start(placer, search, placer.window(search.record)))


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
