"""What becomes of each request between its arrival and its end, over all nodes: what comes in, waits, comes back, moves
and leaves. How a place is found, and what becomes of a request that finds none, is its part `seeker`'s.

A state machine like the node: requests, notices, answers and the time come in, decisions go out through `outbox`. It
keeps every request that has no place and forgets one that has got a place or has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from heapq import heappop

import msgspec

from dovetail.cluster.asking import Asking
from dovetail.cluster.decisions import Moving
from dovetail.cluster.handle import NodeHandle
from dovetail.cluster.request import RequestState, Search
from dovetail.cluster.seeker import TOO_LATE, Seeker
from dovetail.cluster.waiting import CHANGED_S
from dovetail.node import protocol
from dovetail.node.work import Phase, RequestRecord
from dovetail.policy.headroom import Refusal
from dovetail.policy.knobs import Knobs
from dovetail.policy.placement import is_hopeless

FIRST_LATE = {Refusal.FIRST_TOKEN_LATE}
EARLY_LIMIT_S = 60.0  # first tokens that are due later than this after they were asked for are put off only when late


class Controller:
    def __init__(self, nodes: Sequence[NodeHandle], knobs: Knobs, *, kv_bytes_per_s: float = 12.5e9) -> None:
        self.seeker = Seeker(nodes, knobs)
        self.knobs = knobs
        self._kv_bytes_per_s = kv_bytes_per_s
        self._resume_after_s = float("-inf")  # idle devices do not bring swapped-out work back before
        self._look_s = float("-inf")  # with swapped-out work: when to look again whether a device is idle

    # Requests

    def submit(self, works: Sequence[RequestState], now: float) -> None:
        """The choices of a new request. The first is placed at once or queued, the others follow it."""
        self.seeker.at(now)
        leader = works[0]
        self.seeker.works.update((work.id, work) for work in works)
        self.seeker.by_memory.called(leader.model, now)
        if self.knobs.disaggregate and leader.phase is Phase.ANY:
            for work in works:
                work.phase = Phase.PREFILL
        if len(works) > 1:
            leader.followers = tuple(works[1:])
        self.seeker.seek(leader)

    def prefilled(self, leader: int, grace_s: float, now: float) -> None:
        """Its prompt is computed: choices of the same request find it there."""
        self.seeker.at(now)
        first = self.seeker.works.get(leader)
        if first is None:
            return
        followers, first.followers = first.followers, ()
        for follower in followers:
            if not follower.produced:
                follower.give_grace(grace_s)  # it waited for the same cold start
            self.seeker.seek(follower)

    def cancel(self, ids: Iterable[int], now: float) -> None:
        """Nobody wants these any more. Followers of one that goes alone do not go with it."""
        self.seeker.at(now)
        ids = set(ids)
        for leader in [work for work in self.seeker.works.values() if work.followers]:
            kept = tuple(work for work in leader.followers if work.id not in ids)
            leader.followers = () if leader.id in ids else kept
            if leader.id in ids and kept:
                self.submit(kept, now)
        for id in ids:
            self.seeker.lengths.ended(id)
            if id in self.seeker.works:
                self._forget(self.seeker.works[id])

    def _forget(self, work: RequestState) -> None:
        self.seeker.settle_debt(work)
        work.waits_for_room_s = 0.0
        if work.search is not None:
            work.search.is_over = True
            work.search = None
        elif self.seeker.room.leave(work.id) is None and not work.is_moving:
            self.seeker.parked.take(work.id)
        work.is_moving = False

    def warm(self, model: str, now: float) -> None:
        """Have an instance of the model before anybody asks for it."""
        self.seeker.at(now)
        self.seeker.decisions.begin(self._warm(model))

    def _warm(self, model: str) -> Asking[None]:
        self.seeker.outbox.append((yield from self.seeker.placer.warm(model)))

    @property
    def num_queued(self) -> int:
        return len(self.seeker.room) + sum(
            one.is_moving or one.search is not None for one in self.seeker.works.values()
        )

    def queued(self) -> list[RequestState]:
        """Those who ask for a place, in the order in which they may."""
        seeking = [one for one in self.seeker.works.values() if one.search is not None]
        return sorted([*self.seeker.room, *seeking], key=self.seeker.room.order)

    # Time

    def next_wake_s(self) -> float | None:
        """When `wake` has something to do."""
        next_s = self.seeker.room.next_s() if self.seeker.room else None
        if self.seeker.timed and (next_s is None or self.seeker.timed[0][0] < next_s):
            next_s = self.seeker.timed[0][0]
        if self.seeker.parked and (next_s is None or self._look_s < next_s):
            next_s = self._look_s
        if self.seeker.decisions:
            expiry_s = self.seeker.decisions.next_expiry_s()
            if expiry_s is not None and (next_s is None or expiry_s < next_s):
                next_s = expiry_s
        return next_s

    @property
    def wants_idle(self) -> bool:
        """An idle device would be of use to somebody (`idle`)."""
        return bool(self.seeker.parked) or (self.knobs.extend_deadlines and len(self.seeker.room) > 0)

    def wake(self, now: float) -> None:
        """Those whose time has come ask again; those who waited too long are given up."""
        self.seeker.at(now)
        self.seeker.decisions.expire()
        self._look_s = now + self.knobs.retry_s
        for work in self.seeker.room.expired(now):
            search = self.seeker.room.refusals[work.id]
            self.seeker.room.leave(work.id)
            self.seeker.give_up(work, search)
        while self.seeker.timed and self.seeker.timed[0][0] <= now:
            self._retry(heappop(self.seeker.timed)[1])
        for work in self.seeker.room.begin_pass(now):
            self.seeker.room.leave(work.id)
            self.seeker.seek_in_order(work)
        self.use_idle(now)

    def _retry(self, work_id: int) -> None:
        work = self.seeker.works.get(work_id)
        if work is None or not (work.is_moving or self.seeker.parked.take(work_id)):
            return
        has_arrived, work.is_moving, work.has_arrived = work.has_arrived, False, False
        if not has_arrived and is_hopeless(work.due_s, self.seeker.now_s):  # what has just come over is tried first
            self.seeker.give_up(work, Search(work))
        else:
            self.seeker.seek(work)

    def use_idle(self, now: float) -> None:
        """Devices that have nothing to do, as long as that may help somebody."""
        if self.wants_idle:
            for node in self.seeker.placer.nodes:
                if node.up and node.is_idle:
                    self.idle(now)

    def idle(self, now: float) -> None:
        """Nothing can run somewhere: better that swapped-out work comes back, or that somebody is late, than that."""
        self.seeker.at(now)
        if self.seeker.parked and now >= self._resume_after_s:
            self.seeker.resume()
            self._resume_after_s = now + CHANGED_S
        if self.knobs.extend_deadlines:
            self._take_late([one for one in self.seeker.room if TOO_LATE & self._reasons(one)])

    def lacks_prompts(self, node: NodeHandle, now: float) -> None:
        """The node computes nothing but answers: between these a prompt that will be late is begun now rather than when
        it is late. Until then it may yet have a place by other means."""
        self.seeker.at(now)
        late = [one for one in self.seeker.room if one.ttft_s < EARLY_LIMIT_S and node.offer_of(one.model) is not None]
        self._take_late([one for one in late if TOO_LATE & self._reasons(one) == FIRST_LATE], in_advance=True)

    def _take_late(self, late: Sequence[RequestState], *, in_advance: bool = False) -> None:
        """The most urgent of these gets later deadlines before its own have passed, if it may."""
        late = [one for one in late if one.is_lenient]
        if late:
            work = min(late, key=lambda one: (one.due_s, one.id))
            search = self.seeker.room.refusals[work.id]
            self.seeker.room.leave(work.id)
            if in_advance:
                work.early_due_s = work.due_s if work.early_due_s is None else work.early_due_s
            self.seeker.extend(work, search.prefill_s, None if in_advance else search.decode_s)
            self.seeker.seek(work)

    def _reasons(self, work: RequestState) -> AbstractSet[str]:
        """Why it got no place when it last asked."""
        return self.seeker.room.refusals[work.id].refusals.keys()

    # What nodes report

    def answered(self, number: int, answer: protocol.Answer, now: float) -> None:
        self.seeker.at(now)
        self.seeker.decisions.answered(number, answer)

    def finished(self, node: NodeHandle, instance: int, work: RequestState, now: float) -> None:
        self.seeker.ends.note(now)
        self.seeker.outputs.add(work.produced)
        self.seeker.lengths.add(work.model, work.produced)
        self.seeker.by_memory.ended(work.model, work.produced)
        self.seeker.lengths.ended(work.id)
        self.seeker.left(node, instance)

    def changed(self) -> None:
        """There may be a place now."""
        self.seeker.room.changed()

    def ready(self, node: NodeHandle, model: str, now: float) -> None:
        """Weights are there; perhaps somebody is to be moved to them."""
        self.seeker.at(now)
        self.changed()
        prepared = self.seeker.prepared.get(model)
        if prepared is not None and prepared.node is node and prepared.record.id in self.seeker.works:
            self.seeker.prepared[model] = prepared._replace(node=None)
            record = msgspec.structs.replace(prepared.record, last_token_s=now)  # it has gone on meanwhile
            self.seeker.decisions.begin(self.seeker.relieve(prepared.source, record))

    def closed(self, node: NodeHandle, instance: int, now: float, *, is_gone: bool) -> None:
        """The instance takes no more work; its memory is free, if it is gone."""
        self.seeker.at(now)
        self.seeker.placer.forget(node, instance)
        self.seeker.room.changed()
        if self.seeker.parked and is_gone:
            self.seeker.resume()

    def lost(self, node: NodeHandle, works: Sequence[RequestState], now: float) -> None:
        """The node is gone; its unfinished requests start over elsewhere, with the tokens they have. The next one is as
        urgent as a first one."""
        self.seeker.at(now)
        self.seeker.placer.forget_node(node)
        self.seeker.decisions.lost(node)
        for work in works:
            work.cached = False
            work.moves += 1
            if self.knobs.disaggregate:
                work.phase = Phase.PREFILL
            if work.produced:
                work.first_due_s = min(work.first_due_s, now + work.ttft_s - work.tpot_s * work.produced)
            self.seeker.seek(work)

    def evicted(self, node: NodeHandle, instance: int, work: RequestState, reason: str, now: float) -> None:
        self.seeker.at(now)
        self.seeker.placer.left(node, instance)
        self.seeker.lengths.runs(work.model, work.id, work.produced)
        if reason == "kv_short" and self.knobs.finish_begun and work.produced:
            self.seeker.owe(work, node.name)
        work.cached = False
        if reason == "paused":
            self.seeker.park(work)
            self.seeker.outbox.append(Moving(work, self.seeker.back_s(work), reason))
        elif reason == "kv_short" and work.short_at == work.produced:
            self.seeker.move(
                work, now + self.knobs.retry_s, reason
            )  # it got no token there either: nowhere does it fit now
        elif reason == "kv_short":  # at once it would only come back to where it did not fit
            work.short_at = work.produced
            self.seeker.seek(work, avoided=node.name)
        else:
            self.seeker.seek(work)

    def overcommitted(self, node: NodeHandle, record: RequestRecord, now: float) -> None:
        self.seeker.at(now)
        self.seeker.lengths.runs(record.model, record.id, record.produced)
        if not self.knobs.disaggregate and not self.knobs.live_moves:
            self.seeker.decisions.begin(self.seeker.relieve(node, record))

    def handed_over(self, node: NodeHandle, instance: int, work: RequestState, kv_bytes: int, now: float) -> None:
        self.seeker.at(now)
        self.seeker.placer.left(node, instance)
        travel_s = kv_bytes / self._kv_bytes_per_s
        work.phase = Phase.DECODE
        work.cached = True
        work.give_grace(travel_s)
        work.has_arrived = True
        self.seeker.move(work, now + travel_s, "handover")
