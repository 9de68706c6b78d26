"""Instances that make way for a model that starts sooner in their place (L7): moved away or evicted, then closed.

The request that they make way for is queued, and asks again when the last of them is gone, or when the plan has failed.
Nobody moves before every request of every instance has been accepted elsewhere: a plan that fails until then leaves
everything as it was. A node that is lost, or a request that nobody wants any more, ends the plan.
"""

from __future__ import annotations

from dovetail.cluster.decisions import Displace
from dovetail.cluster.handle import NodeHandle
from dovetail.cluster.migration import Migrations
from dovetail.cluster.request import placed_on
from dovetail.cluster.seeker import Seeker
from dovetail.node import protocol


class Displacements:
    def __init__(self, seeker: Seeker, migrations: Migrations) -> None:
        self._seeker = seeker
        self._migrations = migrations
        self._by_request: dict[int, _Displacement] = {}  # by whom they make way for
        self.completed = 0
        self.evicted = 0  # requests that were not moved but evicted
        self.abandoned = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def begin(self, plan: Displace) -> None:
        self._supersede(plan)
        displacement = self._by_request[plan.work.id] = _Displacement(plan)
        if self._is_wanted(plan):
            self._begin_moves(displacement)
        self._step(displacement)

    def _begin_moves(self, displacement: _Displacement) -> None:
        """Of all requests that are there, those included that were accepted after the plan was made."""
        plan, placer = displacement.plan, self._seeker.placer
        for move in plan.moves:
            wanted = placer.node_of(move.destination) if move.destination is not None else None
            for request in self._there(plan, move.instance) if wanted is not None else ():
                if request not in self._migrations:
                    self._migrations.begin(request, "makes_way", wanted, is_gated=not displacement.is_open)
                    displacement.moved.add(request)

    def _supersede(self, plan: Displace) -> None:
        """It has given up waiting for others to make way and was planned for anew, before anything told of that."""
        before = self._by_request.pop(plan.work.id, None)
        if before is not None:
            self.abandoned += bool(before.left)
            self._migrations.cancel(one for one in before.moved if self._migrations.is_gated(one))
            self._seeker.placer.leaving -= before.plan.instances - plan.instances

    def step(self) -> None:
        """Something has happened: whoever has nobody left closes."""
        for displacement in list(self._by_request.values()):
            self._step(displacement)

    def _step(self, displacement: _Displacement) -> None:
        plan, moves = displacement.plan, displacement.plan.moves
        if not self._is_wanted(plan) or self._is_stuck(displacement):
            self._end(displacement)
            return
        moving = [one for move in moves if move.destination is not None for one in self._there(plan, move.instance)]
        if not displacement.is_open:
            if not all(self._migrations.is_accepted(one) for one in moving):
                return
            displacement.is_open = True
            for request in moving:
                self._migrations.open(request)
        for move in moves:
            key = plan.node.name, move.instance
            there = self._there(plan, move.instance)
            if key in displacement.closed or (there and move.destination is not None):
                continue
            if self._seeker.decisions.is_proposed(plan.node, move.instance):
                continue  # somebody may be accepted there yet
            displacement.closed.add(key)
            self.evicted += len(there)
            plan.node.order(protocol.Preempt(move.instance, "makes_way"), self._seeker.decisions.now_s)
            self._seeker.placer.forget(plan.node, move.instance)

    def _is_stuck(self, displacement: _Displacement) -> bool:
        """Somebody there cannot move."""
        plan = displacement.plan
        for move in plan.moves:
            there = self._there(plan, move.instance)
            if move.destination is None:
                if there and not move.requests:
                    return True  # it was idle, and has work again
                continue
            if any(one not in displacement.moved and one not in self._migrations for one in there):
                self._begin_moves(displacement)
            if any(one not in self._migrations for one in there):
                return True
        return False

    def _is_wanted(self, plan: Displace) -> bool:
        """Whoever they make way for has not found a place by itself, and has not ended or given up waiting for them."""
        work = plan.work
        return bool(work.waits_for_room_s) and (work.id in self._seeker.room or work.search is not None)

    def _there(self, plan: Displace, instance: int) -> list[int]:
        """Requests on an instance that makes way, without best effort, which waits for another place."""
        there = [work for work in placed_on(self._seeker.works.values(), plan.node) if not work.is_best_effort]
        return [work.id for work in there if work.place is not None and work.place.instance == instance]

    def gone(self, node: NodeHandle, instance: int) -> None:
        """Its memory is free."""
        for displacement in list(self._by_request.values()):
            displacement.left.discard((node.name, instance))
            if not displacement.left:
                self.completed += 1
                self._end(displacement)

    def lost(self, node: NodeHandle) -> None:
        for displacement in list(self._by_request.values()):
            if displacement.plan.node is node:
                self._end(displacement)

    def _end(self, displacement: _Displacement) -> None:
        """Whoever they made way for looks for a place as everybody does, if it has none yet."""
        plan = displacement.plan
        del self._by_request[plan.work.id]
        self.abandoned += bool(displacement.left)
        self._migrations.cancel(one for one in displacement.moved if self._migrations.is_gated(one))
        self._seeker.placer.leaving -= plan.instances
        self._seeker.displaced(plan.work, is_free=not displacement.left)


class _Displacement:
    def __init__(self, plan: Displace) -> None:
        self.plan = plan
        self.left = plan.instances  # not gone yet
        self.closed: set[tuple[str, int]] = set()  # told to go
        self.moved: set[int] = set()  # requests whose migrations were begun for it
        self.is_open = False  # all of them were accepted elsewhere: sources let go
