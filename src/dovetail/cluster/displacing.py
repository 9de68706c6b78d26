"""Instances that make way for a model that starts sooner in their place (L7): moved away or evicted, then closed.

Whoever they make way for waits like everybody without a place, and asks again when the last of them is gone, or when it
comes to nothing. A move that fails, a node that is lost, or a request that nobody wants any more ends it; nothing that
was begun has to be undone, because every answer goes on where it is.
"""

from __future__ import annotations

from dovetail.cluster.controller import Controller
from dovetail.cluster.decisions import Displace
from dovetail.cluster.handle import NodeHandle
from dovetail.cluster.migration import Migrations
from dovetail.node import protocol


class Displacements:
    def __init__(
        self, controller: Controller, migrations: Migrations, places: dict[int, tuple[NodeHandle, int]]
    ) -> None:
        self._controller = controller
        self._migrations = migrations
        self._places = places
        self._by_request: dict[int, _Displacement] = {}  # by whom they make way for
        self.completed = 0
        self.evicted = 0  # requests that were not moved but evicted
        self.abandoned = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def begin(self, plan: Displace) -> None:
        self._supersede(plan)
        displacement = self._by_request[plan.work.id] = _Displacement(plan)
        for move in plan.moves if self._is_wanted(plan) else ():
            wanted = self._controller.placer.node_of(move.destination) if move.destination is not None else None
            for request in move.requests if wanted is not None else ():
                if self._is_there(plan, move.instance, request):
                    self._migrations.begin(request, "makes_way", wanted)
        self._step(displacement)

    def _supersede(self, plan: Displace) -> None:
        """It has given up waiting for others to make way and was planned for anew, before anything told of that."""
        before = self._by_request.pop(plan.work.id, None)
        if before is not None:
            self.abandoned += bool(before.left)
            self._controller.placer.leaving -= before.plan.instances - plan.instances

    def step(self) -> None:
        """Something has happened: whoever has nobody left closes."""
        for displacement in list(self._by_request.values()):
            self._step(displacement)

    def _step(self, displacement: _Displacement) -> None:
        plan = displacement.plan
        if not self._is_wanted(plan):
            self._end(displacement)
            return
        for move in plan.moves:
            key = plan.node.name, move.instance
            if key in displacement.closed:
                continue
            there = [one for one in move.requests if self._is_there(plan, move.instance, one)]
            if there and move.destination is not None:
                if not all(one in self._migrations for one in there):
                    self._end(displacement)  # somebody could not move
                    return
                continue
            displacement.closed.add(key)
            self.evicted += len(there)
            plan.node.order(protocol.Preempt(move.instance, "makes_way"), self._controller.decisions.now_s)
            self._controller.placer.forget(plan.node, move.instance)

    def _is_wanted(self, plan: Displace) -> bool:
        """Whoever they make way for has not found a place by itself, and has not ended or given up waiting for them."""
        id, controller = plan.work.id, self._controller
        return id in controller.displacing and (id in controller.room or id in controller.seeking)

    def _is_there(self, plan: Displace, instance: int, request: int) -> bool:
        return self._places.get(request) == (plan.node, instance)

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
        self._controller.placer.leaving -= plan.instances
        self._controller.displaced(plan.work, is_free=not displacement.left)


class _Displacement:
    def __init__(self, plan: Displace) -> None:
        self.plan = plan
        self.left = plan.instances  # not gone yet
        self.closed: set[tuple[str, int]] = set()  # told to go
