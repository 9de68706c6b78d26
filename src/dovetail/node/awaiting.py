"""Answers that are on their way here (L4). A device that has caught up with one begins no long iteration, for which its
reader would wait: those who answer here go on a few at a time. Where that is no shorter than all at once, or nobody
answers, it waits for what it is told next, further tokens or that the answer goes on here; and not so long that
somebody who answers here would wait for more than two of its own tokens take.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.node.instance import Instance
from dovetail.policy.headroom import INFINITY
from dovetail.policy.rows import is_worth_splitting, latest_s
from dovetail.policy.work import Work

MOST_S = 1.0  # a source lets go between two tokens, and more than that none should take


class Awaiting:
    """One device's."""

    def __init__(self, silence_s: float, *, splits: bool) -> None:
        self._silence_s = silence_s
        self._splits = splits
        self._expected: dict[int, tuple[Instance, float]] = {}  # by request: where it rests, and until when

    def __bool__(self) -> bool:
        return bool(self._expected)

    def expect(self, instance: Instance, work: Work, now: float) -> None:
        """All tokens that are known of it here are computed."""
        self._expected[work.id] = instance, now + MOST_S

    def until_s(self, active: Sequence[Instance], now: float) -> float | None:
        """The device begins nothing before, unless something comes; None: it need not wait."""
        there = self._expected.items()
        self._expected = {id: one for id, one in there if id in one[0].held and one[1] > now}
        if not self._expected or any(one.waiting and one.waiting[0].is_resuming for one in active):
            return None
        until_s = max(one[1] for one in self._expected.values())
        until_s = min(until_s, min((self._begins_s(one) for one in active if one.running), default=INFINITY))
        return until_s if until_s > now else None

    def _begins_s(self, instance: Instance) -> float:
        """When its running requests go on."""
        if self._splits and is_worth_splitting(instance):
            return -INFINITY
        seconds = instance.batch_s()
        return min(instance.spoke_s + seconds, latest_s(instance, self._silence_s) - seconds)

    def clear(self) -> None:
        self._expected.clear()
