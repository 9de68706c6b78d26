"""The cheapest nodes for a catalogue of language models: fleets are tried in the simulator, which decides as a server
does. No formula stands in for it.

Attainment is taken to rise with every node. The search then walks the border between fleets that suffice and fleets
that do not, halving each row, as many rows at once as there are processes. The border does not depend on prices, so
other prices are answered from it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from dovetail.plan.fleet_try import Counts, FleetInputs, KindSection, ServedModel, Trial, Try
from dovetail.plan.prices import Machine, Section

_PRICE_FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)
OnTry = Callable[[Try], None]


@dataclass(frozen=True)
class Fleet:
    kinds: tuple[str, ...]
    machines: tuple[Machine, ...]
    target: float
    tries: tuple[Try, ...]
    wall_s: float

    def per_hour(self, counts: Counts, factors: Mapping[str, float] | None = None) -> float:
        scale = factors or {}
        priced = zip(self.kinds, self.machines, counts, strict=True)
        return sum(count * machine.per_hour * scale.get(kind, 1.0) for kind, machine, count in priced)

    def enough(self, factors: Mapping[str, float] | None = None) -> list[Try]:
        """Fleets that suffice, the cheapest first."""
        found = [tried for tried in self.tries if tried.is_complete and tried.attainment >= self.target]
        return sorted(found, key=lambda tried: self.per_hour(tried.counts, factors))

    def price_sensitivity(self) -> list[tuple[str, float, Try | None]]:
        """The best fleet if one kind of machine cost so many times as much."""
        return [
            (kind, factor, next(iter(self.enough({kind: factor})), None))
            for kind in self.kinds
            for factor in _PRICE_FACTORS
        ]


@dataclass(frozen=True)
class Confirmed:
    """A fleet with further seeds."""

    best: Try
    attainments: tuple[float, ...]  # by seed, the search's own first

    def holds(self, target: float) -> bool:
        return min(self.attainments) >= target


class FleetPlanner:
    """Simulates in `jobs` processes, which it owns until close()."""

    def __init__(self, inputs: FleetInputs, jobs: int = 1) -> None:
        self.inputs = inputs
        self._jobs = jobs
        self._tries: dict[Counts, Try] = {}
        spawned = multiprocessing.get_context("spawn")
        self._pool = (
            ProcessPoolExecutor(jobs, spawned, _open_inputs, (inputs.path, inputs.prices)) if jobs > 1 else None
        )

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, on_try: OnTry | None = None) -> Fleet:
        started = time.perf_counter()
        limits = list(self.inputs.file.nodes.values())
        if len(limits) == 1:
            self._walk((), limits[0], on_try)
        else:
            self._border(limits[0], limits[1], on_try)
        tries = tuple(self._tries.values())
        wall_s = time.perf_counter() - started
        return Fleet(self.inputs.kinds, self.inputs.machines, self.inputs.file.attainment, tries, wall_s)

    def trial(self, counts: Counts, seed: int | None = None, policy: str | None = None) -> Trial:
        file = self.inputs.file
        return Trial(counts, file.seed if seed is None else seed, policy or file.policy)

    def simulate(self, trials: Iterable[Trial]) -> list[Try]:
        if self._pool is None:
            return [self.inputs.simulate(trial) for trial in trials]
        return list(self._pool.map(_simulate, trials))

    def confirm(self, fleet: Fleet, seeds: int, on_try: OnTry | None = None) -> list[Confirmed]:
        """Fleets that suffice by rising price, until one does with every seed; that one is the last."""
        confirmed: list[Confirmed] = []
        for tried in fleet.enough():
            others = self.simulate(self.trial(tried.counts, self.inputs.file.seed + more) for more in range(1, seeds))
            if on_try is not None:
                for other in others:
                    on_try(other)
            confirmed.append(Confirmed(tried, (tried.attainment, *(other.attainment for other in others))))
            if confirmed[-1].holds(fleet.target):
                break
        return confirmed

    def _border(self, first: KindSection, second: KindSection, on_try: OnTry | None) -> None:
        """With one more of the second kind, no more of the first are needed than before."""
        most = first.max
        with ThreadPoolExecutor(self._jobs) as threads:
            for rows in _batched(range(second.min, second.max + 1), self._jobs):
                limit = KindSection(min=first.min, max=most)
                found = [threads.submit(self._walk, (others,), limit, on_try) for others in rows]
                enough = [least for least in (row.result() for row in found) if least is not None]
                most = min([most, *enough])
                if first.min in enough:
                    return

    def _walk(self, others: Counts, limit: KindSection, on_try: OnTry | None) -> int | None:
        """The least of the first kind that suffices, by halving; None if the most do not."""
        if not self._suffices((limit.max, *others), on_try):
            return None
        low, high = limit.min, limit.max  # high suffices; below low nothing is allowed
        while low < high:
            middle = (low + high) // 2
            if self._suffices((middle, *others), on_try):
                high = middle
            else:
                low = middle + 1
        return high

    def _suffices(self, counts: Counts, on_try: OnTry | None) -> bool:
        if not any(counts):
            return False
        found = self._tries.get(counts)
        if found is None:
            file = self.inputs.file
            (found,) = self.simulate([Trial(counts, file.seed, file.policy, may_stop=True)])
            self._tries[counts] = found
            if on_try is not None:
                on_try(found)
        return found.is_complete and found.attainment >= self.inputs.file.attainment


@contextmanager
def fleet_planner(path: Path, prices: str | None = None, jobs: int = 1) -> Iterator[FleetPlanner]:
    planner = FleetPlanner(FleetInputs(path, prices), jobs)
    try:
        yield planner
    finally:
        planner.close()


_opened: FleetInputs | None = None  # of a process of the pool


def _open_inputs(path: Path, prices: str | None) -> None:
    global _opened
    _opened = FleetInputs(path, prices)


def _simulate(trial: Trial) -> Try:
    assert _opened is not None
    return _opened.simulate(trial)


def _batched(values: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    left = iter(values)
    while batch := tuple(itertools.islice(left, size)):
        yield batch


class FleetPlan(Section):
    """What `apply` starts, and what was found."""

    kind: str = "fleet"
    prices: str
    nodes: dict[str, int]
    per_hour: float
    attainment: float
    serve: dict[str, ServedModel] = Field(default_factory=dict)


def fleet_plan(inputs: FleetInputs, fleet: Fleet, best: Try) -> FleetPlan:
    return FleetPlan(
        prices=inputs.sheet.name,
        nodes=dict(zip(fleet.kinds, best.counts, strict=True)),
        per_hour=fleet.per_hour(best.counts),
        attainment=best.attainment,
        serve=inputs.file.serve,
    )
