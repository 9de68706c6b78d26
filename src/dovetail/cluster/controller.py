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
from dovetail.cluster.placer import Search
from dovetail.cluster.seeker import TOO_LATE, Seeker
from dovetail.cluster.waiting import CHANGED_S
from dovetail.node import protocol
from dovetail.node.work import Phase, RequestRecord, Work
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
        self._travelling: set[int] = set()  # handed over; they have not asked for a decode place yet

    def at(self, now: float) -> None:
        """What somebody else begins through this one happens now."""
        self._at(now)

    # Requests

    def submit(self, works: Sequence[Work], now: float) -> None:
        """The choices of a new request. The first is placed at once or queued, the others follow it."""
        self._at(now)
        leader = works[0]
        self._by_memory.called(leader.model, now)
        if self.knobs.disaggregate and leader.phase is Phase.ANY:
            for work in works:
                work.phase = Phase.PREFILL
        if len(works) > 1:
            self.followers[leader.id] = list(works[1:])
        self._seek(leader)

    def seek_again(self, work: Work) -> None:
        """It has lost its place."""
        self._seek(work)

    def prefilled(self, leader: int, grace_s: float, now: float) -> None:
        """Its prompt is computed: choices of the same request find it there."""
        self._at(now)
        for follower in self.followers.pop(leader, ()):
            if not follower.produced:
                follower.give_grace(grace_s)  # it waited for the same cold start
            self._seek(follower)

    def cancel(self, ids: Iterable[int], now: float) -> None:
        """Nobody wants these any more. Followers of one that goes alone do not go with it."""
        self._at(now)
        ids = set(ids)
        for leader, followers in list(self.followers.items()):
            kept = [work for work in followers if work.id not in ids]
            if leader in ids:
                del self.followers[leader]
                if kept:
                    self.submit(kept, now)
            else:
                self.followers[leader] = kept
        for id in ids:
            self._lengths.ended(id)
            self._forget(id)

    def _forget(self, work_id: int) -> None:
        self._owed.pop(work_id, None)
        self.short_at.pop(work_id, None)
        self.displacing.pop(work_id, None)
        self.early.pop(work_id, None)
        self._travelling.discard(work_id)
        search = self.seeking.pop(work_id, None)
        if search is not None:
            search.is_over = True
        elif self.room.leave(work_id) is None and self.moving.pop(work_id, None) is None:
            self.parked.take(work_id)

    def warm(self, model: str, now: float) -> None:
        """Have an instance of the model before anybody asks for it."""
        self._at(now)
        self.decisions.begin(self._warm(model))

    def _warm(self, model: str) -> Asking[None]:
        self.outbox.append((yield from self.placer.warm(model)))

    @property
    def num_queued(self) -> int:
        return len(self.room) + len(self.moving) + len(self.seeking)

    def queued(self) -> list[Work]:
        """Those who ask for a place, in the order in which they may."""
        return sorted([*self.room, *(search.work for search in self.seeking.values())], key=self.room.order)

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
        for work in self.room.begin_pass(now, self.seeking):
            self.room.leave(work.id)
            self._seek_again(work)
        self.use_idle(now)

    def _retry(self, work_id: int) -> None:
        work = self.moving.pop(work_id, None) or self.parked.take(work_id)
        if work is None:
            return
        has_arrived = work_id in self._travelling
        self._travelling.discard(work_id)
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

    def _take_late(self, late: Sequence[Work], *, in_advance: bool = False) -> None:
        """The most urgent of these gets later deadlines before its own have passed, if it may."""
        late = [one for one in late if one.is_lenient]
        if late:
            work = min(late, key=lambda one: (one.due_s, one.id))
            search = self.room.refusals[work.id]
            self.room.leave(work.id)
            if in_advance:
                self.early.setdefault(work.id, work.due_s)
            self._extend(work, search.prefill_s, None if in_advance else search.decode_s)
            self._seek(work)

    def _reasons(self, work: Work) -> AbstractSet[str]:
        """Why it got no place when it last asked."""
        return self.room.refusals[work.id].refusals.keys()

    # What nodes report

    def answered(self, number: int, answer: protocol.Answer, now: float) -> None:
        self._at(now)
        self.decisions.answered(number, answer)

    def finished(self, node: NodeHandle, instance: int, work: Work, now: float) -> None:
        self.ends.note(now)
        self._outputs.add(work.produced)
        self._lengths.add(work.model, work.produced)
        self._by_memory.ended(work.model, work.produced)
        self.short_at.pop(work.id, None)
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

    def lost(self, node: NodeHandle, works: Sequence[Work], now: float) -> None:
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

    def evicted(self, node: NodeHandle, instance: int, work: Work, reason: str, now: float) -> None:
        self._at(now)
        self.placer.left(node, instance)
        self._lengths.runs(work.model, work.id, work.produced)
        if reason == "kv_short" and self.knobs.finish_begun and work.produced:
            self._owed[work.id] = node.name
        work.cached = False
        if reason == "paused":
            self._park(work)
            self.outbox.append(Moving(work, self._back_s(work), reason))
        elif reason == "kv_short" and self.short_at.get(work.id) == work.produced:
            self._move(work, now + self.knobs.retry_s, reason)  # it got no token there either: nowhere does it fit now
        elif reason == "kv_short":  # at once it would only come back to where it did not fit
            self.short_at[work.id] = work.produced
            self._seek(work, avoided=node.name)
        else:
            self._seek(work)

    def overcommitted(self, node: NodeHandle, record: RequestRecord, now: float) -> None:
        self._at(now)
        self._lengths.runs(record.model, record.id, record.produced)
        if not self.knobs.disaggregate and not self.knobs.live_moves:
            self.decisions.begin(self._relieve(node, record))

    def handed_over(self, node: NodeHandle, instance: int, work: Work, kv_bytes: int, now: float) -> None:
        self._at(now)
        self.placer.left(node, instance)
        travel_s = kv_bytes / self._kv_bytes_per_s
        work.phase = Phase.DECODE
        work.cached = True
        work.give_grace(travel_s)
        self._travelling.add(work.id)
        self._move(work, now + travel_s, "handover")
