"""One model on one node: its requests, and the memory that it has or waits for. Knows nothing of its neighbours."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import NamedTuple

from dovetail.node.batch import Batch
from dovetail.node.rhythm import Rhythm
from dovetail.policy.headroom import INFINITY
from dovetail.policy.memory import Part
from dovetail.policy.placement import Hosting
from dovetail.policy.shadow import TurnRule
from dovetail.policy.work import Phase, Work


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    CLOSING = "closing"  # takes no work, gives its memory back


class PendingOp(NamedTuple):
    """A memory operation that the ledger has let go and that waits for the instance."""

    part: Part  # weights or KV
    old_bytes: int
    new_bytes: int


class Instance(Batch):
    __slots__ = (
        "busy_s",
        "epoch",
        "id",
        "idle_since_s",
        "kv_tokens",
        "loaded_s",
        "model",
        "op_end_s",
        "op_running",
        "ops",
        "ordered_s",
        "rhythm",
        "starved",
        "state",
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
        super().__init__(hosting, overestimate, phase, rule)
        self.id = id
        self.model = model
        self.state = State.LOADING
        self.kv_tokens = 0  # room in its KV pool
        self.ops: deque[PendingOp] = deque()  # memory operations that wait for the end of a turn or of each other
        self.op_running = False
        self.op_end_s = 0.0  # when the one under way should end
        self.ordered_s = 0.0  # when its weights were asked for
        self.loaded_s = INFINITY  # when its weights should be there
        self.starved = False  # its next step does not fit its KV pool, which is being enlarged
        self.idle_since_s = 0.0
        self.epoch = 0  # counts idle periods, so that a stale keep-alive timer is recognised
        self.busy_s = 0.0
        self.rhythm = Rhythm()  # of its turns

    @property
    def is_idle(self) -> bool:
        """It could be closed."""
        return not self.batch and self.state is State.READY and self.hosting.keep_alive_s != INFINITY

    @property
    def can_run(self) -> bool:
        return self.state is State.READY and not self.op_running and not self.ops and not self.starved

    # KV blocks

    def holds_blocks(self, work: Work) -> bool:
        return work.id in self.running or work.computed > 0

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

    def is_short(self, *prompts: int) -> bool:
        """The next iteration, with prompts that need room for so many more tokens each, could overrun the KV pool."""
        size = self.hosting.block_tokens
        spare_tokens = size * max(len(prompts) - 1, 0)  # each rounds up to whole blocks
        if self.loose_tokens + sum(prompts) + spare_tokens <= self.kv_tokens:
            return False
        more = sum([-(tokens // -size) for tokens in prompts])
        return (self.used_blocks() + len(self.running) + more) * size > self.kv_tokens
