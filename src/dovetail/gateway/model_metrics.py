"""What each model's requests got, in the few metrics that a person asks for: attainment, median TTFT and TPOT.

Histograms for dashboards are in `metrics`; this is for `dovetail ps` and `/api/models`.
"""

from __future__ import annotations

from collections import Counter, deque
from statistics import median

from dovetail.gateway.slo import SloOutcome

WINDOW = 512  # latencies of the last requests, so that the median follows the load


class ModelMetrics:
    """Outcomes since the server started, latencies of the last choices."""

    def __init__(self) -> None:
        self.outcomes: Counter[SloOutcome] = Counter()
        self._ttft_s: deque[float] = deque(maxlen=WINDOW)
        self._tpot_s: deque[float] = deque(maxlen=WINDOW)

    def add_ttft(self, seconds: float) -> None:
        self._ttft_s.append(seconds)

    def add_tpot(self, seconds: float) -> None:
        self._tpot_s.append(seconds)

    @property
    def num_requests(self) -> int:
        """Those with targets."""
        return self.outcomes.total()

    @property
    def attainment(self) -> float | None:
        """Share of requests whose every token came in time; refused and failed ones had none."""
        return self.outcomes["attained"] / self.num_requests if self.num_requests else None

    @property
    def ttft_p50_s(self) -> float | None:
        return median(self._ttft_s) if self._ttft_s else None

    @property
    def tpot_p50_s(self) -> float | None:
        return median(self._tpot_s) if self._tpot_s else None
