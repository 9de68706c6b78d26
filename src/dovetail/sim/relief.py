"""What baselines do for a node whose requests outgrow it: a request is let go, and recomputed elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dovetail.cluster.asking import Ask, Asking
from dovetail.cluster.decisions import Moving
from dovetail.cluster.handle import NodeHandle
from dovetail.node import protocol
from dovetail.policy.work import RequestRecord

if TYPE_CHECKING:
    from dovetail.cluster.controller import Controller

PREPARE_AGAIN_S = 10.0  # a cold start in vain costs others their memory: not many for one model
AHEAD_S = 8.0  # a cold start elsewhere, and a prefill there


@dataclass(frozen=True, slots=True)
class Recomputing:
    """The request that is furthest ahead is moved, if another node would go on with it in time. Where that takes a cold
    start, it is begun, and the request is moved when the weights are there."""

    ahead_s: float = AHEAD_S

    def reliever(self, cluster: Controller) -> Recomputer:
        return Recomputer(cluster)


@dataclass(frozen=True, slots=True)
class NoRelief:
    """Nothing is done."""

    ahead_s: float = AHEAD_S

    def reliever(self, cluster: Controller) -> NoReliever:
        return NoReliever()


class NoReliever:
    def overcommitted(self, node: NodeHandle, request: RequestRecord, now: float) -> None: ...

    def ready(self, node: NodeHandle, model: str, now: float) -> None: ...


class Prepared(NamedTuple):
    """A cold start that was begun for a request which runs elsewhere."""

    node: NodeHandle | None  # None = none would
    source: NodeHandle
    record: RequestRecord
    again_s: float  # no other one for the model before


class Recomputer:
    def __init__(self, controller: Controller) -> None:
        self._seeker = controller.seeker
        self._prepared: dict[str, Prepared] = {}  # by model

    def overcommitted(self, node: NodeHandle, request: RequestRecord, now: float) -> None:
        self._seeker.decisions.begin(self._relieve(node, request))

    def ready(self, node: NodeHandle, model: str, now: float) -> None:
        prepared = self._prepared.get(model)
        if prepared is not None and prepared.node is node and prepared.record.id in self._seeker.works:
            self._prepared[model] = prepared._replace(node=None)
            record = msgspec.structs.replace(prepared.record, last_token_s=now)  # it has gone on meanwhile
            self._seeker.decisions.begin(self._relieve(prepared.source, record))

    def _relieve(self, node: NodeHandle, record: RequestRecord) -> Asking[None]:
        seeker = self._seeker
        mean_tokens = seeker.lengths.mean_known(record.model, seeker.outputs.value)
        record = msgspec.structs.replace(record, mean_tokens=mean_tokens)
        if not (yield from seeker.placer.has_other_place(record, node)):
            yield from self._prepare(node, record)
            return
        answer = yield Ask(node, protocol.Release(record.id))
        if not isinstance(answer, protocol.TookBack) or answer.request is None:
            return
        work = seeker.works.get(record.id)
        if work is not None and work.search is None:  # else it was cancelled meanwhile, or lost
            seeker.left(node, answer.instance, is_best_effort=work.is_best_effort)
            work.take(answer.request)
            seeker.outbox.append(Moving(work, seeker.now_s, "overcommitted"))
            seeker.seek(work, avoided=node.name)

    def _prepare(self, source: NodeHandle, record: RequestRecord) -> Asking[None]:
        """A cold start for a request that no other node would go on with in time."""
        seeker = self._seeker
        before = self._prepared.get(record.model)
        if before is not None and seeker.now_s < before.again_s:
            return
        again_s = seeker.now_s + PREPARE_AGAIN_S
        self._prepared[record.model] = Prepared(None, source, record, again_s)
        node = yield from seeker.placer.prepare(record, source)
        if node is not None:
            self._prepared[record.model] = Prepared(node, source, record, again_s)
