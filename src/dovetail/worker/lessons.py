"""What is learnt from the durations of turns, several turns at once: behind an iteration every line of code has to come
from memory again, so learning from each by itself would cost as much as choosing the next."""

from __future__ import annotations

from typing import NamedTuple

from dovetail.policy.latency import Latency
from dovetail.profiles.live import LiveLatency
from dovetail.profiles.timings import kind_of
from dovetail.worker.journal import Journal

ENOUGH = 16


class Lesson(NamedTuple):
    latency: Latency
    batch: int  # 0 = a prefill
    tokens: int
    took_s: float
    gap_s: float  # before it
    is_beside_load: bool


class Lessons:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._lessons: list[Lesson] = []

    def add(self, lesson: Lesson, now: float) -> None:
        self._lessons.append(lesson)
        if lesson.batch == 0 or len(self._lessons) >= ENOUGH:  # a prefill is long enough to learn from it at once
            self.learn(now)

    def learn(self, now: float) -> None:
        lessons, self._lessons = self._lessons, []
        for latency, batch, tokens, took_s, gap_s, is_beside_load in lessons:
            if not isinstance(latency, LiveLatency):
                continue
            if batch:
                expected_s = latency.observe_decode(batch, tokens, took_s)
            else:
                expected_s = latency.observe_prefill(tokens, took_s)
            kind = kind_of(batch == 0, is_beside_load, batch or tokens)
            self._journal.turn(now, kind, took_s, expected_s, gap_s)
