"""How a request without a place finds one, on whichever node: asking, extending deadlines, making way, refusing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heappush

from dovetail.cluster.asking import Ask, Asking, Decisions
from dovetail.cluster.decisions import Decision, Displace, Extended, Moving, Placed, Queued, RequestRejected
from dovetail.cluster.handle import NodeHandle
from dovetail.cluster.placer import Placer, Unwanted
from dovetail.cluster.request import RequestState, Search
from dovetail.cluster.starting import come_back, fill_gaps, seek
from dovetail.cluster.waiting import RETRY_S, Ends, WaitingRoom
from dovetail.node import protocol
from dovetail.policy.compositions import Composition
from dovetail.policy.headroom import INFINITY, Refusal
from dovetail.policy.lengths import AnswerLengths, Likeness
from dovetail.policy.memory import OutputMean
from dovetail.policy.work import RequestRecord

MAX_TAKEN_BACK = 16  # long answers, for one newcomer
CROWDED_S = 10.0  # after somebody who is waited for found no place, best effort starts no instance
DISPLACE_S, DISPLACE_FACTOR = 5.0, 3.0  # longer than this, and so many times what was estimated, nobody waits for L7
# Refusals that go away with later deadlines.
TOO_LATE = {Refusal.FIRST_TOKEN_LATE, Refusal.DECODE_OVERCOMMITTED, Refusal.HARDWARE, Refusal.LINK}

# Refusals that go away when others give way.
SCARCE = {Refusal.MEMORY, Refusal.NEIGHBOUR_LATE, *TOO_LATE}


class Seeker:
    def __init__(self, nodes: Sequence[NodeHandle], composition: Composition) -> None:
        self.lateness = composition.lateness
        self._reclaiming = composition.reclaiming
        self.works: dict[int, RequestState] = {}  # every request that has not ended, with or without a place
        self.placer = Placer(nodes, composition)
        self.decisions = Decisions(self._let_go)
        self.outbox: list[Decision] = []
        self.timed: list[tuple[float, int]] = []  # heap of (time, request): moving ones ask again
        self.ends = Ends()
        self._owing: Counter[str] = Counter()  # by node: answers that it evicted for want of memory
        self._crowded_until_s = 0.0
        self.outputs = OutputMean()
        self.lengths = AnswerLengths()
        self.likeness = Likeness()
        self.room = WaitingRoom(composition.queueing.change_s)
        self.queue = composition.queueing.queue(self.placer, self.room.by_model, self.likeness)
        self.room.order = self.queue.key

    def at(self, now: float) -> None:
        """Everything that follows happens now."""
        self.decisions.now_s = self.placer.now_s = now

    @property
    def now_s(self) -> float:
        return self.decisions.now_s

    def left(self, node: NodeHandle, instance: int, *, is_best_effort: bool) -> None:
        """A request has left an instance: somebody else may have its place."""
        self.placer.left(node, instance, is_best_effort=is_best_effort)
        self.room.changed()

    def warm(self, model: str) -> Asking[None]:
        self.outbox.append((yield from self.placer.warm(model)))

    # Placing, extending, refusing

    def seek(self, work: RequestState, avoided: str | None = None) -> None:
        self.decisions.begin(self._place(self._search(work, avoided)))

    def seek_in_order(self, work: RequestState) -> None:
        """Those who wait ask in order: whoever comes first may have the place of an idle instance."""
        search = self._search(work)
        search.reclaims = self._reclaiming.asks(are_alike=search.are_alike)
        self.decisions.begin(self._place(search))

    def _search(self, work: RequestState, avoided: str | None = None) -> Search:
        """A request without tokens avoids nodes that owe memory to an evicted answer."""
        work.mean_tokens = self.lengths.mean_known(work.model, self.outputs.value)
        owing = {avoided} if avoided else set() if work.produced else set(self._owing)
        search = work.search = Search(work, owing, are_alike=self.likeness.is_seen)
        return search

    def _place_found(self, placed: Placed) -> None:
        """The request has a place: nobody owes it one any more."""
        self.settle_debt(placed.work)
        placed.work.waits_for_room_s, placed.work.early_due_s = 0.0, None
        self.outbox.append(placed)

    def owe(self, work: RequestState, node: str) -> None:
        self.settle_debt(work)
        work.owed_by = node
        self._owing[node] += 1

    def settle_debt(self, work: RequestState) -> None:
        if work.owed_by:
            self._owing[work.owed_by] -= 1
            if not self._owing[work.owed_by]:
                del self._owing[work.owed_by]
            work.owed_by = ""

    def _place(self, search: Search) -> Asking[None]:
        work = search.work
        placed: Placed | Displace | None
        for is_extended in (False, True):
            try:
                if work.is_best_effort:
                    may_start = self.now_s >= self._crowded_until_s
                    placed = yield from fill_gaps(self.placer, search, may_start=may_start)
                elif self.now_s < work.waits_for_room_s:
                    placed = yield from self.placer.join(search)
                else:
                    work.waits_for_room_s = 0.0
                    placed = yield from seek(self.placer, search)
            except Unwanted:
                return
            if search.is_over:
                return
            is_beyond = Refusal.HARDWARE in search.refusals  # waiting will not make the device faster
            if placed is not None or not is_beyond or is_extended or not self._may_extend(work):
                break
            self.extend(work, search.prefill_s, search.decode_s)
            search = work.search = Search(work, search.avoided, are_alike=search.are_alike, reclaims=search.reclaims)
        work.search = None
        if isinstance(placed, Displace):
            self._wait_for(placed, search)
        elif placed is not None:
            self._place_found(placed)
        elif is_beyond and len(search.refusals) == 1:
            self._refuse(work, "hardware", search)
        elif Refusal.SILENT in search.refusals and self.now_s > search.until_s:
            self._refuse(work, "deadline", search)  # its time went by while it waited for answers
        else:
            if not work.is_best_effort:
                self._crowded_until_s = self.now_s + CROWDED_S
            self.room.enter(work, search, self.now_s, work.early_due_s)
            self.outbox.append(Queued(work, dict(search.refusals)))

    def _wait_for(self, plan: Displace, search: Search) -> None:
        """L7: others make way for it, and it starts in their place."""
        self.room.enter(plan.work, search, self.now_s)
        self.placer.leaving |= plan.instances
        plan.work.waits_for_room_s = self.now_s + max(DISPLACE_S, DISPLACE_FACTOR * plan.start_s)
        self.outbox.append(plan)

    def displaced(self, work: RequestState, *, is_free: bool) -> None:
        """Those who made way for it are gone, or cannot go."""
        work.waits_for_room_s = 0.0
        if not is_free:
            self.room.changed()
        elif work.id in self.room:
            self.room.leave(work.id)
            self.seek(work)

    def is_too_large(self, work: RequestState) -> bool:
        """No node could hold it, had it the node to itself. Of a model that nobody offers that is not known."""
        is_offered = False
        for node in self.placer.nodes:
            offer = node.offer_of(work.model)
            if offer is not None:
                if offer.room_tokens > work.known_tokens:
                    return False  # the first node that is asked mostly has it
                is_offered = True
        return is_offered

    def _may_extend(self, work: RequestState) -> bool:
        """Best effort is never too late."""
        return work.is_best_effort or self.lateness.may_extend(is_strict=work.is_strict, produced=work.produced)

    def give_up(self, work: RequestState, search: Search) -> None:
        """Its token was due while it had no place; `search` is the last one."""
        work.early_due_s = None
        if self.is_too_large(work):
            self._refuse(work, "too_large", search)  # whoever had room for it has gone, or the first node came after it
        elif self._may_extend(work) and any(node.offer_of(work.model) is not None for node in self.placer.nodes):
            self.extend(work, search.prefill_s, search.decode_s)
            is_first = work.id == work.group and not work.produced
            if not is_first or work.is_best_effort or not SCARCE & search.refusals.keys():
                self.seek(work)
            else:
                self.decisions.begin(self._make_way(self._search(work)))
        else:
            self._refuse(work, "deadline", search)

    def _make_way(self, search: Search) -> Asking[None]:
        """The first choice of a request waited in vain until its token was due: those who did not ask for targets go
        slower for it, and long answers are taken back until it fits."""
        work = search.work
        placed: Placed | None = None
        try:
            for node in self.placer.nodes:
                if placed is None and node.up and node.offer_of(work.model) is not None:
                    placed = yield from self._make_way_on(node, search)
        except Unwanted:
            return
        if search.is_over:
            return
        work.search = None
        if placed is not None:
            self._place_found(placed)
        else:
            self.seek(work)

    def _make_way_on(self, node: NodeHandle, search: Search) -> Asking[Placed | None]:
        eased = yield Ask(node, protocol.Ease(search.record))
        if isinstance(eased, protocol.Eased):
            search.work.tpot_s = max(search.work.tpot_s, eased.pace_s)
            search.changed()
        for _ in range(MAX_TAKEN_BACK):
            search.refusals.clear()
            placed = yield from come_back(self.placer, search)
            if placed is not None:
                return placed
            if Refusal.MEMORY not in search.refusals:
                break
            answer = yield Ask(node, protocol.TakeBack())
            if not isinstance(answer, protocol.TookBack) or answer.request is None:
                break
            self._took_back(node, answer.request, answer)
        return None

    def _let_go(self, node: NodeHandle, answer: protocol.TookBack) -> None:
        """A node gave a request back after whoever asked for that had given up."""
        if answer.request is not None:
            self._took_back(node, answer.request, answer)

    def _took_back(self, node: NodeHandle, record: RequestRecord, answer: protocol.TookBack) -> None:
        """A long answer waits until it finds a place again. Of one that seeks it already, the node was taken for silent
        and had accepted it after all."""
        work = self.works.get(record.id)
        if work is not None and work.search is None and work.id not in self.room:  # else: or was cancelled
            self.left(node, answer.instance, is_best_effort=record.is_best_effort)
            work.take(record)
            self.extend(work, answer.prefill_s, answer.decode_s)
            self.move(work, self.now_s + RETRY_S, "gives_way")

    def extend(self, work: RequestState, prefill_s: float, decode_s: float | None) -> None:
        """The fastest device needs so long for its prefill and a decode, if that is known; None: its pace stays."""
        prefill_s = 0.0 if prefill_s == INFINITY else prefill_s
        work.extend_deadline(self.now_s, prefill_s, 0.0 if decode_s == INFINITY else decode_s)
        self.outbox.append(Extended(work, work.due_s))

    def _refuse(self, work: RequestState, reason: str, search: Search) -> None:
        """With the choices that would have followed it."""
        is_never = reason == "too_large" or (reason == "hardware" and not search.could_serve)
        retry_after_s = None if is_never else self.ends.retry_after_s(self.room.num_waited_for, self.now_s)
        self.settle_debt(work)
        self.lengths.ended(work.id)
        followers, work.followers = work.followers, ()
        for one in (work, *followers):
            self.outbox.append(RequestRejected(one, reason, dict(search.refusals), retry_after_s))

    # Moving

    def move(self, work: RequestState, retry_at_s: float, reason: str) -> None:
        work.is_moving = True
        heappush(self.timed, (retry_at_s, work.id))
        self.outbox.append(Moving(work, retry_at_s, reason))
