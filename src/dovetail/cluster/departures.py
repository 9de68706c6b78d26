"""What becomes of a request that has left its node: it has ended, or needs another place, at once or later."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dovetail.cluster.decisions import Moving
from dovetail.cluster.handle import NodeHandle
from dovetail.cluster.request import RequestState
from dovetail.cluster.seeker import Seeker
from dovetail.node.work import Phase, RequestRecord
from dovetail.policy.knobs import Knobs


class Departures:
    def __init__(self, seeker: Seeker, knobs: Knobs, *, kv_bytes_per_s: float = 12.5e9) -> None:
        self._seeker = seeker
        self._knobs = knobs
        self._kv_bytes_per_s = kv_bytes_per_s

    def finished(self, node: NodeHandle, instance: int, work: RequestState, now: float) -> None:
        seeker = self._seeker
        seeker.ends.note(now)
        seeker.outputs.add(work.produced)
        seeker.lengths.add(work.model, work.produced)
        seeker.by_memory.ended(work.model, work.produced)
        seeker.lengths.ended(work.id)
        seeker.left(node, instance)

    def evicted(self, node: NodeHandle, instance: int, work: RequestState, reason: str, now: float) -> None:
        seeker = self._seeker
        seeker.at(now)
        seeker.placer.left(node, instance)
        seeker.lengths.runs(work.model, work.id, work.produced)
        if reason == "kv_short" and self._knobs.finish_begun and work.produced:
            seeker.owe(work, node.name)
        work.cached = False
        if reason == "paused":
            seeker.park(work)
            seeker.outbox.append(Moving(work, seeker.back_s(work), reason))
        elif reason == "kv_short" and work.short_at == work.produced:
            # It got no token there either: nowhere does it fit now.
            seeker.move(work, now + self._knobs.retry_s, reason)
        elif reason == "kv_short":  # at once it would only come back to where it did not fit
            work.short_at = work.produced
            seeker.seek(work, avoided=node.name)
        else:
            seeker.seek(work)

    def handed_over(self, node: NodeHandle, instance: int, work: RequestState, kv_bytes: int, now: float) -> None:
        seeker = self._seeker
        seeker.at(now)
        seeker.placer.left(node, instance)
        travel_s = kv_bytes / self._kv_bytes_per_s
        work.phase = Phase.DECODE
        work.cached = True
        work.give_grace(travel_s)
        work.has_arrived = True
        seeker.move(work, now + travel_s, "handover")

    def overcommitted(self, node: NodeHandle, record: RequestRecord, now: float) -> None:
        """It is there still, and had better be elsewhere."""
        seeker = self._seeker
        seeker.at(now)
        seeker.lengths.runs(record.model, record.id, record.produced)
        if not self._knobs.disaggregate and not self._knobs.live_moves:
            seeker.decisions.begin(seeker.relieve(node, record))

    def ready(self, node: NodeHandle, model: str, now: float) -> None:
        """Weights are there; perhaps somebody is to be moved to them."""
        seeker = self._seeker
        seeker.at(now)
        seeker.room.changed()
        prepared = seeker.prepared.get(model)
        if prepared is not None and prepared.node is node and prepared.record.id in seeker.works:
            seeker.prepared[model] = prepared._replace(node=None)
            record = msgspec.structs.replace(prepared.record, last_token_s=now)  # it has gone on meanwhile
            seeker.decisions.begin(seeker.relieve(prepared.source, record))

    def lost(self, node: NodeHandle, works: Sequence[RequestState], now: float) -> None:
        """The node is gone; its unfinished requests start over elsewhere, with the tokens they have. The next one is as
        urgent as a first one."""
        seeker = self._seeker
        seeker.at(now)
        seeker.placer.forget_node(node)
        seeker.decisions.lost(node)
        for work in works:
            work.cached = False
            work.moves += 1
            if self._knobs.disaggregate:
                work.phase = Phase.PREFILL
            if work.produced:
                work.first_due_s = min(work.first_due_s, now + work.ttft_s - work.tpot_s * work.produced)
            seeker.seek(work)
