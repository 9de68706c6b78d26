"""A scheduler that chooses its own turns, where a model has a device to itself: first come, first served.

Order within a turn: sequences that need one token (decode) first, then unfinished prompts in chunks, then new arrivals,
until the token budget is spent. Without memory for a sequence that runs, the latest arrival is preempted and recomputed
later.
"""

from __future__ import annotations

import msgspec

from dovetail.sched.blocks import BlockPool
from dovetail.sched.scheduler import Scheduler, SchedulerConfig, end_event, row_of
from dovetail.sched.sequence import Sequence, sequences_of
from dovetail.sched.turn import Turn, TurnRow
from dovetail.types import FinishReason, Request

_TOO_LARGE = "the KV pool of {} blocks cannot hold this request"


class FcfsScheduler(Scheduler):
    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        super().__init__(config, pool)
        self.num_preemptions = 0
        self._next_id = 0

    def add(self, request: Request) -> None:
        assert request.prompt, "a prompt has at least one token"
        sequences = sequences_of(request, self._next_id)
        self._next_id += len(sequences)
        self._waiting.extend(sequences)

    def next_turn(self) -> Turn | None:
        """The next iteration, or None if nothing can run. Every turn must be completed before the next one."""
        assert self._turn is None, "the last turn was not completed"
        rows: dict[int, TurnRow] = {}
        preemptions = self.num_preemptions
        budget = self._schedule_running(rows, self._config.max_turn_tokens)
        if self.num_preemptions == preemptions:  # else the victim would come straight back
            self._admit(rows, budget)
        if not rows:
            return None
        self._turn = Turn(tuple(rows.values()))
        return self._turn

    def _schedule_running(self, rows: dict[int, TurnRow], budget: int) -> int:
        decoding = [sequence for sequence in self._running.values() if sequence.num_pending == 1]
        catching_up = [sequence for sequence in self._running.values() if sequence.num_pending > 1]
        for sequence in decoding + catching_up:
            if budget == 0 or len(rows) == self._config.max_batch:
                break
            if not sequence.blocks:  # preempted by an earlier one of this loop
                continue
            count = min(sequence.num_pending, budget)
            if self._make_room(sequence, count, rows):
                rows[sequence.id] = row_of(sequence, count)
                budget -= count
        return budget

    def _make_room(self, sequence: Sequence, count: int, rows: dict[int, TurnRow]) -> bool:
        """Blocks for `count` more tokens, preempting later arrivals if need be; False if it had to yield itself."""
        missing = self.pool.blocks_for(sequence.num_computed + count) - len(sequence.blocks)
        while missing > 0:
            blocks = self.pool.allocate(missing)
            if blocks is not None:
                sequence.blocks.extend(blocks)
                return True
            victim = next(reversed(self._running.values()))
            if victim is sequence and len(self._running) == 1:
                self._refuse(sequence)
                return False
            rows.pop(victim.id, None)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._let_go(sequence)
        del self._running[sequence.id]
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _admit(self, rows: dict[int, TurnRow], budget: int) -> None:
        held_back: list[Sequence] = []
        while self._waiting and budget > 0 and len(self._running) < self._config.max_batch:
            sequence = self._waiting.popleft()
            if not sequence.is_ready:
                held_back.append(sequence)
                continue
            if not self._fits(sequence):  # before it has pushed others out in vain
                self._refuse(sequence)
                continue
            count = self._start(sequence, budget)
            if count == 0:
                held_back.append(sequence)
                break
            self._running[sequence.id] = sequence
            self._running = dict(sorted(self._running.items()))
            rows[sequence.id] = row_of(sequence, count)
            budget -= count
        self._waiting.extendleft(reversed(held_back))

    def _fits(self, sequence: Sequence) -> bool:
        return self.pool.blocks_for(len(sequence.tokens)) <= self.pool.target

    def _refuse(self, sequence: Sequence) -> None:
        """It is larger than the whole pool. The gateway cannot know while the model is not loaded."""
        self._end(sequence)
        event = end_event(sequence, FinishReason.ERROR, _TOO_LARGE.format(self.pool.target))
        self._failed.append(msgspec.structs.replace(event, unprocessable=True))
