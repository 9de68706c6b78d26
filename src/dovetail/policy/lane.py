"""One model's requests on a device: by when they should have a turn, and what a turn changes (S2).

With a clock per lane (`members`) an iteration decides in O(1), and only joins and leaves walk the batch. In a burst not
even these: who comes between two iterations is counted in. A worker that drives real sequences keeps them beside this
and reports who finished.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from itertools import chain

from dovetail.policy.headroom import INFINITY, InstanceDemand
from dovetail.policy.latency import Latency
from dovetail.policy.members import Members, prefill_turn_s
from dovetail.policy.parts import Share
from dovetail.policy.placement import Hosting
from dovetail.policy.turn_rule import TurnRule
from dovetail.policy.work import Phase, Work

LOOK_AHEAD_TURNS = 64  # how often it is estimated anew what contexts will grow to


class Lane(Members):
    __slots__ = (
        "_is_fresh",
        "_sorted_as",
        "deadline_s",
        "decodes",
        "demand",
        "demand_key",
        "grown_s",
        "has_spared_prompt",
        "id",
        "in_turn",
        "is_split",
        "mixed_pace",
        "newcomers",
        "parted_s",
        "prompted_s",
        "prompts",
        "rows",
        "rows_spoke_s",
        "running_due_s",
        "spared_s",
        "spoke_s",
        "strictest_s",
        "tpot_s",
        "turned_s",
        "urgent_s",
    )

    def __init__(
        self, hosting: Hosting, overestimate: float, phase: Phase, rule: TurnRule | None = None, id: int = 0
    ) -> None:
        super().__init__(hosting, overestimate, phase, rule or TurnRule())
        self.id = id
        self.deadline_s = INFINITY  # of its most urgent request
        self.urgent_s = INFINITY  # by when it should have a turn: its deadline, or before an answer is silent too long
        self.spoke_s = INFINITY  # when its running requests had their last token, the earliest of these times
        self.running_due_s = INFINITY  # of its most urgent running request
        self.tpot_s = INFINITY  # pace of the running batch, the strictest if they differ
        self.strictest_s = INFINITY  # of all its work
        self.mixed_pace = False
        self.in_turn = False
        self.prompts: tuple[Share, ...] = ()  # in the turn under way
        self.decodes = False  # so does the running batch
        self.rows: tuple[int, ...] | None = None  # or these of it
        self.is_split = False  # so was its last decode
        self.grown_s: float | None = None  # one iteration when its contexts will have grown; None = not known
        self.demand: InstanceDemand | None = None  # see `outlook`; as of the last change of clock, membership or turn
        self.demand_key: tuple[object, ...] = ()  # what it was found by, beside that
        self.newcomers: list[Work] = []  # who wait since it was found
        self._is_fresh = True  # what is said of the running batch was found from scratch at this clock
        self.turned_s = 0.0  # when its last turn ended
        self.parted_s = 0.0  # likewise, of those that computed a part of a prompt
        self.spared_s = 0.0  # when its last turn of best effort ended, which is none of those
        self.has_spared_prompt = False  # and whether that was of a prompt
        self.prompted_s = 0.0  # of its prompts, computed since its running requests had a token
        self.rows_spoke_s = 0.0  # when some rows of a batch that is split had their last tokens
        self._sorted_as: tuple[Latency, int] | None = None  # by whose estimates, as of which version, `waiting` is

    def urgent_prefill_s(self, work: Work) -> float:
        if self.rule.in_rounds and work.is_resuming:  # its reader hears something in a moment, or it is handed over
            return 0.0 if work.hold else -INFINITY
        if self.rule.turn_silence_s == INFINITY:
            return prefill_turn_s(work, INFINITY, 0.0)
        return prefill_turn_s(work, self.rule.turn_silence_s, self.left_s(work, work.reused))

    # Joining and leaving

    def add(self, work: Work) -> None:
        self.best_effort += work.is_best_effort
        if work.prepares:
            self.held[work.id] = work
        elif work.cached:
            self.join(work)
        elif work.is_best_effort:
            self.patient.append(work)
        else:
            index = self._enqueue(work)
            if self._is_fresh:
                self._count_in(work, index)
                return
        self.refresh()

    def _enqueue(self, work: Work) -> int:
        """Its place among those who wait. In a burst everybody else's is known."""
        latency = self.hosting.latency
        if self._sorted_as is None or self._sorted_as[0] is not latency or self._sorted_as[1] != latency.version:
            self.waiting.append(work)
            self.sort_waiting()
            return self.waiting.index(work)
        index = bisect_right(self.waiting, self._waiting_key(work), key=self._waiting_key)
        self.waiting.insert(index, work)
        return index

    def _waiting_key(self, work: Work) -> tuple[float, int]:
        return (self.urgent_prefill_s(work), work.id)

    def sort_waiting(self) -> None:
        self.waiting.sort(key=self._waiting_key)
        self._sorted_as, self._lengths = (self.hosting.latency, self.hosting.latency.version), None

    def sort_by_due(self) -> None:
        """Everybody has got a deadline anew, and there is no time for anybody."""
        self.waiting.sort(key=lambda one: (one.due_s, one.id))
        self._sorted_as = self._lengths = None

    def _count_in(self, work: Work, index: int) -> None:
        """What `refresh` would find, with one more who waits."""
        if self.demand is not None:
            self.newcomers.append(work)
        self.grown_s = None
        self._resting_tokens += work.known_tokens
        self.strictest_s = min(self.strictest_s, work.tpot_s)
        if self._lengths is not None:
            self._lengths.insert(len(self.running) + index, (work.input_tokens, work.produced))
        self._set_deadline()

    def prefilled(self, work: Work, now: float, pace_tokens: float) -> None:
        """The prefill gave one token; the work joins the running batch. Deadlines are the caller's to refresh."""
        if now > work.true_due_s(work.due_s):
            work.late_tokens += 1
        work.got_token(now)
        if not work.produced and pace_tokens < INFINITY:
            work.pace_from(now, pace_tokens)
        self.queue_of(work).remove(work)
        self.forget_computed(work)
        work.produced += 1
        self.join(work)

    def hold(self, work: Work) -> None:
        """Its known tokens are computed; it rests until there are more, or until it is handed over."""
        self.queue_of(work).remove(work)
        self.forget_computed(work)
        self.keep_computed(work)
        self.held[work.id] = work
        self.refresh()

    def wake(self, work: Work, *, joins: bool) -> None:
        """One that was held has tokens to compute: it joins the running batch, or asks for a prefill of the rest."""
        del self.held[work.id]
        if joins:
            self.forget_computed(work)
            self.join(work)
        elif work.is_best_effort:
            self.patient.append(work)
        else:
            self._enqueue(work)
        self.refresh()

    def keep_computed(self, work: Work) -> None:
        """All its known tokens, while it does not run."""
        work.computed = work.known_tokens
        self.held_tokens += work.computed + self.hosting.block_tokens

    def forget_computed(self, work: Work) -> None:
        if work.computed:
            self.held_tokens -= work.computed + self.hosting.block_tokens
            work.computed = 0

    def remove(self, *works: Work) -> None:
        for work in works:
            self._take_out(work)
            self.best_effort -= work.is_best_effort
        self.refresh()

    def _take_out(self, work: Work) -> None:
        if work.id in self.running:
            self.stop(work)
        elif self.held.pop(work.id, None) is None and self.suspended.pop(work.id, None) is None:
            self.queue_of(work).remove(work)
        self.forget_computed(work)

    def stop(self, work: Work) -> None:
        del self.running[work.id]
        steps = self.clock - work.joined_clock
        self.tokens -= work.known_tokens + steps
        work.produced += max(steps, 0)

    def join(self, work: Work) -> None:
        missed = int(self.decodes)  # one that comes in the middle of an iteration gets no token from it
        work.joined_clock = self.clock + missed
        self.running[work.id] = work
        self.tokens += work.known_tokens - missed

    def refresh(self) -> None:
        """Deadlines from scratch, after any change of membership."""
        self.demand = None
        self._lengths = None
        self.grown_s = None
        due = pace = spoke = INFINITY
        slowest = 0.0
        clock = self.clock
        self.riding = self.riding_tokens = 0
        for work in self.running.values():
            if work.is_best_effort:
                self.riding += 1
                self.riding_tokens += work.input_tokens + work.produced + clock - work.joined_clock
                continue
            tpot_s, last_s = work.tpot_s, work.last_token_s
            due_s = work.first_due_s + tpot_s * (work.produced + clock - work.joined_clock)
            if due_s < due:
                due = due_s
            if tpot_s < pace:
                pace = tpot_s
            if tpot_s > slowest:
                slowest = tpot_s
            if last_s is not None and last_s < spoke:
                spoke = last_s
        self.running_due_s = due
        self.tpot_s = pace
        self.spoke_s = spoke
        self.mixed_pace = self.answers and pace != slowest
        self._resting_tokens, self.strictest_s = 0, pace
        if self.waiting or self.held:
            self._resting_tokens, self.strictest_s = _resting(chain(self.waiting, self.held.values()), pace)
        self._is_fresh = True
        self._set_deadline()

    def _set_deadline(self) -> None:
        due = self.running_due_s
        urgent = min(due, self.spoke_s + self.rule.turn_silence_s)
        if self.waiting:
            first = self.waiting[0]
            due = min(due, first.due_s)
            urgent = min(urgent, self.urgent_prefill_s(first))
        self.deadline_s = due
        self.urgent_s = urgent

    # Turns

    def begin_turn(self, prompts: tuple[Share, ...], *, decodes: bool, rows: tuple[int, ...] | None = None) -> None:
        self.in_turn = True
        self.prompts, self.decodes, self.rows = prompts, decodes, rows
        self.demand = None

    def end_turn(self) -> None:
        self.in_turn = False
        self.prompts, self.decodes, self.rows = (), False, None
        self.demand = None

    def computed(self, work: Work, tokens: int) -> None:
        """So many tokens of a prompt are computed; the rest is left for other turns."""
        block = 0 if work.computed else self.hosting.block_tokens
        self.held_tokens += tokens - work.computed + block
        work.computed = tokens
        self.refresh()

    def turn_ended(
        self, seconds: float, now: float, rows: tuple[int, ...] | None, *, prompts: bool, decodes: bool
    ) -> None:
        """A turn of some rows counts as if it had decoded whole, its prompts and its answers having half of its time
        each; prompts for which that was promised have what they would have then."""
        self.turned_s = now
        if rows is not None:
            self.rows_spoke_s = now
            is_promised = any(work.is_strict for work in self.waiting)
            self.prompted_s = 0.0 if is_promised else max(self.prompted_s - seconds, 0.0)
            return
        self.parted_s = now if prompts else self.parted_s
        self.prompted_s = 0.0 if decodes else self.prompted_s + seconds

    def decoded(self, now: float, rows: Collection[int] | None = None) -> None:
        """One decode iteration of the running batch has ended, or of these rows of it."""
        skipped = set[int]() if rows is None else _skip(self, rows, now)
        self.is_split = rows is not None
        spoke_s = self._note_tokens(now, skipped)
        self.clock += 1
        self.tokens += len(self.running)
        self.riding_tokens += self.riding
        self.demand = self._lengths = None
        if not self.clock % LOOK_AHEAD_TURNS:
            self.grown_s = None
        if self.mixed_pace or rows is not None:
            self.refresh()
            return
        self.running_due_s += self.tpot_s
        self.spoke_s = spoke_s if self.answers else INFINITY
        self._is_fresh = False
        self._set_deadline()

    def _note_tokens(self, now: float, skipped: set[int]) -> float:
        """Of each request that got one, all but the skipped; returns when the earliest had its last token."""
        is_late, clock, spoke_s = now > self.running_due_s, self.clock, now
        for work in self.running.values():
            if skipped and work.id in skipped:
                continue
            if is_late and now > work.true_due_s(self.due_s(work)):
                work.late_tokens += 1
            if work.joined_clock <= clock:  # one that came in the middle of it waits for the next
                last_s = work.last_token_s  # as `Work.got_token`, for each of hundreds in each iteration
                if last_s is not None and now - last_s > work.silence_s:
                    work.silence_s = now - last_s
                work.last_token_s = now
            elif work.last_token_s is not None and work.last_token_s < spoke_s and not work.is_best_effort:
                spoke_s = work.last_token_s
        return spoke_s


def suspend(lane: Lane, works: Iterable[Work]) -> None:
    """Running ones rest, with their KV, until they are resumed."""
    for work in works:
        lane.stop(work)
        lane.keep_computed(work)
        lane.suspended[work.id] = work
    lane.refresh()


def resume(lane: Lane, works: Iterable[Work]) -> None:
    for work in works:
        del lane.suspended[work.id]
        lane.forget_computed(work)
        lane.join(work)
    lane.refresh()


def is_spare(lane: Lane, prompts: Collection[Share], *, decodes: bool) -> bool:
    """Nobody waits for a turn of these."""
    if prompts:
        return all(share.work.is_best_effort for share in prompts) and not (decodes and lane.answers)
    return lane.riding > 0 and not lane.answers


def _skip(batch: Lane, rows: Collection[int], now: float) -> set[int]:
    """The iteration that ends was of these rows: to the others, who are returned, it is as if they came in the middle
    of it. Whoever did not ask for a pace and is late goes slower from now on."""
    chosen = set(rows)
    skipped = [one for one in batch.running.values() if one.id not in chosen and one.joined_clock <= batch.clock]
    for work in skipped:
        if not work.is_strict and batch.due_s(work) < now:
            work.slow_down(now, 2 * work.tpot_s, batch.produced(work))
        work.joined_clock += 1
    batch.tokens -= len(skipped)
    return {work.id for work in skipped}


def _resting(works: Iterable[Work], pace_s: float) -> tuple[int, float]:
    """Known tokens of those who wait or are held and are waited for, and the strictest pace of all."""
    tokens = 0
    for work in works:
        if work.is_best_effort:
            continue
        tokens += work.input_tokens + work.produced
        if work.tpot_s < pace_s:
            pace_s = work.tpot_s
    return tokens, pace_s
