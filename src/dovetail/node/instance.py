"""One model on one node: its waiting and running work by counters (S2, S5). Decides nothing about its neighbours.

Every decode iteration yields one token for each running request, so a clock per instance replaces a counter per
request: a request that joined at clock j has made clock − j tokens since. An iteration therefore costs O(1), and only
joins and leaves walk the batch. A worker that drives real sequences keeps them beside this and reports who finished.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import NamedTuple

from dovetail.node.work import Phase, Work
from dovetail.policy.headroom import INFINITY, Load
from dovetail.policy.placement import Hosting


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    CLOSING = "closing"  # takes no work, gives its memory back


class PendingOp(NamedTuple):
    """A memory operation that the ledger has let go and that waits for the instance."""

    part: str  # "weights" or "kv"
    old_bytes: int
    new_bytes: int


class Instance:
    __slots__ = (
        "_load",
        "busy_s",
        "clock",
        "deadline_s",
        "epoch",
        "hosting",
        "id",
        "idle_since_s",
        "in_turn",
        "kv_tokens",
        "mixed_pace",
        "model",
        "op_running",
        "ops",
        "overestimate",
        "phase",
        "running",
        "running_due_s",
        "starved",
        "state",
        "tokens",
        "tpot_s",
        "turns",
        "waiting",
    )

    def __init__(self, id: int, model: str, hosting: Hosting, overestimate: float, phase: Phase) -> None:
        self.id = id
        self.model = model
        self.hosting = hosting
        self.overestimate = overestimate
        self.phase = phase
        self.state = State.LOADING
        self.waiting: list[Work] = []  # needs a prefill; most urgent first
        self.running: dict[int, Work] = {}
        self.clock = 0  # decode iterations done
        self.tokens = 0  # known tokens of the running batch
        self.kv_tokens = 0  # room in its KV pool
        self.deadline_s = INFINITY  # of its most urgent request
        self.running_due_s = INFINITY  # of its most urgent running request
        self.tpot_s = INFINITY  # pace of the running batch, the strictest if they differ
        self.mixed_pace = False
        self.in_turn = False
        self.ops: deque[PendingOp] = deque()  # memory operations that wait for the end of a turn or of each other
        self.op_running = False
        self.starved = False  # its next step does not fit its KV pool, which is being enlarged
        self.idle_since_s = 0.0
        self.epoch = 0  # counts idle periods, so that a stale keep-alive timer is recognised
        self.busy_s = 0.0
        self.turns = 0
        self._load: Load | None = None  # as of the last change of clock or membership

    @property
    def batch(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def can_run(self) -> bool:
        return self.state is State.READY and not self.op_running and not self.ops and not self.starved

    def works(self) -> list[Work]:
        return [*self.waiting, *self.running.values()]

    def produced(self, work: Work) -> int:
        if work.id in self.running:
            return work.produced + self.clock - work.joined_clock
        return work.produced

    def due_s(self, work: Work) -> float:
        return work.first_due_s + work.tpot_s * self.produced(work)

    # Joining and leaving

    def add(self, work: Work) -> None:
        if work.cached:
            self._join(work)
        else:
            self.waiting.append(work)
            self.waiting.sort(key=lambda one: (one.due_s, one.id))
        self.refresh()

    def prefilled(self, work: Work) -> None:
        """The prefill gave one token; the work joins the running batch."""
        self.waiting.remove(work)
        work.produced += 1
        self._join(work)
        self.refresh()

    def remove(self, work: Work) -> None:
        if self.running.pop(work.id, None) is not None:
            steps = self.clock - work.joined_clock
            self.tokens -= work.known_tokens + steps
            work.produced += max(steps, 0)
        else:
            self.waiting.remove(work)
        self.refresh()

    def _join(self, work: Work) -> None:
        missed = int(self.in_turn)  # one that comes in the middle of an iteration gets no token from it
        work.joined_clock = self.clock + missed
        self.running[work.id] = work
        self.tokens += work.known_tokens - missed

    def refresh(self) -> None:
        """Deadlines from scratch, after any change of membership."""
        self._load = None
        due = pace = INFINITY
        slowest = 0.0
        for work in self.running.values():
            due = min(due, self.due_s(work))
            pace = min(pace, work.tpot_s)
            slowest = max(slowest, work.tpot_s)
        self.running_due_s = due
        self.tpot_s = pace
        self.mixed_pace = bool(self.running) and pace != slowest
        self._set_deadline()

    def _set_deadline(self) -> None:
        due = self.running_due_s
        if self.waiting and self.waiting[0].due_s < due:
            due = self.waiting[0].due_s
        self.deadline_s = due

    # Turns

    def decoded(self, now: float) -> None:
        """One decode iteration of the running batch has ended."""
        if now > self.running_due_s:
            self._count_late(now)
        for work in self.running.values():
            if work.joined_clock <= self.clock:  # one that came in the middle of it waits for the next
                work.got_token(now)
        self.clock += 1
        self.tokens += len(self.running)
        self._load = None
        if self.mixed_pace:
            self.refresh()
            return
        self.running_due_s += self.tpot_s
        if self.waiting:
            self._set_deadline()
        else:
            self.deadline_s = self.running_due_s

    def _count_late(self, now: float) -> None:
        for work in self.running.values():
            if now > work.true_due_s(self.due_s(work)):
                work.late_tokens += 1

    # Estimates

    def used_blocks(self) -> int:
        """Exact: each running request rounds up to whole blocks."""
        size = self.hosting.block_tokens
        clock = self.clock
        total = 0
        for work in self.running.values():
            total += -((work.input_tokens + work.produced + clock - work.joined_clock) // -size)
        return total

    def is_short(self, extra_tokens: int = 0) -> bool:
        """The next iteration could overrun the KV pool."""
        size = self.hosting.block_tokens
        loose = self.tokens + len(self.running) * size + extra_tokens
        if loose <= self.kv_tokens:
            return False
        need = (self.used_blocks() + len(self.running)) * size + -(extra_tokens // -size) * size
        return need > self.kv_tokens

    def decode_s(self, extra_tokens: int = 0, extra_requests: int = 0) -> float:
        """One iteration of everything it holds, overestimated; waiting work counts as if it ran."""
        count = self.batch + extra_requests
        if count == 0 or self.phase is Phase.PREFILL:
            return 0.0
        total = self.tokens + extra_tokens
        for work in self.waiting:
            total += work.known_tokens
        return self.hosting.latency.decode_s(count, total) * self.overestimate

    def prefill_s(self, tokens: int) -> float:
        return self.hosting.latency.prefill_s(tokens) * self.overestimate

    def load(self) -> Load:
        """S4's view of it. One admission looks at a neighbour many times between its turns."""
        blocked = self.state is State.LOADING
        if self._load is not None and self._load.blocked is blocked:
            return self._load
        prefill = 0.0
        pace = self.tpot_s
        for work in self.waiting:
            prefill += self.prefill_s(work.known_tokens)
            pace = min(pace, work.tpot_s)
        self._load = Load(
            deadline_s=self.deadline_s,
            decode_deadline_s=self.running_due_s,
            prefill_s=prefill,
            decode_s=self.decode_s(),
            tpot_s=pace,
            blocked=blocked,
        )
        return self._load

    def lengths(self) -> list[tuple[int, int]]:
        clock = self.clock
        pairs = [(w.input_tokens, w.produced + clock - w.joined_clock) for w in self.running.values()]
        pairs += [(w.input_tokens, w.produced) for w in self.waiting]
        return pairs
