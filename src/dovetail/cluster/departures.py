"""What becomes of a request that has left its node: it has ended, or needs another place, at once or later."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dovetail.cluster.handle import NodeHandle
from dovetail.cluster.migration import Migrations
from dovetail.cluster.request import RequestState
from dovetail.cluster.seeker import Seeker
from dovetail.cluster.waiting import RETRY_S
from dovetail.node.protocol import GIVES_WAY, Evicted, Finished, HandedOver
from dovetail.policy.headroom import INFINITY
from dovetail.policy.work import Phase, RequestRecord

GAVE_WAY_S = 5.0  # best effort that gave way leaves the memory to others for so long
KV_BYTES_PER_S = 12.5e9  # of blocks that are handed over


class Departures:
    def __init__(self, seeker: Seeker, migrations: Migrations) -> None:
        self._seeker = seeker
        self._migrations = migrations

    def parted(self, node: NodeHandle, notice: Finished | Evicted | HandedOver, now: float) -> RequestState | None:
        """A request has left a node; returns it if it has all its tokens. One that was cancelled meanwhile has left
        already."""
        seeker, migrations = self._seeker, self._migrations
        hold = notice.hold if isinstance(notice, Evicted) else 0
        if hold and not migrations.was_handed_over(notice.request.id, hold):
            seeker.at(now)
            migrations.given_up(node, notice.request.id, hold)
            return None
        work = seeker.works.get(notice.request.id)
        if work is None or not work.is_on(node):
            return None
        work.place = None
        seeker.at(now)
        record = work.record() if hold else notice.request  # of a copy, the source's last word counts
        if record.produced < work.produced:  # it was handed over with more than it had come to there
            record = msgspec.structs.replace(record, produced=work.produced)
        work.take(record)
        if isinstance(notice, Evicted) and migrations.let_go(node, notice.instance, record):
            return None
        migrations.over(work.id)
        if isinstance(notice, Finished):
            self.finished(node, notice.instance, work, now)
            return work
        if isinstance(notice, Evicted):
            self.evicted(node, notice.instance, work, notice.reason, now)
        else:
            self.handed_over(node, notice.instance, work, notice.kv_bytes, now)
        return None

    def finished(self, node: NodeHandle, instance: int, work: RequestState, now: float) -> None:
        seeker = self._seeker
        seeker.ends.note(now)
        seeker.outputs.add(work.produced)
        seeker.lengths.add(work.model, work.produced)
        seeker.likeness.add(work.model, work.produced)
        seeker.lengths.ended(work.id)
        seeker.left(node, instance, is_best_effort=work.is_best_effort)

    def evicted(self, node: NodeHandle, instance: int, work: RequestState, reason: str, now: float) -> None:
        seeker = self._seeker
        seeker.at(now)
        seeker.placer.left(node, instance, is_best_effort=work.is_best_effort)
        seeker.lengths.runs(work.model, work.id, work.produced)
        if reason == "kv_short" and seeker.lateness.owes_place(work.produced):
            seeker.owe(work, node.name)
        work.cached = False
        if reason == GIVES_WAY:
            seeker.move(work, now + GAVE_WAY_S, reason)
        elif reason == "kv_short" and work.short_at == work.produced:
            # It got no token there either: nowhere does it fit now.
            seeker.move(work, now + RETRY_S, reason)
        elif reason == "kv_short":  # at once it would only come back to where it did not fit
            work.short_at = work.produced
            seeker.seek(work, avoided=node.name)
        else:
            seeker.seek(work)

    def handed_over(self, node: NodeHandle, instance: int, work: RequestState, kv_bytes: int, now: float) -> None:
        seeker = self._seeker
        seeker.at(now)
        seeker.placer.left(node, instance, is_best_effort=work.is_best_effort)
        travel_s = kv_bytes / KV_BYTES_PER_S
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

    def ready(self, node: NodeHandle, model: str, now: float) -> None:
        """Weights are there."""
        seeker = self._seeker
        seeker.at(now)
        seeker.room.changed()

    def lost(self, node: NodeHandle, works: Sequence[RequestState], now: float) -> None:
        """The node is gone; its unfinished requests start over elsewhere, with the tokens they have. The next one is as
        urgent as a first one."""
        seeker = self._seeker
        seeker.at(now)
        seeker.placer.forget_node(node)
        seeker.decisions.lost(node)
        leaders: dict[int, RequestState] = {}  # by request: the first of its choices, which the others follow
        for work in works:
            work.cached = False
            work.moves += 1
            if work.phase is not Phase.ANY:
                work.phase = Phase.PREFILL
            if work.produced:
                work.first_due_s = min(work.first_due_s, now + work.ttft_s - work.tpot_s * work.produced)
            leader = leaders.setdefault(work.group, work)
            if leader is not work:
                leader.followers += (work, *work.followers)
                work.followers = ()
                work.place_by_s = INFINITY  # the leader's counts
        for leader in leaders.values():
            seeker.seek(leader)
