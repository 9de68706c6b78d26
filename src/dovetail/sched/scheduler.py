"""Continuous batching of one model: sequences, their blocks and prefixes, and iterations of those who are named.

An iteration is a list of (sequence, number of tokens): a chunk of a prompt, or one token to decode. Who takes part is
`node`'s matter, or that of `fcfs` where a model has a device to itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several

import msgspec

from dovetail.sched.blocks import BlockPool
from dovetail.sched.drafts import NO_DRAFTS, trim, with_drafts
from dovetail.sched.sequence import Sequence
from dovetail.sched.turn import Outcome, RowOutcome, Turn, TurnRow
from dovetail.types import FinishReason, TokenEvent

NO_QUOTAS: Mapping[int, int] = {}


class SchedulerConfig(msgspec.Struct, frozen=True):
    context_length: int
    max_batch: int = 64  # sequences in one turn
    max_turn_tokens: int = 512  # tokens in one turn
    max_tokens: int = 0  # longest sequence that the pool could be grown for; 0 = what it holds now
    whole_prompts: bool = False  # never in chunks, rather beyond budget and quotas: an encoder reads a text at once


class Completed(msgspec.Struct, frozen=True):
    events: tuple[TokenEvent, ...]
    ended: tuple[int, ...]  # sequences whose executor state can be dropped


class Scheduler:
    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.pool = pool
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._config = config
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}  # by id, in order of arrival
        self._turn: Turn | None = None  # handed out, not yet completed
        self._ended: list[int] = []
        self._failed: list[TokenEvent] = []  # ends that no turn will report

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._failed)

    # Events in

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Free what these choices hold; at the end of the turn if one is running."""
        in_turn = {row.sequence for row in self._turn.rows} if self._turn else set()
        for sequence in [*self._running.values(), *self._waiting]:
            if sequence.request_id != request_id or choice not in (None, sequence.choice):
                continue
            if sequence.id in in_turn:
                sequence.aborted = True
            else:
                self._end(sequence)

    def cached_tokens(self, sequence: Sequence) -> int:
        """How many of its tokens the prefix cache has, if it began now."""
        return self.pool.cached_tokens(sequence.tokens, _reusable(sequence), sequence.root)

    # Sequences that somebody else places: `node` says who takes part, the pool follows its ledger

    def enter(self, sequence: Sequence) -> None:
        """A sequence that was made elsewhere; it may have run on another instance before."""
        assert sequence.num_computed == 0
        assert not sequence.blocks
        self._waiting.append(sequence)

    def enter_as_computed(self, sequence: Sequence) -> None:
        """One that runs at once, on blocks with whatever is in them: what a decode takes does not depend on that."""
        blocks = self.pool.allocate(self.pool.blocks_for(len(sequence.tokens)))
        assert blocks is not None, "the pool was made for it"
        sequence.blocks, sequence.num_computed, sequence.was_admitted = blocks, len(sequence.tokens) - 1, True
        sequence.num_sealed = len(blocks)  # what was never computed is no prefix for anyone
        sequence.longest = self._longest(sequence)
        self._running[sequence.id] = sequence

    def leave(self, sequence: Sequence) -> None:
        """Take it back with the tokens it has; its blocks are free. Not while it is in a turn."""
        assert not self.is_in_turn(sequence)
        self._let_go(sequence)
        if self._running.pop(sequence.id, None) is None:
            self._waiting.remove(sequence)

    def is_in_turn(self, sequence: Sequence) -> bool:
        return self._turn is not None and any(row.sequence == sequence.id for row in self._turn.rows)

    def turn_of(
        self,
        sequences: Several[Sequence],
        quotas: Mapping[int, int] = NO_QUOTAS,
        drafts: Mapping[int, Several[int]] = NO_DRAFTS,
    ) -> Turn | None:
        """An iteration of exactly these, each catching up as far as its quota of tokens (by id; none = no limit) and
        the budget go; None if nothing is due or the pool is too small, which whoever sizes it has to prevent. Drafts
        (by id) are cut to what there is room for."""
        assert self._turn is None, "the last turn was not completed"
        rows: list[TurnRow] = []
        budget, size = self._config.max_turn_tokens, self.pool.block_size
        for sequence in sequences:
            if budget == 0 or len(rows) == self._config.max_batch:
                break
            computed = sequence.num_computed
            if self._config.whole_prompts and len(sequence.tokens) - computed > budget:
                if rows:
                    continue
                budget = len(sequence.tokens)
            if len(sequence.tokens) - computed == 1 and not sequence.is_held and computed < len(sequence.blocks) * size:
                count = 1  # most rows of most iterations: a token, and room for it
            else:
                quota = budget if self._config.whole_prompts else quotas.get(sequence.id, budget)
                count = self._catch_up(sequence, min(budget, quota))
                if count == 0:
                    continue
            rows.append(row_of(sequence, count))
            budget -= count
        if drafts:
            rows = list(with_drafts(rows, {one.id: one for one in sequences}, drafts, self.pool))
        self._turn = Turn(tuple(rows)) if rows else None
        return self._turn

    def turn_after(self) -> Turn | None:
        """The iteration after the one under way, if nothing comes between: its sequences, each with the token that it
        is about to get, but for those that will have reached their length. None if not all of them decode, or there is
        no room yet. To be taken up by `resume_turn`; until then nothing but the blocks has changed."""
        assert self._turn is not None, "no turn to follow"
        running, size = self._running, self.pool.block_size
        rows: list[TurnRow] = []
        for row in self._turn.rows:
            if row.count != 1 or not row.samples:
                return None
            sequence, end = running[row.sequence], row.start + 1
            table = sequence.blocks
            if sequence.aborted or len(sequence.tokens) - sequence.num_prompt + 1 >= sequence.longest:
                continue
            if end >= len(table) * size:
                blocks = self.pool.allocate(1)
                if blocks is None:
                    return None
                table.extend(blocks)
            rows.append(
                TurnRow(row.sequence, row.tokens, end, 1, table, row.num_prompt, row.sampling, True, row.adapter)
            )
        return Turn(tuple(rows)) if rows else None

    def resume_turn(self, turn: Turn, sequences: Iterable[Sequence]) -> Turn | None:
        """Take up what `turn_after` said, if it is what `turn_of` these sequences would be; rows of sequences that have
        ended since are no part of it."""
        assert self._turn is None, "the last turn was not completed"
        rows = {row.sequence: row for row in turn.rows}
        kept: list[TurnRow] = []
        for sequence in sequences:
            row = rows.get(sequence.id)
            if row is None or row.start != sequence.num_computed or row.blocks is not sequence.blocks:
                return None
            kept.append(row)
        if len(kept) < len(rows):
            asked = {row.sequence for row in kept}
            if any(id in self._running and id not in asked for id in rows):
                return None  # of some who go on, what was computed ahead would be lost
        self._turn = Turn(tuple(kept)) if kept else None
        return self._turn

    def _catch_up(self, sequence: Sequence, budget: int) -> int:
        """Blocks for what it has pending, as far as the budget goes; returns how many tokens that are."""
        count = self._extend(sequence, budget) if sequence.blocks else self._start(sequence, budget)
        if sequence.blocks and sequence.id not in self._running:
            self._waiting.remove(sequence)
            self._running[sequence.id] = sequence
        return count

    def _extend(self, sequence: Sequence, budget: int) -> int:
        count = min(sequence.num_pending - sequence.is_held, budget)
        missing = self.pool.blocks_for(sequence.num_computed + count) - len(sequence.blocks)
        if missing > 0:
            if (blocks := self.pool.allocate(missing)) is None:
                return 0
            sequence.blocks.extend(blocks)
        return count

    def resize(self, num_blocks: int) -> list[tuple[int, int]]:
        """Move the end of the pool, and what is held beyond it; returns the (from, to) blocks to copy."""
        moves: list[tuple[int, int]] = []
        if num_blocks < self.pool.target:
            moves = self.pool.relocate(num_blocks)
            places = dict(moves)
            for sequence in self._running.values():
                sequence.blocks = [places.get(block, block) for block in sequence.blocks]
        self.pool.resize(num_blocks)
        assert self.pool.committed == num_blocks
        if not self._config.max_tokens:
            for sequence in self._running.values():
                sequence.longest = self._longest(sequence)
        return moves

    # What came of a turn

    def complete(self, outcome: Outcome) -> Completed:
        """Take in what the turn computed, and say what it means for each request."""
        assert self._turn is not None, "no turn to complete"
        turn, self._turn = self._turn, None
        results = {result.sequence: result for result in outcome.rows}
        running, size = self._running, self.pool.block_size
        events: list[TokenEvent] = []
        for row in turn.rows:
            sequence = running[row.sequence]
            sequence.num_computed = computed = row.start + row.count
            if (sequence.num_sealed + 1) * size <= computed:
                _cache_full_blocks(sequence, self.pool)
            if sequence.aborted:
                self._end(sequence)
            elif row.draft:
                events += self._take_several(sequence, row, results[row.sequence])
            elif row.samples:
                events.append(self._take(sequence, results[row.sequence]))
        return self._flush(events)

    def take_failed(self) -> Completed:
        """Ends that came about without a turn."""
        return self._flush([])

    def fail_turn(self, error: str) -> Completed:
        """The executor could not run the turn: its sequences end, the others go on."""
        assert self._turn is not None
        turn, self._turn = self._turn, None
        events = []
        for row in turn.rows:
            sequence = self._running[row.sequence]
            self._end(sequence)
            if not sequence.aborted:
                events.append(end_event(sequence, FinishReason.ERROR, error))
        return self._flush(events)

    def _start(self, sequence: Sequence, budget: int) -> int:
        """Reuse what is cached, hold blocks for the first chunk; 0 tokens if there is no room now."""
        blocks, key = self.pool.match(sequence.tokens, _reusable(sequence), sequence.root)
        computed = len(blocks) * self.pool.block_size
        count = min(len(sequence.tokens) - sequence.is_held - computed, budget)
        fresh = self.pool.allocate(self.pool.blocks_for(computed + count) - len(blocks))
        if fresh is None:
            self.pool.release(blocks)
            return 0
        sequence.blocks = blocks + fresh
        sequence.num_computed, sequence.num_sealed, sequence.last_key = computed, len(blocks), key
        sequence.longest = self._longest(sequence)
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.cached_tokens = min(computed, sequence.num_prompt)  # a resumed answer may be cached as well
            self.prefix_queries += sequence.num_prompt
            self.prefix_hits += sequence.cached_tokens
        return count

    # Outcomes

    def _take_several(self, sequence: Sequence, row: TurnRow, result: RowOutcome) -> list[TokenEvent]:
        """As many iterations with a token each would."""
        events = [self._take(sequence, result)]
        for further in result.further:
            if events[-1].finish is not None:
                break
            sequence.num_computed += 1
            _cache_full_blocks(sequence, self.pool)
            events.append(self._take(sequence, further))
        if events[-1].finish is None:
            trim(sequence, self.pool)
        events[0] = msgspec.structs.replace(events[0], proposed=len(row.draft), accepted=len(events) - 1)
        return events

    def _take(self, sequence: Sequence, result: RowOutcome) -> TokenEvent:
        if result.error is not None:
            self._end(sequence)
            event = end_event(sequence, FinishReason.ERROR, result.error)
            return msgspec.structs.replace(event, unprocessable=result.unprocessable)
        if result.embedding is not None:
            self._end(sequence)
            event = end_event(sequence, FinishReason.STOP, None)
            return msgspec.structs.replace(event, embedding=result.embedding, cached_tokens=sequence.cached_tokens)
        token = result.token
        sequence.tokens.append(token)
        generated = len(sequence.tokens) - sequence.num_prompt
        finish = None
        if result.ends or generated >= sequence.longest or token in sequence.sampling.stop_token_ids:
            finish = _finish_reason(sequence, result)
            if finish is not None:
                self._end(sequence)
        cached = sequence.cached_tokens if generated == 1 else 0
        event = TokenEvent(sequence.request_id, sequence.choice, token, finish, result.logprobs, cached)
        if result.prompt_logprobs is None:
            return event
        return msgspec.structs.replace(event, prompt_logprobs=result.prompt_logprobs)

    def _longest(self, sequence: Sequence) -> int:
        """How many tokens its answer may have."""
        capacity = self._config.max_tokens or self.pool.target * self.pool.block_size
        limit = min(sequence.num_prompt + sequence.sampling.max_tokens, self._config.context_length, capacity)
        return limit - sequence.num_prompt

    # Ends

    def _end(self, sequence: Sequence) -> None:
        self._let_go(sequence)
        if self._running.pop(sequence.id, None) is None and sequence in self._waiting:
            self._waiting.remove(sequence)
        self._ended.append(sequence.id)

    def _let_go(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0

    def _flush(self, events: list[TokenEvent]) -> Completed:
        completed = Completed((*self._failed, *events), tuple(self._ended))
        self._failed, self._ended = [], []
        return completed


def _reusable(sequence: Sequence) -> int:
    """The last token is always computed: what follows it is wanted."""
    return 0 if sequence.sampling.reads_whole_prompt else len(sequence.tokens) - 1


def row_of(sequence: Sequence, count: int) -> TurnRow:
    tokens, start = sequence.tokens, sequence.num_computed
    samples = start + count == len(tokens)
    prompt, sampling = sequence.num_prompt, sequence.sampling
    return TurnRow(sequence.id, tokens, start, count, sequence.blocks, prompt, sampling, samples, sequence.adapter)


def _finish_reason(sequence: Sequence, result: RowOutcome) -> FinishReason | None:
    sampling = sequence.sampling
    if result.ends:
        return FinishReason.STOP
    if result.token in sampling.stop_token_ids and sequence.num_generated >= sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if sequence.num_generated >= sequence.longest else None


def _cache_full_blocks(sequence: Sequence, pool: BlockPool) -> None:
    """Offer the blocks that this turn filled for reuse."""
    size = pool.block_size
    while (sequence.num_sealed + 1) * size <= sequence.num_computed:
        start = sequence.num_sealed * size
        content = tuple(sequence.tokens[start : start + size])
        sequence.last_key = pool.seal(sequence.blocks[sequence.num_sealed], sequence.last_key, content)
        sequence.num_sealed += 1


def end_event(sequence: Sequence, reason: FinishReason, error: str | None) -> TokenEvent:
    return TokenEvent(sequence.request_id, sequence.choice, token=None, finish=reason, error=error)
