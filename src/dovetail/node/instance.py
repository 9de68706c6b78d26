"""One model on one node: its waiting and running work by counters (S2, S5). Decides nothing about its neighbours.

Every decode iteration yields one token for each running request, so a clock per instance replaces a counter per
request: a request that joined at clock j has made clock − j tokens since. An iteration therefore costs O(1), and only
joins and leaves walk the batch. A worker that drives real sequences keeps them beside this and reports who finished.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from dovetail.node.shares import Share, left_s, urgent_prefill_s
from dovetail.node.work import Phase, Work
from dovetail.policy.headroom import INFINITY, InstanceDemand
from dovetail.policy.placement import Hosting
from dovetail.policy.shadow import TurnRule


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    CLOSING = "closing"  # takes no work, gives its memory back


LOOK_AHEAD_TURNS = 64  # how often it is estimated anew what contexts will grow to


class PendingOp(NamedTuple):
    """A memory operation that the ledger has let go and that waits for the instance."""

    part: str  # "weights" or "kv"
    old_bytes: int
    new_bytes: int


class Instance:
    __slots__ = (
        "_lengths",
        "busy_s",
        "clock",
        "deadline_s",
        "decodes",
        "demand",
        "epoch",
        "grown_s",
        "held",
        "held_tokens",
        "hosting",
        "id",
        "idle_since_s",
        "in_turn",
        "kv_tokens",
        "loaded_s",
        "mixed_pace",
        "model",
        "op_end_s",
        "op_running",
        "ops",
        "ordered_s",
        "overestimate",
        "phase",
        "prompts",
        "rule",
        "running",
        "running_due_s",
        "spoke_s",
        "starved",
        "state",
        "strictest_s",
        "tokens",
        "tpot_s",
        "turns",
        "urgent_s",
        "waiting",
    )

    def __init__(
        self,
        id: int,
        model: str,
        hosting: Hosting,
        overestimate: float,
        phase: Phase,
        rule: TurnRule | None = None,
    ) -> None:
        self.id = id
        self.model = model
        self.hosting = hosting
        self.overestimate = overestimate
        self.phase = phase
        self.state = State.LOADING
        self.waiting: list[Work] = []  # needs a prefill; most urgent first
        self.running: dict[int, Work] = {}
        self.held: dict[int, Work] = {}  # recomputed here, running elsewhere: they wait to be handed over (L4)
        self.held_tokens = 0  # KV of those and of waiting ones that are partly computed, with a block to spare each
        self.clock = 0  # decode iterations done
        self.tokens = 0  # known tokens of the running batch
        self.kv_tokens = 0  # room in its KV pool
        self.deadline_s = INFINITY  # of its most urgent request
        self.urgent_s = INFINITY  # by when it should have a turn: its deadline, or before an answer is silent too long
        self.rule = rule or TurnRule()
        self.spoke_s = INFINITY  # when its running requests had their last token, the earliest of these times
        self.running_due_s = INFINITY  # of its most urgent running request
        self.tpot_s = INFINITY  # pace of the running batch, the strictest if they differ
        self.strictest_s = INFINITY  # of all its work
        self.mixed_pace = False
        self.in_turn = False
        self.prompts: tuple[Share, ...] = ()  # in the turn under way
        self.decodes = False  # so does the running batch
        self.ops: deque[PendingOp] = deque()  # memory operations that wait for the end of a turn or of each other
        self.op_running = False
        self.op_end_s = 0.0  # when the one under way should end
        self.ordered_s = 0.0  # when its weights were asked for
        self.loaded_s = INFINITY  # when its weights should be there
        self.starved = False  # its next step does not fit its KV pool, which is being enlarged
        self.idle_since_s = 0.0
        self.epoch = 0  # counts idle periods, so that a stale keep-alive timer is recognised
        self.busy_s = 0.0
        self.turns = 0
        self.grown_s: float | None = None  # one iteration when its contexts will have grown; None = not known
        self._lengths: list[tuple[int, int]] | None = None  # as of then
        self.demand: InstanceDemand | None = None  # see `outlook`; as of the last change of clock, membership or turn

    @property
    def batch(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.held)

    @property
    def has_turns(self) -> bool:
        """Somebody wants an iteration; who is held wants none."""
        return bool(self.waiting or self.running)

    @property
    def frees_bytes(self) -> float:
        """Memory that running it to its end is expected to free: its cache, and its weights the less likely the more
        requests share them, because others keep joining."""
        hosting = self.hosting
        return self.tokens * hosting.kv_bytes_per_token + hosting.weight_bytes / max(self.batch, 1)

    @property
    def can_run(self) -> bool:
        return self.state is State.READY and not self.op_running and not self.ops and not self.starved

    def works(self) -> list[Work]:
        return [*self.waiting, *self.running.values(), *self.held.values()]

    def produced(self, work: Work) -> int:
        if work.id in self.running:
            return work.produced + self.clock - work.joined_clock
        return work.produced

    def due_s(self, work: Work) -> float:
        return work.first_due_s + work.tpot_s * self.produced(work)

    def urgent_prefill_s(self, work: Work) -> float:
        if self.rule.turn_silence_s == INFINITY:
            return work.due_s
        return urgent_prefill_s(work, self.rule.turn_silence_s, left_s(self, work, 0))

    # Joining and leaving

    def add(self, work: Work) -> None:
        if work.cached:
            self._join(work)
        else:
            self.waiting.append(work)
            self.sort_waiting()
        self.refresh()

    def sort_waiting(self) -> None:
        self.waiting.sort(key=lambda one: (self.urgent_prefill_s(one), one.id))

    def prefilled(self, work: Work) -> None:
        """The prefill gave one token; the work joins the running batch."""
        self.waiting.remove(work)
        self._forget_computed(work)
        work.produced += 1
        self._join(work)
        self.refresh()

    def hold(self, work: Work) -> None:
        """Its known tokens are computed; it rests until there are more, or until it is handed over."""
        self.waiting.remove(work)
        self._forget_computed(work)
        work.computed = work.known_tokens
        self.held_tokens += work.computed + self.hosting.block_tokens
        self.held[work.id] = work
        self.refresh()

    def wake(self, work: Work, *, joins: bool) -> None:
        """One that rests has more tokens to compute: it joins the running batch, or asks for a prefill of the rest."""
        del self.held[work.id]
        if joins:
            self._forget_computed(work)
            self._join(work)
        else:
            self.waiting.append(work)
            self.sort_waiting()
        self.refresh()

    def _forget_computed(self, work: Work) -> None:
        if work.computed:
            self.held_tokens -= work.computed + self.hosting.block_tokens
            work.computed = 0

    def remove(self, work: Work) -> None:
        if self.running.pop(work.id, None) is not None:
            steps = self.clock - work.joined_clock
            self.tokens -= work.known_tokens + steps
            work.produced += max(steps, 0)
        elif self.held.pop(work.id, None) is None:
            self.waiting.remove(work)
        self._forget_computed(work)
        self.refresh()

    def _join(self, work: Work) -> None:
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
        for work in self.running.values():
            due = min(due, self.due_s(work))
            pace = min(pace, work.tpot_s)
            slowest = max(slowest, work.tpot_s)
            if work.last_token_s is not None:
                spoke = min(spoke, work.last_token_s)
        self.running_due_s = due
        self.tpot_s = pace
        others = [*self.waiting, *self.held.values()]
        self.strictest_s = min(pace, min((work.tpot_s for work in others), default=INFINITY))
        self.spoke_s = spoke
        self.mixed_pace = bool(self.running) and pace != slowest
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

    def begin_turn(self, prompts: tuple[Share, ...], *, decodes: bool) -> None:
        self.in_turn = True
        self.prompts, self.decodes = prompts, decodes
        self.demand = None

    def end_turn(self) -> None:
        self.in_turn = False
        self.prompts, self.decodes = (), False
        self.demand = None

    def decoded(self, now: float) -> None:
        """One decode iteration of the running batch has ended."""
        is_late = now > self.running_due_s
        for work in self.running.values():
            if is_late and now > work.true_due_s(self.due_s(work)):
                work.late_tokens += 1
            if work.joined_clock <= self.clock:  # one that came in the middle of it waits for the next
                work.got_token(now)
        self.clock += 1
        self.tokens += len(self.running)
        self.demand = self._lengths = None
        if not self.clock % LOOK_AHEAD_TURNS:
            self.grown_s = None
        if self.mixed_pace:
            self.refresh()
            return
        self.running_due_s += self.tpot_s
        self.spoke_s = now
        self._set_deadline()

    # Estimates

    def used_blocks(self) -> int:
        """Exact: each request that has KV here rounds up to whole blocks."""
        size = self.hosting.block_tokens
        clock = self.clock
        total = 0
        for work in self.running.values():
            total += -((work.input_tokens + work.produced + clock - work.joined_clock) // -size)
        if self.held_tokens:
            total += sum(-(work.computed // -size) for work in [*self.held.values(), *self.waiting])
        return total

    @property
    def loose_tokens(self) -> int:
        """What `used_blocks` comes to at most, in tokens."""
        return self.tokens + len(self.running) * self.hosting.block_tokens + self.held_tokens

    def bare_tokens(self) -> int:
        """What the KV pool must hold for its next iteration: whole blocks, and one to spare."""
        return (self.used_blocks() + len(self.running) + 1) * self.hosting.block_tokens

    def is_short(self, extra_tokens: int = 0) -> bool:
        """The next iteration could overrun the KV pool."""
        size = self.hosting.block_tokens
        if self.loose_tokens + extra_tokens <= self.kv_tokens:
            return False
        need = (self.used_blocks() + len(self.running)) * size + -(extra_tokens // -size) * size
        return need > self.kv_tokens

    def decode_s(self, extra_tokens: int = 0, extra_requests: int = 0) -> float:
        """One iteration of everything it holds, overestimated; waiting work counts as if it ran."""
        count = self.batch + extra_requests
        if count == 0 or self.phase is Phase.PREFILL:
            return 0.0
        total = self.tokens + extra_tokens
        for work in chain(self.waiting, self.held.values()):
            total += work.known_tokens
        return self.hosting.latency.decode_s(count, total) * self.overestimate

    def prefill_s(self, tokens: int) -> float:
        return self.hosting.latency.prefill_s(tokens) * self.overestimate

    def lengths(self) -> list[tuple[int, int]]:
        """(input, produced) of all its work. Asked for several times between two turns: a list of the caller's own."""
        if self._lengths is None:
            clock = self.clock
            pairs = [(w.input_tokens, w.produced + clock - w.joined_clock) for w in self.running.values()]
            pairs += [(w.input_tokens, w.produced) for w in [*self.waiting, *self.held.values()]]
            self._lengths = pairs
        return self._lengths.copy()
