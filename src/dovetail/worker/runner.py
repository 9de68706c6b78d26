"""One model instance with its real memory: a scheduler for its sequences and the executor that computes them.

Runs what it is told and measures how long that takes; whose turn it is and how large its pool may be is the runtime's.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass

from dovetail import messages
from dovetail.engine.adapters import PackedAdapter
from dovetail.engine.devices import Adaptable, DeviceExecutor, LayerReading, Preemptible
from dovetail.engine.late_rows import ArrivingExecutor
from dovetail.engine.preemption import PreemptionPoint
from dovetail.errors import CheckpointError
from dovetail.sched.blocks import BlockPool
from dovetail.sched.drafts import NO_DRAFTS
from dovetail.sched.scheduler import NO_QUOTAS, Completed, Scheduler, SchedulerConfig
from dovetail.sched.sequence import Sequence
from dovetail.sched.turn import Outcome, Turn, TurnRow
from dovetail.types import ModelCard
from dovetail.worker.draft_model import DraftModel
from dovetail.worker.speculation import Costs, Speculator

log = logging.getLogger("dovetail.worker")

MAX_SPANS = 1024  # between two messages, about a second


@dataclass(slots=True)
class Meter:
    turns: int = 0
    tokens: int = 0
    seconds: float = 0.0
    overhead_seconds: float = 0.0  # between iterations while there was work
    moves: int = 0  # sequences that lost their blocks


class ModelRunner:
    def __init__(
        self,
        card: ModelCard,
        executor: DeviceExecutor,
        config: SchedulerConfig,
        block_size: int,
        max_adapters: int = 0,
        speculator: Speculator | None = None,
    ) -> None:
        self.card = card
        self.executor = executor
        self._layers = executor.layer_source if isinstance(executor, LayerReading) else None
        self.reads_layers = self._layers is not None  # from the disk, with every iteration
        self._arriving = executor if isinstance(executor, ArrivingExecutor) else None
        self.scheduler = Scheduler(config, BlockPool(0, block_size))
        self.meter = Meter()
        self.speculator = speculator  # None = no drafts
        self.idle_since: float | None = None  # None = busy, or its pages are released already
        self.idle_turns = 0  # that it had had by then
        self.is_released = True  # no KV page has been written since they were last given back
        self.max_batch = config.max_batch
        self._max_adapters = max_adapters or config.max_batch
        self._max_turn_tokens = config.max_turn_tokens
        self._ahead: Turn | None = None  # launched after the one under way, on the bet that it will be asked for next
        self.rows: dict[int, TurnRow] = {}  # by sequence: what the last iteration computed, if there were quotas
        self.draft_rows = 0  # of the last iteration
        self.was_ahead = False  # the last iteration had been launched before it was asked for
        self.was_typical = True  # it took as long as others like it will
        self._collected_s = 0.0  # when the last one was
        self._drafting_s = 0.0  # that the drafts of the next iteration took
        self._adapters: set[str] = set()  # keys of those that the executor has
        self._spans: deque[messages.TurnSpan] = deque(maxlen=MAX_SPANS)  # iterations that nobody was told of yet

    def propose(self, sequences: Several[Sequence], batch: int, costs: Callable[[], Costs]) -> dict[int, list[int]]:
        """Drafts for the next iteration of these. A draft model that fails drafts no more."""
        started_s = time.monotonic()
        try:
            return self.speculator.propose(sequences, batch, costs, self.scheduler.pool) if self.speculator else {}
        except Exception:  # nobody needs a draft
            log.error("%s: its draft model failed and is given up\n%s", self.card.name, traceback.format_exc())
            if self._draft_model is None or self.speculator is None:
                raise
            self.speculator.drop_model()
            return {}
        finally:
            self._drafting_s = time.monotonic() - started_s

    def iterate(
        self,
        sequences: Several[Sequence],
        meanwhile: Callable[[], None] = lambda: None,
        *,
        quotas: Mapping[int, int] = NO_QUOTAS,
        drafts: Mapping[int, Several[int]] = NO_DRAFTS,
        goes_on: bool = False,
        preemption: PreemptionPoint | None = None,
    ) -> Completed:
        """One iteration of exactly these sequences, of which those with a quota compute no more than that. Ends that
        came of it are the caller's to report. Drafts are those that `propose` made. `meanwhile` is called when it has
        been launched: a device that computes by itself does so beside it. `goes_on`: the same sequences are likely to
        be next; a device that can begins with them before this iteration is looked at, and what it did is dropped if
        others are. `preemption`: it may stop for that, if its executor can."""
        self.was_typical = True
        turn = self._resume(sequences) or self.scheduler.turn_of(sequences, quotas, drafts)
        self.rows = {row.sequence: row for row in turn.rows} if turn is not None and quotas else {}
        self.draft_rows = sum(len(row.draft) for row in turn.rows) if turn is not None and drafts else 0
        if turn is None:
            return self.scheduler.take_failed()
        self.is_released = False
        started = self._collected_s if self.was_ahead else time.monotonic() - self._drafting_s
        self._drafting_s = 0.0
        try:
            if not self.was_ahead:
                self.executor.launch(turn)
            if goes_on and self.executor.is_pipelined:
                self._launch_next()
            meanwhile()
            outcome = self._collect(preemption)
            self.was_typical = self.executor.was_typical
            if self.reads_layers and preemption is not None and preemption.away_s:
                self.was_typical = False  # layers were read meanwhile
        except Exception as error:  # one model's fault must not end the others
            log.error("%s: iteration failed\n%s", self.card.name, traceback.format_exc())
            self._discard()
            return self._forget(self.scheduler.fail_turn(f"the iteration failed: {type(error).__name__}"))
        self._collected_s = time.monotonic()
        seconds = self._collected_s - started - (preemption.away_s if preemption is not None else 0.0)
        num_tokens = turn.num_tokens
        self.meter.turns += 1
        self.meter.tokens += num_tokens
        self.meter.seconds += seconds
        traced = tuple([one.request_id for one in sequences if one.is_traced])
        is_best_effort = all(one.is_best_effort for one in sequences)
        self._spans.append(messages.TurnSpan(self.card.name, started, seconds, num_tokens, traced, is_best_effort))
        if drafts and self.speculator is not None:
            self.speculator.observe(turn, outcome)
        return self._forget(self.scheduler.complete(outcome))

    @property
    def has_begun_next(self) -> bool:
        """What is likely to be next is being computed already."""
        return self._ahead is not None

    @property
    def disk_speed(self) -> float | None:
        """Bytes per second at which its layers were read so far; None where nothing was."""
        return self._layers.speed if self._layers is not None else None

    def lacks_rows(self, sequences: Several[Sequence], drafts: Mapping[int, Several[int]]) -> bool:
        """Whether the embedding has not all rows of their tokens yet; those that are missing come next."""
        late = self._arriving.late_rows if self._arriving is not None else None
        if late is None:
            return False
        return late.lacks(
            token for one in sequences for token in (*one.tokens[one.num_computed :], *drafts.get(one.id, ()))
        )

    def wait_for_rows(self) -> bool:
        """For a moment; False where they will never come, which the iteration itself will say."""
        late = self._arriving.late_rows if self._arriving is not None else None
        try:
            if late is not None:
                late.wait()
        except CheckpointError:
            return False
        return True

    def _collect(self, preemption: PreemptionPoint | None) -> Outcome:
        executor = self.executor
        if preemption is None or not isinstance(executor, Preemptible):
            return executor.collect()
        executor.preemption = preemption
        try:
            return executor.collect()
        finally:
            executor.preemption = None

    def _launch_next(self) -> None:
        following = self.scheduler.turn_after()
        if following is not None and self.executor.launch_next(following):
            self._ahead = following

    def _resume(self, sequences: Several[Sequence]) -> Turn | None:
        """What was launched ahead, if it is these that were meant."""
        ahead, self._ahead = self._ahead, None
        resumed = self.scheduler.resume_turn(ahead, sequences) if ahead is not None else None
        self.was_ahead = resumed is not None
        if ahead is not None and resumed is None:
            self.executor.discard()
        return resumed

    def _discard(self) -> None:
        self._ahead = None
        self.executor.discard()

    def take_spans(self) -> list[messages.TurnSpan]:
        taken = list(self._spans)
        self._spans.clear()
        return taken

    def batches(self, sequences: Several[Sequence], quotas: Mapping[int, int] = NO_QUOTAS) -> list[list[Sequence]]:
        """As many as fit into one iteration together, and those who shall share none."""
        if not quotas and self._fits(sequences):
            return [list(sequences)] if sequences else []
        together = [sequence for sequence in sequences if not sequence.is_alone]
        if self._max_adapters < self.max_batch:
            together.sort(key=lambda sequence: sequence.adapter)
        found = [[sequence] for sequence in sequences if sequence.is_alone]
        batch: list[Sequence] = []
        tokens = 0
        for sequence in together:
            wanted = sequence.num_pending  # one, or a few more of one that was handed over, or a prompt
            if quotas:
                wanted = min(wanted, quotas.get(sequence.id, wanted))
            tokens += wanted
            is_full = len(batch) == self.max_batch or tokens > self._max_turn_tokens
            if batch and (is_full or self._has_all_adapters(batch, sequence)):
                found.append(batch)
                batch, tokens = [], wanted
            batch.append(sequence)
        return [*found, batch] if batch else found

    def _fits(self, sequences: Several[Sequence]) -> bool:
        """Into one iteration, all of them: hundreds that decode, mostly."""
        if len(sequences) > self.max_batch or self._max_adapters < self.max_batch:
            return False
        pending = 0
        for sequence in sequences:
            known = len(sequence.tokens)
            if known < sequence.alone_below:
                return False
            pending += known - sequence.num_computed
        return pending <= self._max_turn_tokens

    def _has_all_adapters(self, batch: Several[Sequence], further: Sequence) -> bool:
        """One more would be of one adapter too many."""
        if self._max_adapters >= self.max_batch:
            return False
        return len({sequence.adapter for sequence in (*batch, further)}) > self._max_adapters

    def resize(self, num_blocks: int) -> None:
        self._discard()
        moves = self.scheduler.resize(num_blocks)
        self._resize(num_blocks, moves)

    def _resize(self, num_blocks: int, moves: Several[tuple[int, int]] = ()) -> None:
        """A draft model has blocks of the same numbers."""
        self.executor.resize(num_blocks, moves)
        if self._draft_model is not None:
            self._draft_model.resize(num_blocks, moves)

    @property
    def _draft_model(self) -> DraftModel | None:
        return self.speculator.model if self.speculator is not None else None

    def bind_adapter(self, key: str, adapter: PackedAdapter | None, problem: str) -> None:
        """Its sequences may name the adapter from now on; without one they fail with the problem."""
        if key not in self._adapters:
            assert isinstance(self.executor, Adaptable), "adapters are for decoders"
            self.executor.add_adapter(key, adapter, problem)
            self._adapters.add(key)

    def drop_adapter(self, key: str) -> None:
        if key in self._adapters:
            assert isinstance(self.executor, Adaptable)
            self._adapters.remove(key)
            self.executor.remove_adapter(key)

    def drop(self, sequence: Sequence) -> None:
        """It goes elsewhere or nowhere: free its blocks and what the executor keeps for it."""
        self.meter.moves += bool(sequence.blocks) and not sequence.aborted
        if self.scheduler.is_in_turn(sequence):  # of an iteration that has stopped: it leaves at its end
            sequence.aborted = True
            return
        self.scheduler.leave(sequence)
        self._forget_one(sequence.id)

    def release_pages(self) -> None:
        """Forget cached prefixes and give the pages back; the addresses stay, the next request touches fresh pages."""
        pool = self.scheduler.pool
        pool.drop_cache()
        pool.check()
        assert pool.num_available == pool.target, "an idle instance holds no block"
        self._discard()
        self._resize(0)
        self._resize(pool.target)
        self.idle_since = None
        self.is_released = True

    def close(self) -> None:
        self._discard()
        self.executor.close()
        if self.speculator is not None:
            self.speculator.drop_model()

    def stats(self, running: int, waiting: int) -> messages.InstanceStats:
        scheduler, meter = self.scheduler, self.meter
        return messages.InstanceStats(
            model=self.card.name,
            running=running,
            waiting=waiting,
            blocks_total=scheduler.pool.target,
            blocks_used=scheduler.pool.num_held,
            blocks_cached=scheduler.pool.num_cached,
            kv_committed_bytes=self._kv_committed_bytes,
            preemptions=self.meter.moves,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            turns=meter.turns,
            turn_tokens=meter.tokens,
            turn_seconds=meter.seconds,
            overhead_seconds=meter.overhead_seconds,
            draft_tokens=self.speculator.proposed if self.speculator is not None else 0,
            accepted_tokens=self.speculator.accepted if self.speculator is not None else 0,
        )

    @property
    def _kv_committed_bytes(self) -> int:
        draft = self._draft_model.executor.kv_committed_bytes if self._draft_model is not None else 0
        return self.executor.kv_committed_bytes + draft

    def _forget(self, completed: Completed) -> Completed:
        for sequence in completed.ended:
            self._forget_one(sequence)
        return completed

    def _forget_one(self, sequence: int) -> None:
        self.executor.forget(sequence)
        if self.speculator is not None:
            self.speculator.forget(sequence)
