"""A model's function profile as a YAML file: coefficients of its latency in every mode, memory, cold starts, template.

Profiles that come with the package (wrn50-4, wrn50-5) are named without a path.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, model_validator

from dovetail.errors import ConfigError
from dovetail.plan.latency import CpuLatency, ExpCurve, GpuLatency, StepCurve, Transfer
from dovetail.plan.prices import Section, parse_section, read_yaml

PROFILES = Path(__file__).parent / "profiles"
Triple = tuple[float, float, float]


class StepSection(Section):
    """Coefficients above so many vCPUs, where a run has more threads."""

    above: float = Field(gt=0)
    mean: Triple
    p99: Triple


class CurveSection(Section):
    mean: Triple  # α, β, γ
    p99: Triple
    steps: tuple[StepSection, ...] = ()  # rising

    @model_validator(mode="after")
    def _rising(self) -> CurveSection:
        if any(left.above >= right.above for left, right in itertools.pairwise(self.steps)):
            raise ValueError("steps: `above` must rise")
        return self


class GpuSection(Section):
    mean: tuple[float, float]  # ξ1, ξ2
    p99: tuple[float, float]  # κ1, κ2
    memory_gb: float = Field(gt=0)
    max_batch: int = Field(ge=1)
    measured: dict[int, float] = Field(default_factory=dict)  # mean seconds by batch size: the line bends there


class StageSection(Section):
    layers: tuple[int, int]  # first, and one past the last
    workers: int = Field(default=1, ge=1)  # each computes a share of the rows; all as slow as the slowest
    memory_gb: float = Field(gt=0)  # of each worker
    cpu: dict[int, CurveSection]  # by batch size

    @property
    def latency(self) -> CpuLatency:
        return cpu_latency(self.cpu)


class PartitionSection(Section):
    transfer: tuple[float, float]  # θ0, θ1
    stages: tuple[StageSection, ...] = Field(min_length=2)
    master_memory_gb: float = Field(default=0.5, gt=0)  # the master has the least vCPUs that come with it

    @property
    def passing(self) -> Transfer:
        return Transfer(*self.transfer)

    @model_validator(mode="after")
    def _contiguous(self) -> PartitionSection:
        borders = [stage.layers for stage in self.stages]
        if any(left[1] != right[0] for left, right in itertools.pairwise(borders)):
            raise ValueError("stages: each must begin with the layer after the last of the one before")
        if len({tuple(sorted(stage.cpu)) for stage in self.stages}) > 1:
            raise ValueError("stages: every stage needs the same batch sizes")
        return self


class ColdStarts(Section):
    """Seconds from nothing to ready."""

    cpu: float = Field(default=0.0, ge=0)
    gpu: float = Field(default=0.0, ge=0)
    stage: float = Field(default=0.0, ge=0)  # of the slowest stage: they start side by side


class Beside(Section):
    """How many times as long a run takes while functions have all vCPUs of the machine."""

    mean: float = Field(default=1.0, gt=0)
    p99: float = Field(default=1.0, gt=0)


class OnnxFile(Section):
    file: str  # absolute
    sha256: str


class FunctionProfile(Section):
    model: str
    source: str  # measured where, or assumed from what
    onnx: OnnxFile | None = None  # what the model is, where it is not a network of the package
    memory_gb: float = Field(gt=0)  # of the whole model in one function
    vcpus: tuple[float, float]  # least and most that were profiled: an exponential says nothing beyond them
    cpu: dict[int, CurveSection] = Field(min_length=1)
    gpu: GpuSection | None = None
    partitions: tuple[PartitionSection, ...] = ()  # templates to choose from
    cold_start_s: ColdStarts = ColdStarts()
    beside: Beside = Beside()  # on a CPU; a platform's functions do not disturb each other

    @model_validator(mode="after")
    def _from_one(self) -> FunctionProfile:
        if 1 not in self.cpu or any(1 not in partition.stages[0].cpu for partition in self.partitions):
            raise ValueError("cpu: batch size 1 is missing")
        return self

    @property
    def reserve(self) -> float:
        """The share by which plans expect a run on a CPU to be longer than its 99th percentile alone on the machine."""
        return max(self.beside.p99 - 1.0, 0.0)

    @property
    def cpu_latency(self) -> CpuLatency:
        return cpu_latency(self.cpu)

    @property
    def gpu_latency(self) -> GpuLatency | None:
        if self.gpu is None:
            return None
        measured = tuple(sorted(self.gpu.measured.items()))
        return GpuLatency(*self.gpu.mean, *self.gpu.p99, self.gpu.max_batch, measured)


def cpu_latency(curves: dict[int, CurveSection]) -> CpuLatency:
    return CpuLatency(
        {batch: _curve(curve.mean, [(s.above, s.mean) for s in curve.steps]) for batch, curve in curves.items()},
        {batch: _curve(curve.p99, [(s.above, s.p99) for s in curve.steps]) for batch, curve in curves.items()},
    )


def _curve(first: Triple, steps: Iterable[tuple[float, Triple]]) -> StepCurve:
    return StepCurve(ExpCurve(*first), tuple((above, ExpCurve(*step)) for above, step in steps))


def read_function_profile(name: str | Path) -> FunctionProfile:
    path = PROFILES / f"{name}.yaml"
    if not path.exists():
        path = Path(name)
        if path.suffix not in (".yaml", ".yml"):
            known = ", ".join(sorted(file.stem for file in PROFILES.glob("*.yaml")))
            raise ConfigError(f"no function profile {str(name)!r}; there are {known}, or give a .yaml file")
    return parse_section(FunctionProfile, read_yaml(path), str(path))


def write_function_profile(path: Path, profile: FunctionProfile) -> None:
    raw: dict[str, Any] = profile.model_dump(mode="json", exclude_none=True)
    path.write_text(yaml.safe_dump(_rounded(raw), sort_keys=False, default_flow_style=None, width=120))


def _rounded(value: Any) -> Any:
    """Six digits say more than any measurement does."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
