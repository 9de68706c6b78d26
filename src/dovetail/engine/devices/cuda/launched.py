"""An iteration that a GPU has been asked for, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dovetail.engine.devices.cuda.sampling import Reported
from dovetail.engine.grammar import Grammars
from dovetail.errors import Unprocessable
from dovetail.sched.turn import Outcome, RowOutcome, TurnRow
from dovetail.types import TokenLogprobs


@dataclass
class Launched:
    sampled: list[TurnRow]
    done: torch.cuda.Event
    is_decode: bool  # by `DecodeSteps`
    is_typical: bool
    tokens: Tensor | None = None  # on the host once `done`
    logits: Tensor | None = None  # of rows that are still to be sampled: the host has to look at their texts first
    failures: dict[int, str] = field(default_factory=dict)  # by place: what is wrong with a row's own request
    reported: Reported | None = None  # log-probabilities

    def outcome(self, grammars: Grammars) -> Outcome:
        """Once it is done."""
        assert self.tokens is not None
        tokens = self.tokens.tolist()
        pairs = list(zip(self.sampled, tokens, strict=True))
        logprobs = self.reported.take(self.sampled, tokens) if self.reported is not None else {}
        if not self.failures and not logprobs and not grammars.has_states:
            return Outcome(tuple([_outcome(row, token) for row, token in pairs]))
        rows = []
        for at, (row, token) in enumerate(pairs):
            outcome = _outcome(row, token)
            if at in self.failures:
                outcome = RowOutcome(row.sequence, token=0, error=self.failures[at], unprocessable=True)
            elif outcome.error is None:
                outcome = _judged(row, token, logprobs.get(at), grammars)
            rows.append(outcome)
        return Outcome(tuple(rows))


def _judged(row: TurnRow, token: int, logprobs: TokenLogprobs | None, grammars: Grammars) -> RowOutcome:
    """With what its grammar says of the token."""
    ends = False
    if row.sampling.grammar is not None and grammars.follows(row.sequence):
        try:
            ends = grammars.is_complete_after(row, token)
        except Unprocessable as error:
            return RowOutcome(row.sequence, token=0, error=str(error), unprocessable=True)
    return RowOutcome(row.sequence, token, logprobs, ends)


def _outcome(row: TurnRow, token: int) -> RowOutcome:
    if token < 0:
        return RowOutcome(row.sequence, token=0, error="the model computed a value that is not a number")
    return RowOutcome(row.sequence, token)
