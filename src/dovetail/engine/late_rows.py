"""An embedding whose rows are still arriving: an iteration waits for those of its own tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from dovetail.engine.weights import Weights
from dovetail.node.ports import Checkpoint
from dovetail.sched.turn import Turn

EMBEDDING = "embed.weight"


class LateRows(Protocol):
    @property
    def is_complete(self) -> bool: ...

    def lacks(self, rows: Iterable[int]) -> bool:
        """Whether one of them is still to come; whoever brings them is asked for those first."""

    def wait(self) -> None:
        """For a moment. Raises where they will never come."""


@runtime_checkable
class ArrivingCheckpoint(Protocol):
    """Everything of it is here but, perhaps, rows of its embedding."""

    def late_rows(self) -> LateRows | None:
        """None where all of them are here."""

    def wait(self, name: str | None = None) -> None: ...


@runtime_checkable
class ArrivingExecutor(Protocol):
    late_rows: LateRows | None  # None once all of them are here


def late_rows_of(checkpoint: Checkpoint, weights: Weights) -> LateRows | None:
    """A table that is copied has to be here first."""
    if not isinstance(checkpoint, ArrivingCheckpoint):
        return None
    late = checkpoint.late_rows()
    if late is not None and not weights.is_in_place(EMBEDDING):
        checkpoint.wait()
        return None
    return late


def wait_for_rows(late: LateRows, turn: Turn) -> None:
    """Nothing is computed from rows that are not here, whoever asks for it."""
    tokens = [token for row in turn.rows for token in (*row.tokens[row.start : row.end], *row.draft)]
    while late.lacks(tokens):
        late.wait()
