"""What becomes of requests whose node was lost: they go on elsewhere, from the tokens that they have, or end, because a
request is to blame, was lost too often, got no place in time, or no node is left. Time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from dovetail.cluster.decisions import Failed
from dovetail.cluster.request import RequestState
from dovetail.policy.headroom import INFINITY
from dovetail.types import ISOLATED_TOKENS


@dataclass(frozen=True, slots=True)
class RetryRule:
    """By default a request is tried again for ever."""

    max_attempts: int | None = None  # after losses that the request may be to blame for
    place_s: float = INFINITY  # an answer that has tokens has a place again within this time
    no_node_s: float = INFINITY  # without any node no request waits longer


@dataclass(frozen=True, slots=True)
class Loss:
    """How a node was lost."""

    why: str = "the node is gone"
    suspects: frozenset[int] = frozenset()  # groups of the iteration that it died in; empty = it died between two
    is_cut: bool = False  # it may live, but cannot be reached: no request is to blame


class Retries:
    def __init__(self, rule: RetryRule) -> None:
        self.rule = rule
        self._waiting: list[tuple[float, int]] = []  # heap of (time, request); stale if the request has another time
        self._no_node_by_s = INFINITY
        self._last = Loss()  # for which no node is left

    # When a node was lost

    def judge(self, work: RequestState, loss: Loss, now: float) -> Failed | None:
        """None: it goes on."""
        on_trial = work.is_isolated and work.produced < work.isolated_until
        if on_trial and loss.suspects == {work.group}:
            return Failed(work, "worker_lost", f"{loss.why} twice on this request, the second time on it alone")
        if not loss.is_cut and (not loss.suspects or work.group in loss.suspects):
            if work.attempts == self.rule.max_attempts:
                again = f" again, after {work.attempts} attempts to go on" if work.attempts else ""
                return Failed(work, "worker_lost", f"{loss.why}{again}")
            work.attempts += 1
        work.is_isolated = on_trial or work.group in loss.suspects
        work.isolated_until = work.produced + ISOLATED_TOKENS
        work.lost_why = loss.why
        if work.produced and self.rule.place_s < INFINITY:
            work.place_by_s = now + self.rule.place_s
            heappush(self._waiting, (work.place_by_s, work.id))
        return None

    def placed(self, work: RequestState) -> None:
        work.place_by_s = self._no_node_by_s = INFINITY

    def no_node(self, loss: Loss, now: float) -> None:
        """The last one is gone."""
        if self._no_node_by_s == INFINITY:
            self._no_node_by_s, self._last = now + self.rule.no_node_s, loss

    def found_node(self) -> None:
        self._no_node_by_s = INFINITY

    # Time

    def next_s(self, works: dict[int, RequestState]) -> float | None:
        """When `late` has something to do."""
        self._drop_stale(works)
        next_s = min(self._waiting[0][0] if self._waiting else INFINITY, self._no_node_by_s)
        return next_s if next_s < INFINITY else None

    def late(self, works: dict[int, RequestState], now: float) -> Iterable[Failed]:
        """Those that have waited too long for a place."""
        self._drop_stale(works)
        while self._waiting and self._waiting[0][0] <= now:
            work = works[heappop(self._waiting)[1]]
            work.place_by_s = INFINITY
            seconds = self.rule.place_s
            message = f"{work.lost_why} and was not back within {seconds:g} s"
            yield Failed(work, "worker_restarting", message, retry_after_s=max(seconds, 1.0))
            self._drop_stale(works)

    def _drop_stale(self, works: dict[int, RequestState]) -> None:
        heap = self._waiting
        while heap and ((work := works.get(heap[0][1])) is None or work.place_by_s != heap[0][0]):
            heappop(heap)

    def is_hopeless(self, now: float) -> bool:
        """No node has come up for too long; whoever comes later waits as long again."""
        if now < self._no_node_by_s:
            return False
        self._no_node_by_s = INFINITY
        return True

    @property
    def why_hopeless(self) -> str:
        return f"{self._last.why}, and no worker has come up for {self.rule.no_node_s:g} s"
