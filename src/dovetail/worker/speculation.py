"""Drafts for the sequences of one model: proposed by prompt lookup, as many as are worth their rows.

What a sequence says does not depend on any of this, only how soon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import NamedTuple

from dovetail.policy.speculation import Acceptance, Proposal, draft_lengths
from dovetail.sched.lookup import LookupIndex
from dovetail.sched.sequence import Sequence
from dovetail.sched.turn import Outcome, Turn
from dovetail.types import Speculation

# By kind of match (`_kind_of`): what is believed of a model that nothing was seen of yet. Two or three tokens occur
# again by chance, more mostly in a copy.
PRIORS = {2: 0.3, 3: 0.5, 4: 0.8}
# Drafts that are likely right and yet too dear are tried once in so many iterations: what rows cost is learnt from rows
# that are computed, and a machine that was busy then may be idle now.
RETRY_EVERY = 64
RETRY_CHANCE = 0.5
RETRY_TOKENS = 2


class Costs(NamedTuple):
    """What an iteration takes, and may take."""

    iteration_s: Callable[[int], float]  # of so many rows
    most_s: float  # somebody would be late after a longer one


@dataclass
class _Text:
    """One sequence that is drafted for."""

    index: LookupIndex
    seen: dict[int, Acceptance] = field(default_factory=dict)  # by kind of match


class _Draft(NamedTuple):
    sequence: int
    kind: int
    tokens: list[int]


class Speculator:
    def __init__(self, config: Speculation) -> None:
        self._config = config
        self.proposed = 0  # tokens that were verified
        self.accepted = 0  # of them
        self._texts: dict[int, _Text] = {}
        self._seen: dict[int, Acceptance] = {kind: Acceptance() for kind in PRIORS}  # of all sequences
        self._num_spurned = 0  # iterations whose likely drafts were too dear
        self._kinds: dict[int, int] = {}  # by sequence: the kind of the draft under way

    def propose(self, sequences: Iterable[Sequence], batch: int, costs: Callable[[], Costs]) -> dict[int, list[int]]:
        """Drafts by sequence. `costs` is asked if there is anything to propose."""
        drafts = [draft for one in sequences if (draft := self._draft_of(one)) is not None]
        if not drafts:
            return {}
        lengths = self._lengths(drafts, batch, costs())
        self._kinds = {one.sequence: one.kind for one in drafts}
        for draft, length in zip(drafts, lengths, strict=True):
            if not length:
                self._seen[draft.kind].fade()
                self._texts[draft.sequence].seen[draft.kind].fade()
        return {one.sequence: one.tokens[:length] for one, length in zip(drafts, lengths, strict=True) if length}

    def _draft_of(self, sequence: Sequence) -> _Draft | None:
        if not sequence.speculates or sequence.is_alone or not sequence.num_generated or sequence.num_pending != 1:
            return None
        text = self._texts.get(sequence.id)
        if text is None:
            text = self._texts[sequence.id] = _Text(LookupIndex(sequence.prediction))
        text.index.extend(sequence.tokens)
        match = text.index.find(self._config.tokens)
        if match is None:
            return None
        kind = _kind_of(match.length)
        text.seen.setdefault(kind, Acceptance())
        return _Draft(sequence.id, kind, match.tokens)

    def _lengths(self, drafts: Several[_Draft], batch: int, costs: Costs) -> list[int]:
        if self._config.mode == "always":
            return [len(draft.tokens) for draft in drafts]
        proposals = [Proposal(len(draft.tokens), self._chance(draft)) for draft in drafts]
        lengths = draft_lengths(proposals, batch, costs.iteration_s, costs.most_s)
        best = max(range(len(drafts)), key=lambda at: proposals[at].chance)
        if not any(lengths) and proposals[best].chance >= RETRY_CHANCE and self._is_time_to_retry(batch, costs):
            lengths[best] = min(RETRY_TOKENS, proposals[best].length)
        return lengths

    def _is_time_to_retry(self, batch: int, costs: Costs) -> bool:
        self._num_spurned += 1
        return self._num_spurned % RETRY_EVERY == 0 and costs.iteration_s(batch + RETRY_TOKENS) <= costs.most_s

    def _chance(self, draft: _Draft) -> float:
        """As this sequence has it; until it has shown that, as all have it."""
        usual = self._seen[draft.kind].chance(PRIORS[draft.kind])
        return self._texts[draft.sequence].seen[draft.kind].chance(usual)

    def observe(self, turn: Turn, outcome: Outcome) -> None:
        """What came of the drafts that were proposed last."""
        accepted = {result.sequence: len(result.further) for result in outcome.rows}
        for row in turn.rows:
            if not row.draft or row.sequence not in accepted:
                continue
            count, kind = accepted[row.sequence], self._kinds[row.sequence]
            self.proposed += len(row.draft)
            self.accepted += count
            self._seen[kind].observe(count, len(row.draft))
            self._texts[row.sequence].seen[kind].observe(count, len(row.draft))

    def forget(self, sequence: int) -> None:
        self._texts.pop(sequence, None)


def _kind_of(length: int) -> int:
    """2 = two or three tokens, 3 = up to seven, 4 = more."""
    return min(length.bit_length(), max(PRIORS))
