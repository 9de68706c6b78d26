"""The cheapest nodes for a catalogue of language models: tried one after another in the simulator, which decides as a
server does. No formula stands in for it.

Attainment is taken to rise with every node. The search then walks the border between fleets that suffice and fleets
that do not, halving each row; a run that has lost too many requests is stopped. The border does not depend on prices,
so other prices are answered from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dovetail.errors import ConfigError
from dovetail.plan.apps import beside
from dovetail.plan.prices import Machine, PriceSheet, parse_section, read_sheet, read_yaml
from dovetail.policy.presets import policy
from dovetail.sim.layout import Layout, ModelSection, NodeSection
from dovetail.sim.metrics import Result
from dovetail.sim.setup import Setup, build

_CHECK_EVERY_S = 10  # of virtual time: whether a run can still reach the target
_PRICE_FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KindSection(_Section):
    """Machines of the price sheet that may be rented."""

    max: int = Field(ge=1)
    min: int = Field(default=0, ge=0)


class ServedModel(_Section):
    """What `apply` serves under a section's name."""

    source: str


class FleetFile(_Section):
    prices: str
    trace: str
    profile: str  # measured iteration times
    catalogue: dict[str, ModelSection] = Field(min_length=1)
    nodes: dict[str, KindSection] = Field(min_length=1, max_length=2)  # by the sheet's name of the machine
    attainment: float = Field(default=0.99, gt=0, lt=1)
    policy: str = "dovetail"
    seed: int = 0
    noise: float = 0.05
    limit_s: float | None = None  # arrivals after this are left out
    serve: dict[str, ServedModel] = {}

    @model_validator(mode="after")
    def _known(self) -> FleetFile:
        unknown = [name for name in self.serve if name not in self.catalogue]
        if unknown:
            raise ValueError(f"serve.{unknown[0]}: not in the catalogue")
        return self


Counts = tuple[int, ...]  # of each kind, in the file's order


@dataclass(frozen=True)
class Try:
    """One fleet, simulated."""

    counts: Counts
    met: int
    requests: int
    wall_s: float
    is_complete: bool  # False = stopped, because it could no longer reach the target

    @property
    def attainment(self) -> float:
        return self.met / self.requests


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

    def best(self, factors: Mapping[str, float] | None = None) -> Try | None:
        enough = [found for found in self.tries if found.is_complete and found.attainment >= self.target]
        return min(enough, key=lambda found: self.per_hour(found.counts, factors), default=None)

    def price_sensitivity(self) -> list[tuple[str, float, Try | None]]:
        """The best fleet if one kind of machine cost so many times as much."""
        return [(kind, factor, self.best({kind: factor})) for kind in self.kinds for factor in _PRICE_FACTORS]


class _Hopeless(Exception):
    pass


class FleetPlanner:
    def __init__(self, path: Path, prices: str | None = None) -> None:
        self.file = parse_section(FleetFile, read_yaml(path), str(path))
        self.sheet: PriceSheet = read_sheet(beside(path, prices or self.file.prices))
        missing = [name for name in self.file.nodes if name not in self.sheet.machines]
        if missing:
            known = ", ".join(self.sheet.machines) or "none"
            raise ConfigError(f"{path}: nodes.{missing[0]}: {self.sheet.name} has no such machine; it has {known}")
        self.trace = path.parent / self.file.trace
        self._profile = path.parent / self.file.profile
        self.kinds = tuple(self.file.nodes)
        self.machines = tuple(self.sheet.machines[kind] for kind in self.kinds)
        self._tries: dict[Counts, Try] = {}

    def run(self, on_try: Callable[[Try], None] | None = None) -> Fleet:
        started = time.perf_counter()
        limits = list(self.file.nodes.values())
        if len(limits) == 1:
            self._walk((), limits[0], on_try)
        else:
            self._border(limits[0], limits[1], on_try)
        tries = tuple(self._tries.values())
        return Fleet(self.kinds, self.machines, self.file.attainment, tries, time.perf_counter() - started)

    def file_layout(self) -> Layout:
        """The catalogue on one node of each kind, for questions about models only."""
        return self._layout(tuple(1 for _ in self.kinds))

    def simulate(self, counts: Counts, seed: int | None = None, policy_name: str | None = None) -> Try:
        """All of it, whatever comes."""
        return self._simulate(counts, seed if seed is not None else self.file.seed, policy_name, may_stop=False)

    def _border(self, first: KindSection, second: KindSection, on_try: Callable[[Try], None] | None) -> None:
        """With one more of the second kind, no more of the first are needed than before."""
        most = first.max
        for others in range(second.min, second.max + 1):
            least = self._walk((others,), KindSection(min=first.min, max=most), on_try)
            if least is not None:
                most = least
            if least == first.min:
                return

    def _walk(self, others: Counts, limit: KindSection, on_try: Callable[[Try], None] | None) -> int | None:
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

    def _suffices(self, counts: Counts, on_try: Callable[[Try], None] | None) -> bool:
        if not any(counts):
            return False
        found = self._tries.get(counts)
        if found is None:
            found = self._tries[counts] = self._simulate(counts, self.file.seed, None, may_stop=True)
            if on_try is not None:
                on_try(found)
        return found.is_complete and found.attainment >= self.file.attainment

    def _simulate(self, counts: Counts, seed: int, policy_name: str | None, may_stop: bool) -> Try:
        simulation = build(self._setup(counts, seed, policy_name))
        requests = len(simulation.arrivals)
        may_lose = requests - self.file.attainment * requests

        def check(now: float) -> None:
            if now % _CHECK_EVERY_S == 0 and _lost(simulation.result) > may_lose:
                raise _Hopeless

        simulation.keep_samples = False
        simulation.on_sample = check if may_stop else None
        started = time.perf_counter()
        try:
            result = simulation.run()
        except _Hopeless:
            lost = _lost(simulation.result)
            return Try(counts, requests - lost, requests, time.perf_counter() - started, is_complete=False)
        return Try(counts, result.met(), requests, time.perf_counter() - started, is_complete=True)

    def _setup(self, counts: Counts, seed: int, policy_name: str | None) -> Setup:
        return Setup(
            trace=self.trace,
            profile=self._profile,
            knobs=policy(policy_name or self.file.policy),
            seed=seed,
            noise=self.file.noise,
            limit_s=self.file.limit_s,
            layout=self._layout(counts),
        )

    def _layout(self, counts: Counts) -> Layout:
        nodes = tuple(
            NodeSection(name=kind, device=machine.device, count=count, hardware=machine.hardware)
            for kind, machine, count in zip(self.kinds, self.machines, counts, strict=True)
            if count
        )
        return Layout(nodes=nodes, models=self.file.catalogue)


def _lost(result: Result) -> int:
    """Requests that are done, and were not met."""
    return sum(record.fate is not None and not record.meets(result.rule) for record in result.records)


class FleetPlan(_Section):
    """What `apply` starts, and what was found."""

    kind: str = "fleet"
    prices: str
    nodes: dict[str, int]
    per_hour: float
    attainment: float
    serve: dict[str, ServedModel] = {}


def fleet_plan(planner: FleetPlanner, fleet: Fleet, best: Try) -> FleetPlan:
    return FleetPlan(
        prices=planner.sheet.name,
        nodes=dict(zip(fleet.kinds, best.counts, strict=True)),
        per_hour=fleet.per_hour(best.counts),
        attainment=best.attainment,
        serve=planner.file.serve,
    )
