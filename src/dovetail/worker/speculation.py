"""Drafts for the sequences of one model: proposed by prompt lookup and by a draft model, as many as are worth what they
take.

What a sequence says does not depend on any of this, only how soon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import NamedTuple

from dovetail.policy.headroom import INFINITY
from dovetail.policy.speculation import (
    MIN_GAIN,
    Acceptance,
    Proposal,
    Steps,
    drafting_gain,
    is_worth_catching_up,
    no_steps,
    plan_drafts,
)
from dovetail.sched.blocks import BlockPool
from dovetail.sched.drafts import reserve, trim
from dovetail.sched.lookup import LookupIndex
from dovetail.sched.sequence import Sequence
from dovetail.sched.turn import Outcome, Turn
from dovetail.types import Speculation
from dovetail.worker.draft_model import DraftModel

LONG_MATCH = 4  # by kind of match (`_kind_of`)
BY_MODEL = 5  # the kind of what a draft model makes
# What is believed of a model that nothing was seen of yet. Two or three tokens occur again by chance, more mostly in a
# copy.
PRIORS = {2: 0.3, 3: 0.5, LONG_MATCH: 0.8, BY_MODEL: 0.6}
# Drafts that are likely right and yet too dear are tried once in so many iterations: what rows cost is learnt from rows
# that are computed, and a machine that was busy then may be idle now.
RETRY_EVERY = 64
RETRY_CHANCE = 0.5
RETRY_TOKENS = 2
# A draft model that does not gain is thought of again after so many iterations: the thought itself takes time.
REST = 8
TRIED_GAIN = 1.2  # assumed of one that is tried because its costs may be other than they seem
MAX_LAG = 16  # tokens that a draft model computes together with its first guess
CATCH_UP_S = 0.1  # what it may take for others in one iteration, or as long as an iteration takes
LEAST_CATCH_UP = 4  # tokens: fewer would not gain on a text that goes on meanwhile


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
    sequence: Sequence
    kind: int
    length: int
    tokens: list[int]  # none yet where a draft model has to make them


class Speculator:
    def __init__(self, config: Speculation, model: DraftModel | None = None) -> None:
        self._config = config
        self.model = model  # that drafts
        self.proposed = 0  # tokens that were verified
        self.accepted = 0  # of them
        self._texts: dict[int, _Text] = {}
        self._seen: dict[int, Acceptance] = {kind: Acceptance() for kind in PRIORS}  # of all sequences
        self._num_spurned = 0  # iterations whose likely drafts were too dear
        self._kinds: dict[int, int] = {}  # by sequence: the kind of the draft under way
        self._resting = 0  # iterations until the draft model is thought of again
        self._num_rests = 0  # that it would have been likely right in
        self._is_trying = False  # it is tried although it seems too dear, until it was once

    def propose(
        self, sequences: Iterable[Sequence], batch: int, costs: Callable[[], Costs], pool: BlockPool | None = None
    ) -> dict[int, list[int]]:
        """Drafts by sequence. `costs` is asked if there is anything to propose; without a pool no model drafts."""
        able = [one for one in sequences if _may_have_drafts(one)]
        found = [draft for one in able if (draft := self._look_up(one)) is not None]
        is_modelled = self.model is not None and pool is not None and bool(able) and self._is_awake()
        if not found and not is_modelled:
            return {}
        known = costs()
        if is_modelled:
            assert pool is not None
            return self._propose_with_model(able, found, batch, known, pool)
        return self._propose_found(found, batch, known)

    def _propose_found(self, found: Several[_Draft], batch: int, costs: Costs) -> dict[int, list[int]]:
        """By lookup alone."""
        if not found:
            return {}
        lengths = self._lengths(found, batch, costs)
        self._note(found, lengths)
        return {one.sequence.id: one.tokens[:length] for one, length in zip(found, lengths, strict=True) if length}

    def _note(self, drafts: Several[_Draft], lengths: Several[int]) -> None:
        self._kinds = {one.sequence.id: one.kind for one in drafts}
        for draft, length in zip(drafts, lengths, strict=True):
            if not length:
                self._fade(draft)

    def _fade(self, draft: _Draft) -> None:
        self._seen[draft.kind].fade()
        self._texts[draft.sequence.id].seen[draft.kind].fade()

    def _look_up(self, sequence: Sequence) -> _Draft | None:
        text = self._texts.get(sequence.id)
        if text is None:
            text = self._texts[sequence.id] = _Text(LookupIndex(sequence.prediction))
        text.index.extend(sequence.tokens)
        match = text.index.find(self._config.tokens)
        if match is None:
            return None
        kind = _kind_of(match.length)
        text.seen.setdefault(kind, Acceptance())
        return _Draft(sequence, kind, len(match.tokens), match.tokens)

    def _lengths(self, drafts: Several[_Draft], batch: int, costs: Costs, step_s: Steps = no_steps) -> list[int]:
        if self._config.mode == "always":
            return [draft.length for draft in drafts]
        proposals = [self._proposal(draft) for draft in drafts]
        lengths, _ = plan_drafts(proposals, batch, costs.iteration_s, costs.most_s, step_s)
        best = max(range(len(drafts)), key=lambda at: proposals[at].chance)
        if not any(lengths) and proposals[best].chance >= RETRY_CHANCE and self._is_time_to_retry(batch, costs):
            lengths[best] = min(RETRY_TOKENS, proposals[best].length)
        return lengths

    def _proposal(self, draft: _Draft) -> Proposal:
        return Proposal(draft.length, self._chance(draft), draft.kind == BY_MODEL)

    def _is_time_to_retry(self, batch: int, costs: Costs) -> bool:
        self._num_spurned += 1
        return self._num_spurned % RETRY_EVERY == 0 and costs.iteration_s(batch + RETRY_TOKENS) <= costs.most_s

    def _chance(self, draft: _Draft) -> float:
        """As this sequence has it; until it has shown that, as all have it."""
        usual = self._seen[draft.kind].chance(PRIORS[draft.kind])
        return self._texts[draft.sequence.id].seen[draft.kind].chance(usual)

    # A draft model

    def _is_awake(self) -> bool:
        self._resting -= 1
        return self._resting < 0

    def _propose_with_model(
        self, able: Several[Sequence], found: Several[_Draft], batch: int, costs: Costs, pool: BlockPool
    ) -> dict[int, list[int]]:
        """The likelier of what was looked up and what the model would say, where the model is worth its time; else what
        was looked up."""
        assert self.model is not None
        looked_up = {draft.sequence.id: draft for draft in found}
        drafts = [self._by_model(one) for one in able if self.model.may_draft(one)]
        drafts = [one for one in drafts if not self._is_likelier(looked_up.get(one.sequence.id), one)]
        lags = {one.sequence.id: self.model.lag(one.sequence, pool) for one in drafts}
        step_s = self._step_s([one.sequence for one in drafts])
        gain = self._gain(drafts, batch, costs, step_s)
        if gain < MIN_GAIN:
            for draft in drafts:
                self._fade(draft)
            self._resting = REST
            return self._propose_found(found, batch, costs)
        ready = [one for one in drafts if lags[one.sequence.id] <= MAX_LAG]
        late = [one for one in drafts if lags[one.sequence.id] > MAX_LAG]
        guessed = {one.sequence.id for one in ready}
        chosen = [*ready, *(draft for draft in found if draft.sequence.id not in guessed)]
        lengths = self._lengths(chosen, batch, costs, step_s) if chosen else []
        if self._is_trying and ready and not any(lengths):
            lengths[0] = min(RETRY_TOKENS, self._config.tokens)
            if _takes_s(lengths[:1], batch, costs, step_s) > costs.most_s:
                lengths[0] = 0
        self._note(chosen, lengths)
        wanted = {one.sequence.id: length for one, length in zip(chosen, lengths, strict=True) if length}
        made = {one.sequence.id: one.tokens[: wanted.get(one.sequence.id, 0)] for one in chosen if one.tokens}
        drafted = self._draft(able, {id: count for id, count in wanted.items() if id in guessed}, pool)
        made |= drafted
        self._is_trying &= not drafted
        if late:
            by_model = [length for one, length in zip(chosen, lengths, strict=True) if one.kind == BY_MODEL]
            taken_s = _takes_s(by_model, batch, costs, step_s, sum(lengths) - sum(by_model))
            self._catch_up(late, gain, batch, costs, taken_s, pool)
        return {id: tokens for id, tokens in made.items() if tokens}

    def _by_model(self, sequence: Sequence) -> _Draft:
        self._texts[sequence.id].seen.setdefault(BY_MODEL, Acceptance())
        return _Draft(sequence, BY_MODEL, self._config.tokens, [])

    def _is_likelier(self, found: _Draft | None, draft: _Draft) -> bool:
        return found is not None and self._chance(found) >= self._chance(draft)

    def _step_s(self, sequences: Several[Sequence]) -> Steps:
        """With its first guess the model computes one or two tokens that the last iteration found."""
        assert self.model is not None
        decode_s = self.model.latency.decode_s
        mean = sum(len(one.tokens) for one in sequences) // max(len(sequences), 1)

        def step_s(step: int, count: int) -> float:
            rows = count * 2 if step == 0 else count
            return decode_s(rows, rows * mean)

        return step_s

    def _gain(self, drafts: Several[_Draft], batch: int, costs: Costs, step_s: Steps) -> float:
        """Of the likeliest chance for all; without bound where nobody asks for it."""
        if not drafts:
            return 1.0
        if self._config.mode == "always":
            return INFINITY
        best = max((self._proposal(draft) for draft in drafts), key=lambda proposal: proposal.chance)
        gain = drafting_gain(best, len(drafts), batch, costs.iteration_s, step_s)
        if gain < MIN_GAIN and best.chance >= RETRY_CHANCE and not self._is_trying:
            self._num_rests += 1
            self._is_trying = self._num_rests >= REST and self._num_rests & (self._num_rests - 1) == 0  # ever rarer
        return max(gain, TRIED_GAIN) if self._is_trying else gain

    def _draft(self, sequences: Several[Sequence], wanted: dict[int, int], pool: BlockPool) -> dict[int, list[int]]:
        """Blocks that are reserved and not used are given back whatever happens."""
        assert self.model is not None
        if not wanted:
            return {}
        counts = reserve(sequences, wanted, pool)
        drafted = [one for one in sequences if one.id in counts]
        made: dict[int, list[int]] = {}
        try:
            made = self.model.draft(drafted, counts, pool)
        finally:
            for one in drafted:
                trim(one, pool, len(made.get(one.id, ())))
        return made

    def _catch_up(
        self, late: Several[_Draft], gain: float, batch: int, costs: Costs, taken_s: float, pool: BlockPool
    ) -> None:
        """The model reads one text that it has not read yet, or a part of it, if that is likely to pay. The iteration
        takes `taken_s` without that."""
        assert self.model is not None
        usual_s, is_asked = costs.iteration_s(batch), self._config.mode == "always"
        for sequence in (draft.sequence for draft in late):
            lag = self.model.lag(sequence, pool) - 1
            whole_s = self.model.catching_up_s(sequence, pool, lag)
            if not is_asked and not is_worth_catching_up(sequence.num_generated, usual_s / batch, gain, whole_s):
                continue
            most_s = min(max(usual_s, CATCH_UP_S), costs.most_s - taken_s)
            count, most_s = lag, INFINITY if is_asked else most_s
            while count >= LEAST_CATCH_UP and self.model.catching_up_s(sequence, pool, count) > most_s:
                count //= 2
            if count >= LEAST_CATCH_UP:
                self.model.catch_up(sequence, pool, count)
            return

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
        if self.model is not None:
            self.model.forget(sequence)

    def drop_model(self) -> None:
        """It failed, or its instance goes."""
        if self.model is not None:
            self.model.close()
            self.model = None


def _may_have_drafts(sequence: Sequence) -> bool:
    is_whole = not sequence.is_alone and not sequence.is_held
    return sequence.speculates and is_whole and sequence.num_generated > 0 and sequence.num_pending == 1


def _takes_s(by_model: Several[int], batch: int, costs: Costs, step_s: Steps, found: int = 0) -> float:
    """An iteration with drafts of these lengths by the model, and so many tokens that were looked up."""
    sharing = [sum(length > step for length in by_model) for step in range(max(by_model, default=0))]
    drafting_s = sum(step_s(step, count) for step, count in enumerate(sharing))
    return drafting_s + costs.iteration_s(batch + sum(by_model) + found)


def _kind_of(length: int) -> int:
    """2 = two or three tokens, 3 = up to seven, 4 = more."""
    return min(length.bit_length(), LONG_MATCH)
