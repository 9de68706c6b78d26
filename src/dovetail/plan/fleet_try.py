"""One fleet in the simulator: a file's catalogue and trace on so many nodes of each kind, decided as a server decides.

A run that has lost too many requests to reach the target is stopped.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, model_validator

from dovetail.errors import ConfigError
from dovetail.plan.apps import beside
from dovetail.plan.prices import Machine, PriceSheet, Section, parse_section, read_sheet, read_yaml
from dovetail.sim.compositions import policy
from dovetail.sim.layout import Layout, ModelSection, NodeSection
from dovetail.sim.metrics import Result
from dovetail.sim.setup import Setup, build

_CHECK_EVERY_S = 10  # of virtual time: whether a run can still reach the target


class KindSection(Section):
    """Machines of the price sheet that may be rented."""

    max: int = Field(ge=1)
    min: int = Field(default=0, ge=0)


class ServedModel(Section):
    """What `apply` serves under a section's name."""

    source: str


class FleetFile(Section):
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
    serve: dict[str, ServedModel] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _known(self) -> FleetFile:
        unknown = [name for name in self.serve if name not in self.catalogue]
        if unknown:
            raise ValueError(f"serve.{unknown[0]}: not in the catalogue")
        return self


Counts = tuple[int, ...]  # of each kind, in the file's order


@dataclass(frozen=True)
class Trial:
    """What to simulate."""

    counts: Counts
    seed: int
    policy: str
    may_stop: bool = False  # as soon as it cannot reach the target


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


class _Hopeless(Exception):
    pass


class FleetInputs:
    """A fleet file, its price sheet, and where its trace and profile lie."""

    def __init__(self, path: Path, prices: str | None = None) -> None:
        self.path, self.prices = path, prices
        self.file = parse_section(FleetFile, read_yaml(path), str(path))
        self.sheet: PriceSheet = read_sheet(beside(path, prices or self.file.prices))
        missing = [name for name in self.file.nodes if name not in self.sheet.machines]
        if missing:
            known = ", ".join(self.sheet.machines) or "none"
            raise ConfigError(f"{path}: nodes.{missing[0]}: {self.sheet.name} has no such machine; it has {known}")
        self.trace = path.parent / self.file.trace
        self._profile = path.parent / self.file.profile
        self.kinds = tuple(self.file.nodes)
        self.machines: tuple[Machine, ...] = tuple(self.sheet.machines[kind] for kind in self.kinds)

    def layout(self, counts: Counts) -> Layout:
        nodes = tuple(
            NodeSection(name=kind, device=machine.device, count=count, hardware=machine.hardware)
            for kind, machine, count in zip(self.kinds, self.machines, counts, strict=True)
            if count
        )
        return Layout(nodes=nodes, models=self.file.catalogue)

    def simulate(self, trial: Trial) -> Try:
        simulation = build(self._setup(trial))
        requests = len(simulation.arrivals)
        may_lose = requests - self.file.attainment * requests

        def check(now: float) -> None:
            if now % _CHECK_EVERY_S == 0 and _lost(simulation.result) > may_lose:
                raise _Hopeless

        simulation.keep_samples = False
        simulation.on_sample = check if trial.may_stop else None
        started = time.perf_counter()
        try:
            result = simulation.run()
        except _Hopeless:
            lost = _lost(simulation.result)
            return Try(trial.counts, requests - lost, requests, time.perf_counter() - started, is_complete=False)
        return Try(trial.counts, result.met(), requests, time.perf_counter() - started, is_complete=True)

    def _setup(self, trial: Trial) -> Setup:
        return Setup(
            trace=self.trace,
            profile=self._profile,
            composition=policy(trial.policy),
            seed=trial.seed,
            noise=self.file.noise,
            limit_s=self.file.limit_s,
            layout=self.layout(trial.counts),
        )


def _lost(result: Result) -> int:
    """Requests that are done, and were not met."""
    return sum(record.fate is not None and not record.meets(result.rule) for record in result.records)
