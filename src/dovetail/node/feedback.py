"""What is learnt from the durations of turns, several turns at once: after an iteration every line of code has to come
from memory again, so learning from each by itself would cost as much as choosing the next."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from dovetail import logschema
from dovetail.eventlog import EventLog
from dovetail.node.events import Computed
from dovetail.node.underway import Underway
from dovetail.policy.latency import prompts_s
from dovetail.profiles.live import LiveLatency
from dovetail.profiles.timings import TurnTimings, kind_of

ENOUGH = 16
KEPT_GAPS = 4096  # of which the distribution is reported
TIMINGS_TURNS = 100  # that many from one line on the node's timings to the next


class TurnGaps:
    """Seconds between the end of a turn and the start of the next, while there was work."""

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=KEPT_GAPS)
        self.last_s = 0.0  # before the turn that runs or ran last
        self.ended_s: float | None = None  # when the last turn did; None = the device was idle since

    def begin(self, now: float) -> None:
        self.last_s = 0.0 if self.ended_s is None else now - self.ended_s
        if self.ended_s is not None:
            self.seconds.append(self.last_s)

    def rest(self) -> None:
        """The device is idle."""
        self.ended_s = None


class Observation(NamedTuple):
    """One turn that has ended."""

    latency: LiveLatency
    batch: int  # 0 = a prefill
    tokens: int
    took_s: float
    gap_s: float  # before it
    is_beside_load: bool


class LatencyFeedback:
    def __init__(self, log: EventLog | None) -> None:
        self._log = log
        self._timings = TurnTimings()
        self._observed: list[Observation] = []

    def observe(self, underway: Underway, computed: Computed, gap_s: float, now: float, is_beside_load: bool) -> None:
        """A turn that has ended, before its requests are counted on; `gap_s` lay before it. Rows of drafts cost what
        as many requests more would have."""
        turn, draft_rows = underway.turn, computed.draft_rows
        gap_s = gap_s if underway.beneath is None else 0.0  # else that lay before what it was let into
        took_s = now - underway.started_s - computed.drafting_s + (gap_s if computed.was_ahead else 0.0)
        instance, prompts = turn.instance, turn.prompts
        latency = instance.hosting.latency
        if not isinstance(latency, LiveLatency):
            return
        batch, tokens = len(turn.decoding), turn.decoded_tokens
        if prompts:
            parts = [(share.start, share.tokens) for share in prompts]
            if batch:  # a prompt of so many tokens more, beside reading the contexts of those who run
                took_s -= latency.reading_s(batch, tokens)
                parts.append((0, batch))
            batch, tokens = 0, sum(count for _, count in parts)
            # Without what lay before them, by what was known before anything was learned: else it learns from itself.
            took_s *= latency.base.prefill_s(tokens) / prompts_s(latency.base, parts)
        elif batch and draft_rows:
            batch, tokens = batch + draft_rows, tokens + draft_rows * tokens // batch
        if batch or prompts:  # else everyone left during the turn
            self.add(Observation(latency, batch, tokens, took_s, gap_s, is_beside_load), now)

    def add(self, observation: Observation, now: float) -> None:
        self._observed.append(observation)
        if observation.batch == 0 or len(self._observed) >= ENOUGH:  # a prefill is long enough to learn from it at once
            self.learn(now)

    def learn(self, now: float) -> None:
        observed, self._observed = self._observed, []
        for one in observed:
            if one.batch:
                expected_s = one.latency.observe_decode(one.batch, one.tokens, one.took_s)
            else:
                expected_s = one.latency.observe_prefill(one.tokens, one.took_s)
            if self._log is not None:
                self._note(self._log, one, expected_s, now)

    def _note(self, log: EventLog, one: Observation, expected_s: float, now: float) -> None:
        kind = kind_of(one.batch == 0, one.is_beside_load, one.batch or one.tokens)
        self._timings.add(kind, one.took_s, expected_s, one.gap_s)
        if self._timings.turns % TIMINGS_TURNS == 0:
            timings = self._timings
            sums = {"took_s": timings.took_s, "expected_s": timings.expected_s}
            log.write(now, logschema.PACE, turns=timings.turns, gap_s=timings.gap_s, **sums)
