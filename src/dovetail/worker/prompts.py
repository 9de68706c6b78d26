"""The prompts of one turn while it is carried out: what each has left to compute in it, and how far it came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dovetail.node import events
from dovetail.sched.sequence import Sequence
from dovetail.sched.turn import TurnRow
from dovetail.worker.runner import ModelRunner


@dataclass(eq=False, slots=True)
class SequenceState:
    """One open choice of one request while it is here."""

    id: int  # by which controller and node know it
    model: str
    sequence: Sequence
    instance: int | None = None  # whose turns it takes part in
    has_token: bool = False  # its first one was told
    hold: int = 0  # the migration for which it is held; 0 = none
    awaited: set[str] = field(default_factory=set)  # what it has no turn before: "grammar", "adapter"


@dataclass(eq=False, slots=True)
class PromptPart:
    """What a turn computes of one prompt; of one that is held never the last token."""

    state: SequenceState
    left: int  # tokens; of one that was held and has been handed over there is one more to compute than the node knows
    known: int  # tokens of the whole prompt
    is_done: bool = False  # it has its token, or has ended

    @property
    def id(self) -> int:
        return self.state.sequence.id

    def is_open(self, instance: int) -> bool:
        sequence = self.state.sequence
        is_computed = sequence.is_held and sequence.num_pending == 1
        return self.left > 0 and not self.is_done and not is_computed and self.state.instance == instance

    def take(self, row: TurnRow | None, finished: list[int]) -> None:
        """What an iteration did to it."""
        if row is not None:
            self.left -= row.count
            self.is_done = row.samples
        self.is_done |= self.id in finished

    @property
    def computed(self) -> int:
        """How far it is."""
        sequence = self.state.sequence
        return self.known if self.is_done else sequence.num_computed + sequence.is_held


class PromptTurn:
    """Parts of prompts, and whoever decodes beside them."""

    def __init__(self, turn: events.Turn, states: Mapping[int, SequenceState], runner: ModelRunner) -> None:
        self._instance = turn.instance.id
        self._runner = runner
        self._parts = [
            PromptPart(states[one.work.id], one.tokens + one.is_last, one.work.known_tokens) for one in turn.prompts
        ]
        self._running = [states[id].sequence for id in turn.decoding]
        self.num_tokens = sum(one.tokens for one in turn.prompts) + len(self._running)

    @property
    def quotas(self) -> dict[int, int]:
        """By sequence: how many tokens may be computed still."""
        return {part.id: part.left for part in self._parts}

    @property
    def is_open(self) -> bool:
        return any(part.is_open(self._instance) for part in self._parts)

    def batches(self) -> list[list[Sequence]]:
        """Iterations of those who have something left to compute; whoever decodes does so once."""
        waiting = [part.state.sequence for part in self._parts if part.is_open(self._instance)]
        running, self._running = self._running, []
        return self._runner.batches([*running, *waiting], self.quotas)

    def take(self, rows: Mapping[int, TurnRow], finished: list[int]) -> None:
        """What an iteration did."""
        for part in self._parts:
            part.take(rows.get(part.id), finished)

    @property
    def computed(self) -> dict[int, int]:
        """By request: how many of its tokens are."""
        return {part.state.id: part.computed for part in self._parts}
