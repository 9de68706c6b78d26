"""One model on one node: its requests, and the memory that it has or waits for. Knows nothing of its neighbours."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import NamedTuple

from dovetail.policy.headroom import INFINITY
from dovetail.policy.lane import Lane
from dovetail.policy.memory import Part
from dovetail.policy.placement import Hosting
from dovetail.policy.turn_rule import TurnRule
from dovetail.policy.work import Phase


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    CLOSING = "closing"  # takes no work, gives its memory back


class PendingOp(NamedTuple):
    """A memory operation that the ledger has let go and that waits for the instance."""

    part: Part  # weights or KV
    old_bytes: int
    new_bytes: int


class Instance(Lane):
    __slots__ = (
        "busy_s",
        "epoch",
        "idle_since_s",
        "loaded_s",
        "model",
        "op_end_s",
        "op_running",
        "ops",
        "ordered_s",
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
        super().__init__(hosting, overestimate, phase, rule, id)
        self.model = model
        self.state = State.LOADING
        self.ops: deque[PendingOp] = deque()  # memory operations that wait for the end of a turn or of each other
        self.op_running = False
        self.op_end_s = 0.0  # when the one under way should end
        self.ordered_s = 0.0  # when its weights were asked for
        self.loaded_s = INFINITY  # when its weights should be there
        self.starved = False  # its next step does not fit its KV pool, which is being enlarged
        self.idle_since_s = 0.0
        self.epoch = 0  # counts idle periods, so that a stale keep-alive timer is recognised
        self.busy_s = 0.0

    def asked_s(self, loaded_s: float) -> float:
        """When its weights were asked for, or will be, if they are there by then: memory for them may be waited for."""
        return self.ordered_s if self.loaded_s != INFINITY else loaded_s - self.hosting.load_s

    @property
    def is_idle(self) -> bool:
        """It could be closed."""
        return not self.batch and self.state is State.READY and self.hosting.keep_alive_s != INFINITY

    @property
    def can_run(self) -> bool:
        return self.state is State.READY and not self.op_running and not self.ops and not self.starved
