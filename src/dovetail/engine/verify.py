"""Drafts verified in one iteration: every proposed token is a row of its own, computed as if those before it were
known, and what follows it is chosen as it would have been without a draft.

A row's numbers do not depend on its company, and a choice depends on its row's tokens and one number drawn from (seed,
position). So the text with drafts is the text without, for any sampling; a draft decides how many of its tokens one
iteration finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
from torch import Tensor

from dovetail.sched.turn import RowOutcome, Turn, TurnRow

# Of a turn: the rows that sample, their logits, and where each row's largest is, if it was looked for.
Forward = Callable[[Turn], tuple[list[TurnRow], Tensor, list[int] | None]]
Choose = Callable[[Tensor, list[TurnRow], Sequence[int] | None], list[RowOutcome]]


def verify(turn: Turn, forward: Forward, choose: Choose) -> list[RowOutcome]:
    """Position by position, of those whose drafts were right so far: nothing is chosen in vain, and a grammar sees the
    tokens of the text only, in their order."""
    sampled, logits, best = forward(Turn(tuple(one for row in turn.rows for one in _spread(row))))
    places = {(row.sequence, row.start): at for at, row in enumerate(sampled)}
    found: dict[int, list[RowOutcome]] = {row.sequence: [] for row in turn.rows if row.samples}
    going = [row for row in turn.rows if row.samples]
    step = 0
    while going:
        at = [places[row.sequence, row.end - 1 + step if row.draft else row.start] for row in going]
        chosen = choose(logits[at], [sampled[i] for i in at], None if best is None else [best[i] for i in at])
        for outcome in chosen:
            found[outcome.sequence].append(outcome)
        going = [row for row, outcome in zip(going, chosen, strict=True) if _goes_on(row, step, outcome)]
        step += 1
    return [msgspec.structs.replace(first, further=tuple(more)) for first, *more in found.values()]


def _spread(row: TurnRow) -> Iterator[TurnRow]:
    yield row
    known = row.tokens
    for step, token in enumerate(row.draft, 1):
        known = [*known, token]
        yield msgspec.structs.replace(row, tokens=known, start=row.start + step, draft=())


def _goes_on(row: TurnRow, step: int, outcome: RowOutcome) -> bool:
    if step >= len(row.draft) or outcome.error is not None or outcome.ends:
        return False
    return outcome.token == row.draft[step] and outcome.token not in row.sampling.stop_token_ids
