"""A smaller model of the same vocabulary that guesses what a model is about to say.

It belongs to the instance that it drafts for and comes and goes with it. Its keys and values lie in blocks of the same
numbers as those of the model itself: whoever frees, moves or resizes those has done so for these.

    text        |------------------ known ------------------|
    model       |--------------- computed ----------------|1|
    draft       |------- computed -------|----- lag --------|--- guessed ---|

What it computed of guessed tokens counts as computed as far as the text goes on like that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

import msgspec

from dovetail.engine.devices import DeviceExecutor
from dovetail.policy.latency import prompt_s
from dovetail.profiles.live import LiveLatency
from dovetail.sched.blocks import BlockPool, PrefixKey
from dovetail.sched.sequence import Sequence
from dovetail.sched.turn import RowOutcome, Turn, TurnRow
from dovetail.types import SamplingParams


@dataclass
class _Progress:
    sampling: SamplingParams
    computed: int = 0  # leading tokens whose keys and values are there
    guessed: list[int] = field(default_factory=list)  # tokens behind them whose keys and values are there, too
    marked: int = 0  # leading blocks that are known to hold this text


class DraftModel:
    def __init__(
        self,
        executor: DeviceExecutor,
        latency: LiveLatency,
        context_length: int,
        vocab_sizes: tuple[int, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`vocab_sizes`: of the draft and of the model, which may have some more that no text has."""
        self.executor = executor
        self.latency = latency
        self._context_length = context_length
        self._vocab_size = min(vocab_sizes)
        self._clock = clock
        self._progress: dict[int, _Progress] = {}  # by sequence
        # By block: the key (`BlockPool.key_of`) of the text that it has been computed for here. What is offered as a
        # prefix need not be: there may have been no drafts then.
        self._texts: dict[int, PrefixKey] = {}

    # What it can do

    def may_draft(self, sequence: Sequence) -> bool:
        """A grammar knows the tokens of the text only."""
        return sequence.sampling.grammar is None and len(sequence.tokens) < self._context_length

    def lag(self, sequence: Sequence, pool: BlockPool) -> int:
        """Known tokens that are not computed here yet; one at least, the last."""
        progress = self._progress.get(sequence.id) or self._begin(sequence, pool)
        tokens, computed = sequence.tokens, progress.computed
        for token in progress.guessed:
            if computed == len(tokens) or tokens[computed] != token:
                break
            computed += 1
        progress.guessed = []
        progress.computed = min(computed, len(tokens) - 1)
        return len(tokens) - progress.computed

    def catching_up_s(self, sequence: Sequence, pool: BlockPool, count: int) -> float:
        """What computing the next `count` tokens of the lag takes."""
        return prompt_s(self.latency, len(sequence.tokens) - self.lag(sequence, pool), count)

    # What it does

    def catch_up(self, sequence: Sequence, pool: BlockPool, count: int) -> None:
        """Compute the next tokens of the lag."""
        self.lag(sequence, pool)
        progress = self._progress[sequence.id]
        start = progress.computed
        if max(sequence.tokens[start : start + count]) >= self._vocab_size:
            return
        row = _row(sequence, sequence.tokens, start, count, progress.sampling)
        _, took_s = self._run((row,))
        progress.computed = start + count
        self._mark(sequence, progress, pool)
        expected_s = prompt_s(self.latency, start, count)
        self.latency.observe_prefill(count, took_s * self.latency.prefill_s(count) / expected_s)

    def draft(self, sequences: Several[Sequence], counts: Mapping[int, int], pool: BlockPool) -> dict[int, list[int]]:
        """What these may go on with, by sequence: as many tokens as are asked for, or fewer. Their blocks have room."""
        made: dict[int, list[int]] = {one.id: [] for one in sequences}
        going = [one for one in sequences if self._is_readable(one, pool)]
        for step in range(max(counts.values(), default=0)):
            going = [one for one in going if counts[one.id] > step]
            if not going:
                break
            rows = tuple(self._next_row(one, made[one.id], step) for one in going)
            outcomes, took_s = self._run(rows)
            count = sum(row.count for row in rows)
            self.latency.observe_decode(count, sum(row.end for row in rows) * count // len(rows), took_s)
            going = [one for one in going if self._take(one, outcomes.get(one.id), made[one.id])]
        for one in sequences:
            if made[one.id]:
                progress = self._progress[one.id]
                progress.computed, progress.guessed = len(one.tokens), made[one.id][:-1]
                self._mark(one, progress, pool)
        return {id: tokens for id, tokens in made.items() if tokens}

    def _is_readable(self, sequence: Sequence, pool: BlockPool) -> bool:
        lag = self.lag(sequence, pool)
        return max(sequence.tokens[-lag:]) < self._vocab_size

    def _next_row(self, sequence: Sequence, made: list[int], step: int) -> TurnRow:
        progress = self._progress[sequence.id]
        start = progress.computed if step == 0 else len(sequence.tokens) + step - 1
        tokens = [*sequence.tokens, *made]
        return _row(sequence, tokens, start, len(tokens) - start, progress.sampling)

    def _take(self, sequence: Sequence, outcome: RowOutcome | None, made: list[int]) -> bool:
        """Whether something may follow."""
        if outcome is None or outcome.error is not None or outcome.token >= self._vocab_size:
            return False
        made.append(outcome.token)
        return (
            outcome.token not in sequence.sampling.stop_token_ids
            and len(sequence.tokens) + len(made) < self._context_length
        )

    def _run(self, rows: tuple[TurnRow, ...]) -> tuple[dict[int, RowOutcome], float]:
        started = self._clock()
        outcome = self.executor.run(Turn(rows))
        return {row.sequence: row for row in outcome.rows}, max(self._clock() - started, 1e-9)

    # What it remembers

    def _begin(self, sequence: Sequence, pool: BlockPool) -> _Progress:
        """The same options and the same draws: what the two models make of them is alike, too."""
        sampling = msgspec.structs.replace(sequence.sampling, logprobs=None, prompt_logprobs=None, logprob_token_ids=())
        progress = self._progress[sequence.id] = _Progress(sampling)
        for block in sequence.blocks:
            key = pool.key_of(block)
            if key is None or self._texts.get(block) != key:
                break
            progress.marked += 1
        progress.computed = progress.marked * pool.block_size
        return progress

    def _mark(self, sequence: Sequence, progress: _Progress, pool: BlockPool) -> None:
        """Full blocks of known text, for whoever begins with the same text."""
        while (progress.marked + 1) * pool.block_size <= progress.computed:
            key = pool.key_of(sequence.blocks[progress.marked])
            if key is None:
                break  # the model itself has not filled it yet, or another block is offered in its place
            self._texts[sequence.blocks[progress.marked]] = key
            progress.marked += 1

    def forget(self, sequence: int) -> None:
        self._progress.pop(sequence, None)
        self.executor.forget(sequence)

    # Memory

    def resize(self, num_blocks: int, moves: Several[tuple[int, int]] = ()) -> None:
        moved = {place: self._texts.get(block) for block, place in moves}
        self._texts = {block: key for block, key in self._texts.items() if block < num_blocks}
        for place, key in moved.items():
            if key is None:
                self._texts.pop(place, None)
            else:
                self._texts[place] = key
        self.executor.resize(num_blocks, moves)

    def close(self) -> None:
        self._progress.clear()
        self._texts.clear()
        self.executor.close()


def _row(sequence: Sequence, tokens: list[int], start: int, count: int, sampling: SamplingParams) -> TurnRow:
    samples = start + count == len(tokens)
    return TurnRow(sequence.id, tokens, start, count, sequence.blocks, sequence.num_prompt, sampling, samples)
