"""What becomes of each request between its arrival and its end, over all nodes: placing, waiting, retrying, extending
deadlines, refusing, pausing and moving.

A state machine like the node: requests, notices and the time come in, decisions go out through `outbox`. It keeps every
request that has no place and forgets one that has got a place or has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush

from dovetail.cluster.decisions import Decision, Extended, Moving, Placed, Queued, Refused
from dovetail.cluster.placer import MAX_INSTANCES, Placer
from dovetail.cluster.swapped import SwappedOut
from dovetail.cluster.waiting import CHANGED_S, WaitingRoom
from dovetail.node.events import (
    Evicted,
    Finished,
    HandedOver,
    InstanceClosed,
    InstanceGone,
    InstanceReady,
    Notice,
    Overcommitted,
)
from dovetail.node.ports import NodeHandle
from dovetail.node.work import Phase, Work
from dovetail.policy.headroom import Refusal
from dovetail.policy.knobs import Knobs
from dovetail.policy.lengths import AnswerLengths
from dovetail.policy.memory import OutputMean
from dovetail.policy.placement import Hosting, is_hopeless
from dovetail.profiles.live import LiveLatency

MAX_RETURNS = 24  # instances asked, all in all, to take back swapped-out requests when one of their model is placed
MAX_TAKEN_BACK = 16  # long answers, for one newcomer
KEPT_ENDS = 16
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1.0, 60.0
# Refusals that go away with later deadlines.
TOO_LATE = {Refusal.FIRST_TOKEN_LATE, Refusal.DECODE_OVERCOMMITTED, Refusal.HARDWARE, Refusal.LINK}

# Refusals that go away when others give way.
SCARCE = {Refusal.MEMORY, Refusal.NEIGHBOUR_LATE, *TOO_LATE}


class Controller:
    def __init__(self, nodes: Sequence[NodeHandle], knobs: Knobs, *, kv_bytes_per_s: float = 12.5e9) -> None:
        self.knobs = knobs
        self.placer = Placer(nodes, knobs)
        self.outbox: list[Decision] = []
        self.room = WaitingRoom(knobs.retry_s, on_change=knobs.retry_on_change)
        self.moving: dict[int, Work] = {}  # between places, until a time of their own
        self.parked = SwappedOut()
        self.followers: dict[int, list[Work]] = {}  # by leader: choices that wait until the prompt is computed once
        self._kv_bytes_per_s = kv_bytes_per_s
        self._timed: list[tuple[float, int]] = []  # heap of (time, request): moving and parked ones ask again
        self._ends_s: deque[float] = deque(maxlen=KEPT_ENDS)  # when requests last ended
        self._resume_after_s = float("-inf")  # idle devices do not bring swapped-out work back before
        self._look_s = float("-inf")  # with swapped-out work: when to look again whether a device is idle
        self._owed: dict[int, str] = {}  # by answer that was evicted for want of memory: the node, until it has a place
        self._outputs = OutputMean()
        self._lengths = AnswerLengths()
        self._travelling: set[int] = set()  # handed over; they have not asked for a decode place yet

    # Requests

    def submit(self, works: Sequence[Work], now: float) -> None:
        """The choices of a new request. The first is placed at once or queued, the others follow it."""
        leader = works[0]
        if self.knobs.disaggregate and leader.phase is Phase.ANY:
            for work in works:
                work.phase = Phase.PREFILL
        if len(works) > 1:
            self.followers[leader.id] = list(works[1:])
        self._seek(leader, now)

    def prefilled(self, work: Work, now: float) -> None:
        """Its prompt is computed: choices of the same request find it there."""
        for follower in self.followers.pop(work.id, ()):
            if not follower.produced:
                follower.give_grace(work.grace_s)  # it waited for the same cold start
            self._seek(follower, now)

    def cancel(self, ids: Iterable[int], now: float) -> set[int]:
        """Nobody wants these any more; returns those that were without a place. Followers of one that goes alone do
        not go with it."""
        ids = set(ids)
        found: set[int] = set()
        for id in ids:
            self._lengths.ended(id)
        for leader, followers in list(self.followers.items()):
            kept = [work for work in followers if work.id not in ids]
            found.update(work.id for work in followers if work.id in ids)
            if leader in ids:
                del self.followers[leader]
                if kept:
                    self.submit(kept, now)
            else:
                self.followers[leader] = kept
        return found | {id for id in ids if self._take(id) is not None}

    def _take(self, work_id: int) -> Work | None:
        self._owed.pop(work_id, None)
        return self.room.leave(work_id) or self.moving.pop(work_id, None) or self.parked.take(work_id)

    @property
    def num_queued(self) -> int:
        return len(self.room) + len(self.moving)

    # Time

    def next_wake_s(self) -> float | None:
        """When `wake` has something to do."""
        next_s = self.room.next_s()
        if self._timed and (next_s is None or self._timed[0][0] < next_s):
            next_s = self._timed[0][0]
        if self.parked and (next_s is None or self._look_s < next_s):
            next_s = self._look_s
        return next_s

    @property
    def wants_idle(self) -> bool:
        """An idle device would be of use to somebody (`idle`)."""
        return bool(self.parked) or (self.knobs.extend_deadlines and len(self.room) > 0)

    def wake(self, now: float) -> None:
        """Those whose time has come ask again; those who waited too long are given up."""
        self._look_s = now + self.knobs.retry_s
        for work in self.room.expired(now):
            refusals = self.room.refusals[work.id]
            self.room.leave(work.id)
            self._give_up(work, "deadline", refusals, now)
        while self._timed and self._timed[0][0] <= now:
            self._retry(heappop(self._timed)[1], now)
        for work in self.room.begin_pass(now):
            self.room.leave(work.id)
            self._seek(work, now)

    def _retry(self, work_id: int, now: float) -> None:
        work = self.moving.pop(work_id, None) or self.parked.take(work_id)
        if work is None:
            return
        has_arrived = work_id in self._travelling
        self._travelling.discard(work_id)
        if not has_arrived and is_hopeless(work.due_s, now):  # what has just come over is tried before it is given up
            self._give_up(work, "deadline", {}, now)
        else:
            self._seek(work, now)

    def idle(self, node: NodeHandle, now: float) -> None:
        """Nothing can run there: better that swapped-out work comes back, or that somebody is late, than idleness."""
        if self.parked and now >= self._resume_after_s:
            self._resume(now)
            self._resume_after_s = now + CHANGED_S
        if self.knobs.extend_deadlines:
            late = [one for one in self.room if self._is_lenient(one) and TOO_LATE & self.room.refusals[one.id].keys()]
            if late:
                work = min(late, key=lambda one: (one.due_s, one.id))
                self.room.leave(work.id)
                self._extend(work, now)
                self._seek(work, now)

    # Placing, extending, refusing

    def _seek(self, work: Work, now: float, *, is_extended: bool = False, avoided: str | None = None) -> None:
        demand = 1 + self.room.by_model[work.model]
        work.mean_tokens = self._lengths.mean_known(work.model, self._outputs.value)
        owing = {avoided} if avoided else set() if work.produced else set(self._owed.values())
        placed = self.placer.seek(work, now, demand=demand, num_parked=self.parked.num_models, avoided=owing)
        if placed is not None:
            self._owed.pop(work.id, None)
            self.outbox.append(placed)
            self._reunite(work.model, now)
            return
        refusals = dict(self.placer.refusals)
        is_beyond = Refusal.HARDWARE in refusals  # waiting will not make the device faster
        if is_beyond and not is_extended and self._may_extend(work):
            self._extend(work, now)
            self._seek(work, now, is_extended=True, avoided=avoided)
        elif is_beyond and len(refusals) == 1:
            self._refuse(work, "hardware", refusals, now)
        else:
            self.room.enter(work, refusals, now)
            self.outbox.append(Queued(work, refusals))

    def _is_lenient(self, work: Work) -> bool:
        """Better late than never: it did not ask for its targets, or its client has read a part of it."""
        return not work.is_strict or work.produced > 0

    def _may_extend(self, work: Work) -> bool:
        if self.knobs.extend_deadlines:
            return self._is_lenient(work)
        return self.knobs.finish_begun and work.produced > 0

    def _give_up(self, work: Work, reason: str, refusals: Mapping[str, int], now: float) -> None:
        if self._may_extend(work) and self._hostings(work.model):
            self._extend(work, now)
            if not self._make_way(work, refusals, now):
                self._seek(work, now, is_extended=True)
        else:
            self._refuse(work, reason, dict(refusals), now)

    def _make_way(self, work: Work, refusals: Mapping[str, int], now: float) -> bool:
        """The first choice of a request waited in vain until its token was due: those who did not ask for targets go
        slower for it, and long answers are taken back until it fits."""
        if work.produced or work.id != work.group or not SCARCE & refusals.keys():
            return False
        for node in self.placer.nodes:
            if node.up and node.hosting_of(work.model) is not None:
                node.ease(work, now)
                for _ in range(MAX_TAKEN_BACK):
                    placed = self.placer.come_back(work, now)
                    if placed is not None:
                        self.outbox.append(placed)
                        return True
                    if Refusal.MEMORY not in self.placer.refusals or not self._take_back(node, now):
                        break
        return False

    def _take_back(self, node: NodeHandle, now: float) -> bool:
        found = node.gives_way()
        if found is None:
            return False
        instance, work = found
        node.withdraw(instance, work, now)
        self.withdrawn(node, instance)
        work.cached = False
        work.moves += 1
        self._extend(work, now)
        self.moving[work.id] = work
        self._move(work, now + self.knobs.retry_s, "gives_way")
        return True

    def _extend(self, work: Work, now: float) -> None:
        known = work.known_tokens
        latencies = [hosting.latency for hosting in self._hostings(work.model)]
        prefill_s = min((latency.prefill_s(known) for latency in latencies), default=0.0)
        decode_s = min((latency.decode_s(1, known) for latency in latencies), default=0.0)
        work.extend_deadline(now, prefill_s, decode_s)
        self.outbox.append(Extended(work, work.due_s))

    def _refuse(self, work: Work, reason: str, refusals: dict[str, int], now: float) -> None:
        """With the choices that would have followed it."""
        is_never = reason == "hardware" and not self._could_serve(work)
        retry_after_s = None if is_never else self._retry_after_s(now)
        self._owed.pop(work.id, None)
        self._lengths.ended(work.id)
        for one in (work, *self.followers.pop(work.id, ())):
            self.outbox.append(Refused(one, reason, refusals, retry_after_s))

    def _retry_after_s(self, now: float) -> float:
        """Until those who wait now have got places, if requests go on ending as they did lately."""
        if not self._ends_s:
            return MIN_RETRY_AFTER_S
        each_s = (now - self._ends_s[0]) / len(self._ends_s)
        return min(max((len(self.room) + 1) * each_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def _could_serve(self, work: Work) -> bool:
        """On an undisturbed device: what iterations take lately may be due to loads beside them."""
        known = work.known_tokens
        for hosting in self._hostings(work.model):
            latency = hosting.latency.base if isinstance(hosting.latency, LiveLatency) else hosting.latency
            if latency.prefill_s(known) <= work.ttft_s and latency.decode_s(1, known) <= work.tpot_s:
                return True
        return False

    def _hostings(self, model: str) -> list[Hosting]:
        found = (node.hosting_of(model) for node in self.placer.nodes)
        return [hosting for hosting in found if hosting is not None]

    # What nodes report

    def notice(self, node: NodeHandle, notice: Notice, now: float) -> None:
        if isinstance(notice, Finished):
            self._ends_s.append(now)
            self._outputs.add(notice.work.produced)
            self._lengths.add(notice.work.model, notice.work.produced)
            self._lengths.ended(notice.work.id)
            self.placer.left(node, notice.instance)
            self.room.changed()
        elif isinstance(notice, Evicted):
            self.placer.left(node, notice.instance)
            self._lengths.runs(notice.work.model, notice.work.id, notice.work.produced)
            if notice.reason == "kv_short" and self.knobs.finish_begun:
                self._owed[notice.work.id] = node.name
            self._evicted(node, notice.work, notice.reason, now)
        elif isinstance(notice, HandedOver):
            self.placer.left(node, notice.instance)
            self._hand_over(notice, now)
        elif isinstance(notice, Overcommitted):
            self._relieve(node, notice, now)
        elif isinstance(notice, InstanceReady):
            self.room.changed()
        elif isinstance(notice, InstanceClosed | InstanceGone):
            self.placer.forget(node, notice.instance)
            self.room.changed()
            if self.parked and isinstance(notice, InstanceGone):
                self._resume(now)

    def warmed(self, node: NodeHandle, instance_id: int, model: str) -> None:
        """An instance was started without work."""
        self.placer.add_instance(node, instance_id, model, Phase.ANY, batch=0)
        self.room.changed()

    def withdrawn(self, node: NodeHandle, instance_id: int) -> None:
        """Work was taken back from an instance without a notice."""
        self.placer.left(node, instance_id)
        self.room.changed()

    def lost(self, node: NodeHandle, works: Sequence[Work], now: float) -> None:
        """The node is gone; its unfinished requests start over elsewhere, with the tokens they have."""
        self.placer.forget_node(node)
        for work in works:
            work.cached = False
            work.moves += 1
            if self.knobs.disaggregate:
                work.phase = Phase.PREFILL
            self._seek(work, now)

    def _relieve(self, node: NodeHandle, notice: Overcommitted, now: float) -> None:
        """Move the work, if somebody else would go on with it in time: if need be after a cold start, which those who
        are moved after it find done."""
        work = notice.work
        self._lengths.runs(work.model, work.id, notice.produced)
        if self.knobs.disaggregate or not node.holds(notice.instance, work):
            return
        moved = work.as_of(notice.produced)
        moved.mean_tokens = self._lengths.mean_known(work.model, self._outputs.value)
        if not self.placer.has_other_place(moved, node, now):
            moved.last_token_s = None
            if not self.placer.has_other_place(moved, node, now):
                return
        node.withdraw(notice.instance, work, now)
        self.withdrawn(node, notice.instance)
        work.cached = False
        work.moves += 1
        self.outbox.append(Moving(work, now, "overcommitted"))
        self._seek(work, now, avoided=node.name)

    def _evicted(self, node: NodeHandle, work: Work, reason: str, now: float) -> None:
        work.cached = False
        if reason == "paused":
            self.parked.add(work)
            self._move(work, max(now, work.due_s - self.knobs.pause_lead_s), reason)
        elif reason == "kv_short":  # at once it would only come back to where it did not fit
            self._seek(work, now, avoided=node.name)
        else:
            self._seek(work, now)

    def _hand_over(self, notice: HandedOver, now: float) -> None:
        work = notice.work
        travel_s = notice.kv_bytes / self._kv_bytes_per_s
        work.phase = Phase.DECODE
        work.cached = True
        work.give_grace(travel_s)
        self.moving[work.id] = work
        self._travelling.add(work.id)
        self._move(work, now + travel_s, "handover")

    def _move(self, work: Work, retry_at_s: float, reason: str) -> None:
        heappush(self._timed, (retry_at_s, work.id))
        self.outbox.append(Moving(work, retry_at_s, reason))

    # Paused work

    def _reunite(self, model: str, now: float) -> None:
        """An instance of the model takes work again: those swapped out come back to it."""
        asked = 0
        for work in self.parked.of(model):
            asked += min(self.placer.num_open(model), MAX_INSTANCES)
            if asked > MAX_RETURNS:
                break  # the others come with the next one, or when they are due
            placed = self.placer.join(work, now)
            if placed is not None:
                self.outbox.append(placed)
                self.parked.take(work.id)

    def _resume(self, now: float) -> None:
        """Memory is free: the swapped-out model that is due first comes back, unless someone waits more urgently."""
        work = self.parked.first()
        if any(other.due_s < work.due_s for other in self.room):
            return
        placed: Placed | None = self.placer.come_back(work, now)
        if placed is not None:
            self.parked.take(work.id)
            self.outbox.append(placed)
            self._reunite(work.model, now)
