"""What clients and operators of a server do in a storm beside sending requests, and how the simulation carries it out.

Clients go away, models are preloaded, unloaded and configured anew, a host is short of memory, adapters take memory of
a device, and a worker dies between the tokens that it tells and what it says of their requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from dovetail.cluster.local_node import Preparation
from dovetail.policy.placement import Hosting
from dovetail.sim.device import Device
from dovetail.sim.metrics import Fate
from dovetail.sim.striking import MEMORY

if TYPE_CHECKING:
    from dovetail.sim.driver import Simulation

ABORTS = 0.2  # of requests, in storms whose clients go away
PREPARES = 0.4  # of requests, in storms where grammars are compiled and adapters read


class OperationKind(StrEnum):
    ABORT = "abort"  # the client of these choices goes away
    WARM = "warm"  # the model is preloaded
    UNLOAD = "unload"  # no node offers the model any more, for `duration_s`; its requests end first, or not
    RECONFIGURE = "reconfigure"  # its instances are kept for `duration_s` from now on
    RELIEVE = "relieve"  # the node's host is short of memory: an idle instance goes
    ADAPTER = "adapter"  # one takes a share of the node's memory, for `duration_s`
    LAST_WORDS = "last_words"  # the node dies when it has told the next last token, and says nothing more of it


class Operation(NamedTuple):
    at_s: float
    kind: OperationKind
    requests: tuple[int, ...] = ()  # numbers of choices
    model: str = ""
    node: int = 0  # index
    duration_s: float = 0.0
    share: float = 0.0  # of memory
    is_forced: bool = False


def draw_operations(
    rng: Random, choices: list[tuple[float, tuple[int, ...]]], models: int, nodes: int, horizon_s: float
) -> list[Operation]:
    """`choices`: of each request, when it comes and the numbers of its choices."""
    found = []
    if rng.random() < 0.5:
        found = [_abort(rng, *one) for one in choices if rng.random() < ABORTS]
    others = [kind for kind in OperationKind if kind is not OperationKind.ABORT]
    for _ in range(rng.randrange(0, 8)):
        found.append(
            Operation(
                rng.uniform(0.0, horizon_s + 10.0),
                rng.choice(others),
                model=str(rng.randrange(models)),
                node=rng.randrange(nodes),
                duration_s=rng.choice((0.0, 2.0, 30.0)),
                share=rng.uniform(0.001, 0.1),
                is_forced=rng.random() < 0.5,
            )
        )
    return sorted(found)


def _abort(rng: Random, arrival_s: float, ids: tuple[int, ...]) -> Operation:
    gone = ids if rng.random() < 0.7 else (rng.choice(ids),)
    return Operation(arrival_s + rng.expovariate(0.3), OperationKind.ABORT, requests=gone)


def draw_preparations(rng: Random, num_requests: int) -> dict[int, Preparation]:
    if rng.random() < 0.5:
        return {}
    wanted = [id for id in range(num_requests) if rng.random() < PREPARES]
    return {id: Preparation(rng.uniform(0.01, 3.0), rng.choice((0, 0, 0, 1, 2))) for id in wanted}


class Operator:
    def __init__(self, simulation: Simulation) -> None:
        self._sim = simulation
        self._num_adapters = 0

    def act(self, now: float, operation: Operation) -> None:
        sim, kind = self._sim, operation.kind
        device = sim.devices[operation.node]
        if kind is OperationKind.ABORT:
            self._abort(operation.requests, now)
        elif kind is OperationKind.WARM:
            sim.cluster.warm(operation.model, now)
        elif kind is OperationKind.UNLOAD:
            self._unload(operation, now)
        elif kind is OperationKind.RECONFIGURE:
            for one in sim.devices:
                if (hosting := one.catalogue.get(operation.model)) is not None:
                    self._offer(one, operation.model, replace(hosting, keep_alive_s=operation.duration_s), now)
        elif kind is OperationKind.LAST_WORDS:
            device.dies_telling = True
        elif device.node.up:
            self._take_memory(operation, device, now)
        sim.cluster.settle(now)
        sim.settle(now)

    def _abort(self, ids: Iterable[int], now: float) -> None:
        """Clients went away; what has all its tokens is told of yet."""
        cluster = self._sim.cluster
        works = [work for id in ids if (work := cluster.controller.works.get(id)) is not None]
        works = [work for work in works if not work.is_complete]
        for work in works:
            self._sim.stories.end(work, Fate.ABORTED, "", now)
        cluster.cancel([work.id for work in works], now)

    def _take_memory(self, operation: Operation, device: Device, now: float) -> None:
        runtime = self._sim.node_of[id(device)]
        if operation.kind is OperationKind.RELIEVE:
            runtime.close_idle(now)
            return
        self._num_adapters += 1
        num_bytes = int(operation.share * device.node.device.ledger.capacity)
        if device.node.residency.keep_adapter(self._num_adapters, num_bytes):
            runtime.changed(now)
            key = device, device.epoch, self._num_adapters
            self._sim.push(now + operation.duration_s, MEMORY, self._drop_adapter, key)

    def _drop_adapter(self, now: float, key: tuple[Device, int, int]) -> None:
        device, epoch, number = key
        if device.epoch == epoch:
            device.node.residency.drop_adapter(number)
            self._sim.node_of[id(device)].changed(now)
            self._sim.cluster.settle(now)
            self._sim.settle(now)

    # Models that come and go

    def _unload(self, operation: Operation, now: float) -> None:
        """By force its requests end with an error; else they wait, or are refused when their time is over."""
        sim, model = self._sim, operation.model
        if operation.is_forced:
            works = sim.cluster.controller.works.values()
            self._abort([work.id for work in works if work.model == model], now)
        for device in sim.devices:
            sim.cluster.handles[device.node.name].withdraw(model)
            if model in device.catalogue:
                if device.node.up:
                    sim.node_of[id(device)].close_model(model, now)
                key = device, model, device.catalogue.pop(model)
                sim.push(now + operation.duration_s, MEMORY, self._offer_again, key)

    def offer_all(self, device: Device, now: float) -> None:
        """It has come up and says what it offers, where that changes."""
        for model in list(device.catalogue):
            self._sim.node_of[id(device)].offer(model, now)

    def _offer_again(self, now: float, key: tuple[Device, str, Hosting]) -> None:
        self._offer(*key, now)
        self._sim.cluster.settle(now)
        self._sim.settle(now)

    def _offer(self, device: Device, model: str, hosting: Hosting, now: float) -> None:
        device.catalogue[model] = hosting
        if device.node.up:
            self._sim.node_of[id(device)].offer(model, now)
