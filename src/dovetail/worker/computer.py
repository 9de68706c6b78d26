"""Computes the turns that a node chooses, on its runners: in as many iterations as each takes, with breaks for others'
answers where the node wants them, and in sight of whoever watches the process. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from dovetail.engine.preemption import HaltingPoint, IsHere, PreemptionPoint
from dovetail.node import events
from dovetail.node.runtime import NodeRuntime
from dovetail.policy.headroom import INFINITY
from dovetail.policy.placement import DeviceKind
from dovetail.pulse import Pulse
from dovetail.sched.scheduler import NO_QUOTAS
from dovetail.sched.sequence import Sequence
from dovetail.types import TokenEvent
from dovetail.worker.drafting import NO_DRAFTS, Drafts, propose
from dovetail.worker.prompts import PromptTurn, SequenceState
from dovetail.worker.runner import ModelRunner

LOOK_S = 0.002  # how often messages are looked for while a layer is awaited
COMPILE_S = 60.0  # the first iteration on a GPU may have its kernels compiled

# Tells the tokens of a model; returns the choices that have ended with them, and notes those with more than one.
Deliver = Callable[[str, tuple[TokenEvent, ...], dict[int, int]], list[int]]


class TurnComputer:
    def __init__(
        self,
        home: NodeRuntime,
        runners: Mapping[int, ModelRunner],
        states: Mapping[int, SequenceState],
        deliver: Deliver,
        clock: Callable[[], float],
        pulse: Pulse,
        *,
        on_pause: Callable[[], None],
        on_launch: Callable[[], None],
        on_halt: Callable[[], None],
    ) -> None:
        self._home, self._runners, self._states, self._deliver = home, runners, states, deliver
        self._clock, self._pulse = clock, pulse
        self._on_pause = on_pause  # called between the chunks of a long prefill: messages may be taken in
        self._on_launch = on_launch  # called when an iteration has begun: what came of the last may be told beside it
        self._on_halt = on_halt  # called while layers of an iteration are awaited: everything else goes on
        self._expected_s = 0.0  # what the turn that runs should take
        self._slice_s = INFINITY  # how long it is computed without a break
        self._extra: dict[int, int] = {}  # by request: tokens beyond one that the last decode gave it
        self._is_broken = False  # something went wrong that was no iteration's fault

    def compute(self, turn: events.Turn) -> None:
        """Until it has ended."""
        runner, self._expected_s = self._runners[turn.instance.id], turn.expected_s
        self._slice_s = turn.slice_s
        if turn.prompts:
            if runner.meter.turns == 0 and self._home.kind is not DeviceKind.CPU:
                self._expected_s += COMPILE_S
            finished, computed = self._compute_prompts(runner, turn)
        else:
            finished, computed = self._decode(runner, turn)
        self._home.turn_ended(self._clock(), finished, computed)
        if runner.has_begun_next and turn.instance.running:  # whoever came meanwhile waits for it in any case
            self._home.node.turns.joined(turn.instance)

    def _compute_prompts(self, runner: ModelRunner, turn: events.Turn) -> tuple[list[int], events.Computed]:
        """In as many iterations as that takes."""
        parts, before = PromptTurn(turn, self._states, runner), runner.meter.tokens
        finished: list[int] = []
        is_typical = True
        while batches := parts.batches():
            for batch in batches:
                finished += self._iterate(runner, batch, quotas=parts.quotas)
                is_typical &= runner.was_typical
                parts.take(runner.rows, finished)
            if parts.is_open:
                assert runner.rows, f"{runner.card.name}: the KV pool is smaller than the node thinks"
                self._on_pause()  # after which somebody may have left
        is_typical &= runner.meter.tokens - before == parts.num_tokens  # else some was in the cache, or was given up
        return finished, events.Computed(parts.computed, is_typical)

    def _decode(self, runner: ModelRunner, turn: events.Turn) -> tuple[list[int], events.Computed]:
        finished: list[int] = []
        sequences = [self._states[id].sequence for id in turn.decoding]
        batches = runner.batches(sequences)
        drafts = propose(self._home, runner, sequences, self._clock, self._pulse) if len(batches) == 1 else NO_DRAFTS
        usual, self._extra = True, {}
        for batch in batches:
            finished += self._iterate(runner, batch, drafts=drafts, goes_on=len(batches) == 1 and self._home.is_settled)
            usual &= runner.was_typical
        return finished, events.Computed(None, usual, runner.was_ahead, self._extra, runner.draft_rows, drafts.took_s)

    def _iterate(
        self,
        runner: ModelRunner,
        batch: list[Sequence],
        *,
        quotas: Mapping[int, int] = NO_QUOTAS,
        drafts: Drafts = NO_DRAFTS,
        goes_on: bool = False,
    ) -> list[int]:
        """One iteration, in sight of whoever watches this process; returns the choices that have ended with it."""
        names = [sequence.request_id for sequence in batch]
        waited = self._wait_for_rows(runner, batch, drafts, names)
        preemption = self._preemption(runner, names)
        self._pulse.begin(names, self._expected_s)
        self._is_broken = False
        completed = runner.iterate(
            batch, self._on_launch, quotas=quotas, drafts=drafts.tokens, goes_on=goes_on, preemption=preemption
        )
        runner.was_typical &= not waited
        self._pulse.end()
        assert not self._is_broken, "what went wrong between two layers was told before"
        return self._deliver(runner.card.name, completed.events, self._extra)

    def _preemption(self, runner: ModelRunner, names: list[str]) -> PreemptionPoint | None:
        if runner.reads_layers:
            return HaltingPoint(lambda is_here: self._halt(names, is_here))
        return PreemptionPoint(self._slice_s, lambda: self._let_in(names)) if self._slice_s != INFINITY else None

    def _wait_for_rows(self, runner: ModelRunner, batch: list[Sequence], drafts: Drafts, names: list[str]) -> bool:
        """For rows of an embedding that is still downloading; others' answers go on. True if it had to wait."""
        waited = False
        while runner.lacks_rows(batch, drafts.tokens) and (waited := runner.wait_for_rows()):
            self._on_launch()
            self._pulse.begin(names, self._expected_s)
            if self._slice_s != INFINITY:
                self._let_in(names)
        return waited

    def _halt(self, halted: list[str], is_here: IsHere) -> float:
        """An iteration of these requests has come to its next layer: others have a turn, and as many as they want until
        the layer has been read. Returns what those took."""
        away_s = 0.0
        while True:
            is_layer_here = is_here(0.0)
            self._pulse.begin(halted, self._expected_s)
            with self._others():
                self._on_halt()
                turn = self._home.interlude(self._clock(), is_layer_here)
                if turn is not None:
                    started_s = self._clock()
                    self.compute(turn)
                    away_s += self._clock() - started_s
            if is_layer_here or is_here(0.0 if turn is not None else LOOK_S):
                return away_s

    @contextmanager
    def _others(self) -> Iterator[None]:
        """Their turns are computed in the middle of one that has stopped."""
        kept = self._expected_s, self._extra, self._slice_s
        is_whole = False
        try:
            yield
            is_whole = True
        finally:  # what ends here, the runner of what has stopped takes for its own fault
            self._is_broken = not is_whole
        self._expected_s, self._extra, self._slice_s = kept

    def _let_in(self, halted: list[str]) -> None:
        """An iteration of these requests has stopped between two layers: others' answers go on. Commands that come of
        that are carried out when it has ended, so that nothing is taken from it meanwhile."""
        with self._others():
            while (turn := self._home.interlude(self._clock())) is not None:
                self.compute(turn)
                self._on_launch()
        self._pulse.begin(halted, self._expected_s)
