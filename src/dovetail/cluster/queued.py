"""Requests without a place, and when each asks again: when something has changed, every so often, when its time has
come, or when a device has nothing else to do. How one finds a place, and what becomes of it without, is `seeker`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from heapq import heappop

from dovetail.cluster.handle import NodeHandle
from dovetail.cluster.request import RequestState, Search
from dovetail.cluster.seeker import TOO_LATE, Seeker
from dovetail.policy.compositions import Composition
from dovetail.policy.headroom import Refusal
from dovetail.policy.placement import is_hopeless

FIRST_LATE = {Refusal.FIRST_TOKEN_LATE}
EARLY_LIMIT_S = 60.0  # first tokens that are due later than this after they were asked for are put off only when late


class QueuedRequests:
    def __init__(self, seeker: Seeker, composition: Composition) -> None:
        self._seeker = seeker
        self._phases = composition.phases

    def __len__(self) -> int:
        seeker = self._seeker
        return len(seeker.room) + sum(one.is_moving or one.search is not None for one in seeker.works.values())

    def in_order(self) -> list[RequestState]:
        """Those who ask for a place, in the order in which they may."""
        seeking = [one for one in self._seeker.works.values() if one.search is not None]
        return sorted([*self._seeker.room, *seeking], key=self._seeker.room.order)

    def by_model(self) -> Counter[str]:
        return Counter(work.model for work in self.in_order())

    def begin(self, works: Sequence[RequestState], now: float) -> None:
        """The choices of a new request. The first is placed at once or queued, the others follow it."""
        seeker = self._seeker
        seeker.at(now)
        leader = works[0]
        seeker.works.update((work.id, work) for work in works)
        seeker.queue.called(leader.model, now)
        for work in works:
            work.phase = self._phases.first(leader.phase)
        if len(works) > 1:
            leader.followers = tuple(works[1:])
        seeker.seek(leader)

    def prefilled(self, leader: int, grace_s: float, now: float) -> None:
        """Its prompt is computed: choices of the same request find it there."""
        self._seeker.at(now)
        first = self._seeker.works.get(leader)
        if first is None:
            return
        followers, first.followers = first.followers, ()
        for follower in followers:
            if not follower.produced:
                follower.give_grace(grace_s)  # it waited for the same cold start
            self._seeker.seek(follower)

    def remove(self, ids: set[int], now: float) -> None:
        """Nobody wants these any more. Followers of one that goes alone do not go with it."""
        works = self._seeker.works
        for leader in [work for work in works.values() if work.followers]:
            kept = tuple(work for work in leader.followers if work.id not in ids)
            leader.followers = () if leader.id in ids else kept
            if leader.id in ids and kept:
                self.begin(kept, now)
        for id in ids:
            self._seeker.lengths.ended(id)
            self._forget(works[id])

    def _forget(self, work: RequestState) -> None:
        self._seeker.settle_debt(work)
        work.waits_for_room_s = 0.0
        if work.search is not None:
            work.search.is_over = True
            work.search = None
        else:
            self._seeker.room.leave(work.id)
        work.is_moving = False

    # Time

    def next_wake_s(self) -> float | None:
        """When `wake` has something to do."""
        seeker = self._seeker
        next_s = seeker.room.next_s() if seeker.room else None
        if seeker.timed and (next_s is None or seeker.timed[0][0] < next_s):
            next_s = seeker.timed[0][0]
        if seeker.decisions:
            expiry_s = seeker.decisions.next_expiry_s()
            if expiry_s is not None and (next_s is None or expiry_s < next_s):
                next_s = expiry_s
        return next_s

    def wake(self, now: float) -> None:
        """Those whose time has come ask again; those who waited too long are given up."""
        seeker = self._seeker
        seeker.at(now)
        seeker.decisions.expire()
        for work in seeker.room.expired(now):
            search = work.last_search
            assert search is not None
            seeker.room.leave(work.id)
            seeker.give_up(work, search)
        while seeker.timed and seeker.timed[0][0] <= now:
            self._retry(heappop(seeker.timed)[1])
        for work in seeker.room.begin_pass(now):
            seeker.room.leave(work.id)
            seeker.seek_in_order(work)
        self.use_idle(now)

    def _retry(self, work_id: int) -> None:
        seeker = self._seeker
        work = seeker.works.get(work_id)
        if work is None or not work.is_moving:
            return
        has_arrived, work.is_moving, work.has_arrived = work.has_arrived, False, False
        if not has_arrived and is_hopeless(work.due_s, seeker.now_s):  # what has just come over is tried first
            seeker.give_up(work, Search(work))
        else:
            seeker.seek(work)

    # Devices that have nothing else to do

    @property
    def wants_idle(self) -> bool:
        """An idle device would be of use to somebody (`idle`)."""
        return self._seeker.lateness.begins_early(len(self._seeker.room))

    def use_idle(self, now: float) -> None:
        """Devices that have nothing to do, as long as that may help somebody."""
        if self.wants_idle:
            for node in self._seeker.placer.nodes:
                if node.up and node.is_idle:
                    self.idle(now)

    def idle(self, now: float) -> None:
        """Nothing can run somewhere: better that somebody is late than that."""
        seeker = self._seeker
        seeker.at(now)
        if self.wants_idle:
            self._take_late([one for one in seeker.room if TOO_LATE & self._reasons(one)])

    @property
    def may_begin_late(self) -> bool:
        """Somebody may get a place on a node that computes nothing but answers."""
        return self.wants_idle

    def begin_late(self, prompting: Iterable[NodeHandle], now: float) -> None:
        """Prompts that will be late have the time between answers that no other prompt wants; `prompting`: nodes that
        compute a prompt."""
        busy = {node.name for node in prompting}
        for node in self._seeker.placer.nodes:
            if node.up and node.name not in busy and not node.is_draining:
                self._lacks_prompts(node, now)

    def _lacks_prompts(self, node: NodeHandle, now: float) -> None:
        """The node computes nothing but answers: between these a prompt that will be late is begun now rather than when
        it is late. Until then it may yet have a place by other means."""
        seeker = self._seeker
        seeker.at(now)
        late = [one for one in seeker.room if one.ttft_s < EARLY_LIMIT_S and node.offer_of(one.model) is not None]
        self._take_late([one for one in late if TOO_LATE & self._reasons(one) == FIRST_LATE], in_advance=True)

    def _take_late(self, late: Sequence[RequestState], *, in_advance: bool = False) -> None:
        """Who goes first or is most urgent of these gets later deadlines before its own have passed, if it may."""
        late = [one for one in late if one.is_lenient and not one.is_best_effort]
        if late:
            work = min(late, key=lambda one: (not one.goes_first, one.due_s, one.id))
            search = work.last_search
            assert search is not None
            self._seeker.room.leave(work.id)
            if in_advance:
                work.early_due_s = work.due_s if work.early_due_s is None else work.early_due_s
            self._seeker.extend(work, search.prefill_s, None if in_advance else search.decode_s)
            self._seeker.seek(work)

    def _reasons(self, work: RequestState) -> AbstractSet[str]:
        """Why it got no place when it last asked."""
        return work.last_search.refusals.keys() if work.last_search is not None else set()
