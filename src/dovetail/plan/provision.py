"""The cheapest configuration of one group of applications that keeps its strictest SLO (P4)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from dovetail.plan.batching import App, Demand, batch_shares, cold_share, demand_of, exact_batch_shares
from dovetail.plan.function_profile import FunctionProfile
from dovetail.plan.latency import share_above, spread_of
from dovetail.plan.options import ALL_MODES, Mode, Option, OptionTable, build_tables
from dovetail.plan.prices import PriceSheet

# Late requests that a plan may expect: a 99th percentile leaves one percent, and estimates are not exact.
LATE_SHARE_ALLOWED = 0.009
# Of them, cold runs of batches that wait for as long as the SLO allows: their warm runs use up the rest.
COLD_SHARE_ALLOWED = 0.004
# Shares of the SLO left for running a CPU batch of several; the rest is for waiting until it is full.
_RUN_SHARES = (0.35, 0.5, 0.65, 0.8, 0.9, 1.0)
MOST_WARM = 4


@dataclass(frozen=True)
class Config:
    """An option for a group, and what is expected of it."""

    option: Option
    timeout_s: float  # T_eq: mean time from a batch's first request to its latest start
    expected_batch: float
    cold_share: float  # of batches that wait for a start
    warm: int  # functions that are kept ready, since a start would come too late
    start_s: float  # of the SLO, kept free for a start
    cost_per_request: float
    cost_per_s: float


@dataclass(frozen=True)
class Rejected:
    """The best of a mode that was not chosen, for --explain."""

    mode: Mode
    config: Config | None  # None = no option of it keeps the SLO
    fastest_s: float  # its least 99th percentile


class Provisioner:
    """One model's options under one price sheet."""

    def __init__(
        self,
        profile: FunctionProfile,
        sheet: PriceSheet,
        modes: Sequence[Mode] = ALL_MODES,
        cold_starts: bool = True,
        reserve: float | None = None,  # None = what the profile measured beside other functions
    ) -> None:
        self.profile = profile
        self.sheet = sheet
        self.modes = tuple(modes)
        self.cold_starts = cold_starts
        self.reserve = reserve
        tables = build_tables(profile, sheet, profile.reserve if reserve is None else reserve)
        self._tables = [table for table in tables if table.mode in modes]
        self._latencies = {id(table): [option.p99_s for option in table.options] for table in self._tables}
        self._by_mode = {mode: [table for table in self._tables if table.mode is mode] for mode in modes}

    def best(self, demand: Demand) -> Config | None:
        return self._cheapest(self._tables, demand)

    def explain(self, demand: Demand) -> Mapping[Mode, Rejected]:
        """The best of every mode."""
        return {
            mode: Rejected(mode, self._cheapest(tables, demand), min(s.options[0].p99_s for s in tables))
            for mode, tables in self._by_mode.items()
            if tables
        }

    def _cheapest(self, tables: Sequence[OptionTable], demand: Demand) -> Config | None:
        best: Config | None = None
        for table in tables:
            fastest_s = table.options[0].p99_s
            if fastest_s > demand.slo_s:
                continue
            if table.batch > 1 and table.batch > demand.rate * demand.timeout_s(fastest_s) + 1:
                continue  # it would hardly ever be full
            for option in self._candidates(table, demand):
                config = self._evaluate(option, demand, best.cost_per_s if best is not None else float("inf"))
                if config is not None and (best is None or config.cost_per_s < best.cost_per_s):
                    best = config
        return best

    def _candidates(self, table: OptionTable, demand: Demand) -> Iterator[Option]:
        """The slowest, and so cheapest, option within the time left; where a start may be part of it, within less."""
        latencies = self._latencies[id(table)]
        if table.mode is Mode.GPU:
            yield from table.options[: bisect_right(latencies, demand.slo_s)]
            return
        limits = [demand.slo_s * share for share in _RUN_SHARES] if table.batch > 1 else [demand.slo_s]
        cold_s = table.options[0].cold_s
        if self.cold_starts and cold_s:
            limits += [limit - cold_s for limit in limits]
        places = {bisect_right(latencies, limit) for limit in limits}
        yield from (table.options[place - 1] for place in sorted(places) if place)

    def _evaluate(self, option: Option, demand: Demand, bound: float) -> Config | None:
        """None where runs, or runs after a start, come too late, or where it costs more per second than `bound`."""
        at_once = self._config(option, demand, 0.0, 0, bound)
        allowed = _cold_allowed(option, demand)
        if at_once is None or at_once.cold_share <= allowed:
            return at_once
        ways = []
        if option.p99_s + option.cold_s <= demand.slo_s:  # a start takes from the time to wait
            ways.append(self._config(option, demand, option.cold_s, 0, bound))
        if self.sheet.rates.idle_share is not None:
            warm = (self._config(option, demand, 0.0, count, bound) for count in range(1, MOST_WARM + 1))
            enough = (config for config in warm if config is not None and config.cold_share <= allowed)
            ways += list(islice(enough, 1))
        return min((way for way in ways if way is not None), key=lambda config: config.cost_per_s, default=None)

    def refined(self, config: Config, apps: Sequence[App]) -> Config:
        """The same configuration, its batches counted exactly: too slow for every try, worth it for a forecast."""
        option, demand = config.option, demand_of(apps)
        shares = exact_batch_shares(apps, option.p99_s + config.start_s, option.batch)
        found = self._priced(option, demand, shares, config.timeout_s, config.start_s, config.warm, float("inf"))
        assert found is not None
        return found

    def _config(
        self, option: Option, demand: Demand, start_s: float, warm: int, bound: float = float("inf")
    ) -> Config | None:
        """`start_s`: of the SLO, kept free for a start; `warm`: functions that are kept ready."""
        timeout_s = demand.timeout_s(option.p99_s + start_s) if option.batch > 1 else 0.0
        shares = batch_shares(demand.rate * timeout_s, option.batch)
        return self._priced(option, demand, shares, timeout_s, start_s, warm, bound)

    def _priced(
        self,
        option: Option,
        demand: Demand,
        shares: Sequence[float],
        timeout_s: float,
        start_s: float,
        warm: int,
        bound: float,
    ) -> Config | None:
        """None if it costs more per second than `bound`."""
        size = sum(n * share for n, share in enumerate(shares, 1))
        cost = sum(share * price for share, price in zip(shares, option.costs, strict=True))
        batches = demand.rate / size
        if cost * batches >= bound:  # starts would only add to it
            return None
        cold = idle = 0.0
        if self.cold_starts and option.cold_s:
            busy_s = sum(share * mean for share, mean in zip(shares, option.mean_s, strict=True))
            cold = cold_share(batches, busy_s, self.sheet.keep_alive, size, warm)
            cost += cold * option.cold_cost
            idle = warm * option.per_second * (self.sheet.rates.idle_share or 0.0)
        per_s = cost * batches + idle
        return Config(option, timeout_s, size, cold, warm, start_s, per_s / demand.rate, per_s)


def _cold_allowed(option: Option, demand: Demand) -> float:
    """A single request that would be early may be cold more often."""
    if option.batch > 1:
        return COLD_SHARE_ALLOWED
    sigma = spread_of(option.mean_s[0], option.p99_s)
    return max(LATE_SHARE_ALLOWED - share_above(demand.slo_s, option.mean_s[0], sigma), COLD_SHARE_ALLOWED)
