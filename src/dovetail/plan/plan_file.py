"""A plan as YAML: for every group its applications, mode, sizes, batch and waiting time, and what is forecast of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field

from dovetail.errors import ConfigError
from dovetail.plan.batching import App
from dovetail.plan.function_profile import FunctionProfile
from dovetail.plan.grouping import Group
from dovetail.plan.options import ALL_MODES, Mode
from dovetail.plan.prices import PriceSheet, Section, parse_section, read_yaml
from dovetail.plan.provision import Provisioner


class PlannedApp(Section):
    rate: float = Field(gt=0)
    slo_s: float = Field(gt=0)
    wait_s: float = Field(ge=0)  # the longest that a request waits for others


class Forecast(Section):
    p99_s: float  # of a full batch's run, with the reserve
    mean_s: float  # of a run of the expected batch
    expected_batch: float = Field(ge=1)
    cold_share: float
    cost_per_request: float
    cost_per_hour: float


class PlannedGroup(Section):
    name: str
    model: str
    apps: dict[str, PlannedApp] = Field(min_length=1)
    mode: Mode
    batch: int = Field(ge=1)
    vcpus: tuple[float, ...] = Field(min_length=1)  # of the function, or of a worker of each stage
    memory_gb: tuple[float, ...]
    gpu_gb: float = 0.0
    warm: int = 0  # functions that are kept ready
    template: int | None = None  # of the profile, if partitioned
    forecast: Forecast

    def applications(self) -> list[App]:
        return [App(name, self.model, app.rate, app.slo_s) for name, app in self.apps.items()]

    @property
    def rate(self) -> float:
        return sum(app.rate for app in self.apps.values())


class FunctionPlan(Section):
    kind: str = "functions"
    prices: PriceSheet
    cold_starts: bool
    reserve: float | None = Field(default=None, ge=0)  # as in the file of applications
    modes: tuple[Mode, ...] = ALL_MODES
    profiles: dict[str, FunctionProfile]  # by model: what the plan was made with
    groups: tuple[PlannedGroup, ...] = Field(min_length=1)

    @property
    def cost_per_hour(self) -> float:
        return sum(group.forecast.cost_per_hour for group in self.groups)

    @property
    def cost_per_request(self) -> float:
        return self.cost_per_hour / 3600 / sum(group.rate for group in self.groups)


def make_plan(groups: Sequence[Group], provisioners: Mapping[str, Provisioner]) -> FunctionPlan:
    """The groups as they were found, with forecasts that count their batches exactly."""
    refined = [Group(g.apps, provisioners[g.apps[0].model].refined(g.config, g.apps)) for g in groups]
    planned = tuple(_planned(f"{group.apps[0].model}-{index}", group) for index, group in enumerate(refined))
    first = next(iter(provisioners.values()))
    profiles = {model: provisioner.profile for model, provisioner in provisioners.items()}
    return FunctionPlan(
        prices=first.sheet,
        cold_starts=first.cold_starts,
        reserve=first.reserve,
        modes=first.modes,
        profiles=profiles,
        groups=planned,
    )


def _planned(name: str, group: Group) -> PlannedGroup:
    config, option = group.config, group.config.option
    latest_s = option.p99_s + config.start_s
    waits = {app.name: app.slo_s - latest_s if option.batch > 1 else 0.0 for app in group.apps}
    size = min(round(config.expected_batch), option.batch)
    return PlannedGroup(
        name=name,
        model=group.apps[0].model,
        apps={app.name: PlannedApp(rate=app.rate, slo_s=app.slo_s, wait_s=max(waits[app.name], 0.0)) for app in
              group.apps},
        mode=option.mode,
        batch=option.batch,
        vcpus=option.vcpus,
        memory_gb=option.memory_gb,
        gpu_gb=option.gpu_gb,
        warm=config.warm,
        template=option.template if option.mode is Mode.PARTITIONED else None,
        forecast=Forecast(
            p99_s=option.p99_s,
            mean_s=option.mean_s[size - 1],
            expected_batch=config.expected_batch,
            cold_share=config.cold_share,
            cost_per_request=config.cost_per_request,
            cost_per_hour=config.cost_per_s * 3600,
        ),
    )  # fmt: skip


def write_plan(path: Path, plan: BaseModel) -> None:
    raw: dict[str, Any] = plan.model_dump(mode="json", exclude_none=True)
    path.write_text(yaml.safe_dump(raw, sort_keys=False, default_flow_style=None, width=120))


def read_plan(path: Path) -> FunctionPlan:
    raw = read_yaml(path)
    if "groups" not in raw:
        raise ConfigError(f"{path}: not a plan of functions, which `dovetail plan FILE --out {path}` writes")
    return parse_section(FunctionPlan, raw, str(path), is_written_by_us=True)
