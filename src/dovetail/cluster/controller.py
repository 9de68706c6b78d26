"""What becomes of each request between its arrival and its end, over all nodes: what comes in, waits, comes back, moves
and leaves. How a place is found, and what becomes of a request that finds none, is `seeker`'s.

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


class Controller(Seeker):
    def __init__(self, nodes: Sequence[NodeHandle], knobs: Knobs, *, kv_bytes_per_s: float = 12.5e9) -> None:
        super().__init__(nodes, knobs)
        self._kv_bytes_per_s = kv_bytes_per_s
        self._resume_after_s = float("-inf")  # idle devices do not bring swapped-out work back before
        self._look_s = float("-inf")  # with swapped-out work: when to look again whether a device is idle

    def at(self, now: float) -> None:
        """What somebody else begins through this one happens now."""
        self._at(now)

    # Requests

    def submit(self, works: Sequence[RequestState], now: float) -> None:
        """The choices of a new request. The first is placed at once or queued, the others follow it."""
        self._at(now)
        leader = works[0]
        self.works.update((work.id, work) for work in works)
        self._by_memory.called(leader.model, now)
        if self.knobs.disaggregate and leader.phase is Phase.ANY:
            for work in works:
                work.phase = Phase.PREFILL
        if len(works) > 1:
            leader.followers = tuple(works[1:])
        self._seek(leader)

    def seek_again(self, work: RequestState) -> None:
        """It has lost its place."""
        self._seek(work)

    def prefilled(self, leader: int, grace_s: float, now: float) -> None:
        """Its prompt is computed: choices of the same request find it there."""
        self._at(now)
        first = self.works.get(leader)
        if first is None:
            return
        followers, first.followers = first.followers, ()
        for follower in followers:
            if not follower.produced:
                follower.give_grace(grace_s)  # it waited for the same cold start
            self._seek(follower)

    def cancel(self, ids: Iterable[int], now: float) -> None:
        """Nobody wants these any more. Followers of one that goes alone do not go with it."""
        self._at(now)
        ids = set(ids)
        for leader in [work for work in self.works.values() if work.followers]:
            kept = tuple(work for work in leader.followers if work.id not in ids)
            leader.followers = () if leader.id in ids else kept
            if leader.id in ids and kept:
                self.submit(kept, now)
        for id in ids:
            self._lengths.ended(id)
            if id in self.works:
                self._forget(self.works[id])

    def _forget(self, work: RequestState) -> None:
        self._settle_debt(work)
        work.waits_for_room_s = 0.0
        if work.search is not None:
            work.search.is_over = True
            work.search = None
        elif self.room.leave(work.id) is None and not work.is_moving:
            self.parked.take(work.id)
        work.is_moving = False

    def warm(self, model: str, now: float) -> None:
        """Have an instance of the model before anybody asks for it."""
        self._at(now)
        self.decisions.begin(self._warm(model))

    def _warm(self, model: str) -> Asking[None]:
        self.outbox.append((yield from self.placer.warm(model)))

    @property
    def num_queued(self) -> int:
        return len(self.room) + sum(one.is_moving or one.search is not None for one in self.works.values())

    def queued(self) -> list[RequestState]:
        """Those who ask for a place, in the order in which they may."""
        seeking = [one for one in self.works.values() if one.search is not None]
        return sorted([*self.room, *seeking], key=self.room.order)

    # Time

    def next_wake_s(self) -> float | None:
        """When `wake` has something to do."""
        next_s = self.room.next_s() if self.room else None
        if self._timed and (next_s is None or self._timed[0][0] < next_s):
            next_s = self._timed[0][0]
        if self.parked and (next_s is None or self._look_s < next_s):
            next_s = self._look_s
        if self.decisions:
            expiry_s = self.decisions.next_expiry_s()
            if expiry_s is not None and (next_s is None or expiry_s < next_s):
                next_s = expiry_s
        return next_s

    @property
    def wants_idle(self) -> bool:
        """An idle device would be of use to somebody (`idle`)."""
        return bool(self.parked) or (self.knobs.extend_deadlines and len(self.room) > 0)

    def wake(self, now: float) -> None:
        """Those whose time has come ask again; those who waited too long are given up."""
        self._at(now)
        self.decisions.expire()
        self._look_s = now + self.knobs.retry_s
        for work in self.room.expired(now):
            search = self.room.refusals[work.id]
            self.room.leave(work.id)
            self._give_up(work, search)
        while self._timed and self._timed[0][0] <= now:
            self._retry(heappop(self._timed)[1])
        for work in self.room.begin_pass(now):
            self.room.leave(work.id)
            self._seek_again(work)
        self.use_idle(now)

    def _retry(self, work_id: int) -> None:
        work = self.works.get(work_id)
        if work is None or not (work.is_moving or self.parked.take(work_id)):
            return
        has_arrived, work.is_moving, work.has_arrived = work.has_arrived, False, False
        if not has_arrived and is_hopeless(work.due_s, self._now):  # what has just come over is tried first
            self._give_up(work, Search(work))
        else:
            self._seek(work)

    def use_idle(self, now: float) -> None:
        """Devices that have nothing to do, as long as that may help somebody."""
        if self.wants_idle:
            for node in self.placer.nodes:
                if node.up and node.is_idle:
                    self.idle(now)

    def idle(self, now: float) -> None:
        """Nothing can run somewhere: better that swapped-out work comes back, or that somebody is late, than that."""
        self._at(now)
        if self.parked and now >= self._resume_after_s:
            self._resume()
            self._resume_after_s = now + CHANGED_S
        if self.knobs.extend_deadlines:
            self._take_late([one for one in self.room if TOO_LATE & self._reasons(one)])

    def lacks_prompts(self, node: NodeHandle, now: float) -> None:
        """The node computes nothing but answers: between these a prompt that will be late is begun now rather than when
        it is late. Until then it may yet have a place by other means."""
        self._at(now)
        late = [one for one in self.room if one.ttft_s < EARLY_LIMIT_S and node.offer_of(one.model) is not None]
        self._take_late([one for one in late if TOO_LATE & self._reasons(one) == FIRST_LATE], in_advance=True)

    def _take_late(self, late: Sequence[RequestState], *, in_advance: bool = False) -> None:
        """The most urgent of these gets later deadlines before its own have passed, if it may."""
        late = [one for one in late if one.is_lenient]
        if late:
            work = min(late, key=lambda one: (one.due_s, one.id))
            search = self.room.refusals[work.id]
            self.room.leave(work.id)
            if in_advance:
                work.early_due_s = work.due_s if work.early_due_s is None else work.early_due_s
            self._extend(work, search.prefill_s, None if in_advance else search.decode_s)
            self._seek(work)

    def _reasons(self, work: RequestState) -> AbstractSet[str]:
        """Why it got no place when it last asked."""
        return self.room.refusals[work.id].refusals.keys()

    # What nodes report

    def answered(self, number: int, answer: protocol.Answer, now: float) -> None:
        self._at(now)
        self.decisions.answered(number, answer)

    def finished(self, node: NodeHandle, instance: int, work: RequestState, now: float) -> None:
        self.ends.note(now)
        self._outputs.add(work.produced)
        self._lengths.add(work.model, work.produced)
        self._by_memory.ended(work.model, work.produced)
        self._lengths.ended(work.id)
        self.left(node, instance)

    def changed(self) -> None:
        """There may be a place now."""
        self.room.changed()

    def ready(self, node: NodeHandle, model: str, now: float) -> None:
        """Weights are there; perhaps somebody is to be moved to them."""
        self._at(now)
        self.changed()
        prepared = self._prepared.get(model)
        if prepared is not None and prepared.node is node and prepared.record.id in self.works:
            self._prepared[model] = prepared._replace(node=None)
            record = msgspec.structs.replace(prepared.record, last_token_s=now)  # it has gone on meanwhile
            self.decisions.begin(self._relieve(prepared.source, record))

    def closed(self, node: NodeHandle, instance: int, now: float, *, is_gone: bool) -> None:
        """The instance takes no more work; its memory is free, if it is gone."""
        self._at(now)
        self.placer.forget(node, instance)
        self.room.changed()
        if self.parked and is_gone:
            self._resume()

    def lost(self, node: NodeHandle, works: Sequence[RequestState], now: float) -> None:
        """The node is gone; its unfinished requests start over elsewhere, with the tokens they have. The next one is as
        urgent as a first one."""
        self._at(now)
        self.placer.forget_node(node)
        self.decisions.lost(node)
        for work in works:
            work.cached = False
            work.moves += 1
            if self.knobs.disaggregate:
                work.phase = Phase.PREFILL
            if work.produced:
                work.first_due_s = min(work.first_due_s, now + work.ttft_s - work.tpot_s * work.produced)
            self._seek(work)

    def evicted(self, node: NodeHandle, instance: int, work: RequestState, reason: str, now: float) -> None:
        self._at(now)
        self.placer.left(node, instance)
        self._lengths.runs(work.model, work.id, work.produced)
        if reason == "kv_short" and self.knobs.finish_begun and work.produced:
            self._owe(work, node.name)
        work.cached = False
        if reason == "paused":
            self._park(work)
            self.outbox.append(Moving(work, self._back_s(work), reason))
        elif reason == "kv_short" and work.short_at == work.produced:
            self._move(work, now + self.knobs.retry_s, reason)  # it got no token there either: nowhere does it fit now
        elif reason == "kv_short":  # at once it would only come back to where it did not fit
            work.short_at = work.produced
            self._seek(work, avoided=node.name)
        else:
            self._seek(work)

    def overcommitted(self, node: NodeHandle, record: RequestRecord, now: float) -> None:
        self._at(now)
        self._lengths.runs(record.model, record.id, record.produced)
        if not self.knobs.disaggregate and not self.knobs.live_moves:
            self.decisions.begin(self._relieve(node, record))

    def handed_over(self, node: NodeHandle, instance: int, work: RequestState, kv_bytes: int, now: float) -> None:
        self._at(now)
        self.placer.left(node, instance)
        travel_s = kv_bytes / self._kv_bytes_per_s
        work.phase = Phase.DECODE
        work.cached = True
        work.give_grace(travel_s)
        work.has_arrived = True
        self._move(work, now + travel_s, "handover")
