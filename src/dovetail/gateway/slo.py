"""S1: whether one request's tokens came in time. Token i is due at arrival + TTFT + i · TPOT; a cold start is grace."""

from __future__ import annotations

from typing import Literal

from dovetail.types import Request, ServiceClass

# What a request with targets got: its tokens in time, too late, no place, or an error that was not its own.
SloOutcome = Literal["attained", "violated", "refused", "failed"]

DEFAULT_TPOT_S = 0.25


def default_ttft_s(num_prompt_tokens: int) -> float:
    return min(max(0.5, num_prompt_tokens / 512), 8.0)


class SloWatch:
    """Follows one request. The slowest choice counts; best effort is never late."""

    def __init__(self, request: Request, arrival: float) -> None:
        self._counts = request.service_class is not ServiceClass.BEST_EFFORT
        self._arrival = arrival
        self._ttft_s = request.slo.ttft_s if request.slo.ttft_s is not None else default_ttft_s(len(request.prompt))
        self._tpot_s = request.slo.tpot_s if request.slo.tpot_s is not None else DEFAULT_TPOT_S
        self._grace_s = 0.0
        self._violated = False

    def excuse(self, grace_s: float) -> None:
        """The first token of some choice had to wait so long for the model's weights. Waiting for anything else, memory
        for them included, is no excuse; the worker knows the difference."""
        self._grace_s = max(self._grace_s, grace_s)

    def token(self, position: int, now: float) -> None:
        """The token at `position` (0 = the first) of some choice is there."""
        due = self._arrival + self._ttft_s + position * self._tpot_s + self._grace_s
        self._violated |= now > due

    @property
    def outcome(self) -> SloOutcome:
        return "violated" if self._violated and self._counts else "attained"
