"""What a planned group's functions cost by the price sheet, and the account of what became of its requests.

The same for a plan in virtual time and for one that runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.plan.function_profile import FunctionProfile
from dovetail.plan.plan_file import PlannedGroup
from dovetail.plan.prices import PriceSheet

KEPT = 500_000  # requests of a group, for percentiles and for the report: a plan may run for months


class GroupRates:
    """Of one group's functions, per second."""

    def __init__(self, group: PlannedGroup, profile: FunctionProfile, sheet: PriceSheet) -> None:
        sizes = zip(group.vcpus, group.memory_gb, strict=True)
        self._stages = [sheet.per_second(vcpus, memory_gb, group.gpu_gb) for vcpus, memory_gb in sizes]
        self._sheet = sheet
        self._warm = group.warm
        self._workers, self._master = [1], 0.0
        if group.template is not None:
            partition = profile.partitions[group.template]
            master = sheet.smallest_per_second(partition.master_memory_gb)
            assert master is not None, "a plan has no partition that its sheet has no master for"
            self._workers, self._master = [stage.workers for stage in partition.stages], master

    @property
    def _together(self) -> float:
        """Of everything that a cold start starts."""
        return sum(workers * rate for workers, rate in zip(self._workers, self._stages, strict=True))

    def run(self, stages: Sequence[Sequence[float]], total_s: float) -> float:
        """`stages`: seconds of each worker; the master of a pipeline runs for all of the time."""
        calls = [
            self._sheet.invocation(rate, seconds)
            for rate, workers in zip(self._stages, stages, strict=True)
            for seconds in workers
        ]
        return sum(calls) + (self._sheet.invocation(self._master, total_s) if self._master else 0.0)

    def start(self, seconds: float) -> float:
        return self._together * self._sheet.billed_s(seconds) if self._sheet.cold_start_billed else 0.0

    def kept_warm(self, seconds: float) -> float:
        """Functions kept warm are billed for all of the time."""
        return self._warm * self._together * (self._sheet.rates.idle_share or 0.0) * seconds


@dataclass(frozen=True)
class LateRequest:
    """Where its time went."""

    app: str
    arrival_s: float  # by the runtime's clock
    slo_s: float
    waited_s: float  # for others to share a batch with
    queued_s: float  # for a function; after a death, with the run that was lost
    ran_s: float


@dataclass
class Account:
    """What became of one group's requests, and what they cost."""

    group: str
    forecast_per_request: float
    requests: int = 0
    runs: int = 0
    starts: int = 0
    deaths: int = 0
    cost: float = 0.0  # of runs, and of functions kept warm
    start_cost: float = 0.0
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT), repr=False)
    late_requests: deque[LateRequest] = field(default_factory=lambda: deque(maxlen=KEPT), repr=False)
    late: int = 0

    def answer(self, latency_s: float, late: LateRequest | None) -> None:
        self.requests += 1
        self.latencies_s.append(latency_s)
        if late is not None:
            self.late += 1
            self.late_requests.append(late)

    @property
    def forecast(self) -> float:
        return self.forecast_per_request * self.requests


@dataclass(frozen=True)
class Totals:
    """All groups together."""

    groups: tuple[Account, ...]

    @property
    def requests(self) -> int:
        return sum(group.requests for group in self.groups)

    @property
    def late(self) -> int:
        return sum(group.late for group in self.groups)

    @property
    def late_requests(self) -> list[LateRequest]:
        return sorted((late for group in self.groups for late in group.late_requests), key=lambda late: late.arrival_s)

    @property
    def late_share(self) -> float:
        return self.late / max(self.requests, 1)

    @property
    def cost(self) -> float:
        return sum(group.cost for group in self.groups)

    @property
    def start_cost(self) -> float:
        return sum(group.start_cost for group in self.groups)

    @property
    def billed(self) -> float:
        return self.cost + self.start_cost

    @property
    def forecast(self) -> float:
        """Of the same requests."""
        return sum(group.forecast for group in self.groups)

    @property
    def latencies_s(self) -> list[float]:
        return sorted(latency for group in self.groups for latency in group.latencies_s)

    def forecast_error(self, billed: float) -> float:
        return self.forecast / billed - 1 if billed else 0.0
